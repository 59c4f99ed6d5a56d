"""How a command ends when it fails: one message, an exit code, a traceback only on request."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

import typer
from rich.console import Console
from rich.markup import escape

from sluice.engine.protocol import ConfigError, SluiceError

P = ParamSpec("P")

EXIT_FAILED = 1  # something went wrong while it ran
EXIT_CONFIG = 2  # the config, the checkpoint or the command line cannot work

stdout = Console(highlight=False, soft_wrap=True)
stderr = Console(stderr=True, highlight=False, soft_wrap=True)


def reporting(command: Callable[P, None]) -> Callable[P, None]:
    """Turn our errors into `error: ...` and an exit code, unless --debug was given."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except SluiceError as error:
            if kwargs.get("debug"):
                raise
            stderr.print(f"[bold red]error:[/] {escape(str(error))}")
            code = EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED
            raise typer.Exit(code) from None

    return guarded
