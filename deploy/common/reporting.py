"""How a command ends when it fails: one message, an exit code, a traceback only on request.

What nobody foresaw is a bug, and said to be one; its traceback goes to a file.
"""

from __future__ import annotations

import functools
import tempfile
import traceback
from collections.abc import Callable
from typing import ParamSpec

import click
import typer
from rich.console import Console
from rich.markup import escape

from sluice.protocol.messages import ConfigError, SluiceError

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
        except (click.exceptions.Exit, click.ClickException, click.Abort, BrokenPipeError):
            raise  # of the command line itself
        except Exception as error:
            if kwargs.get("debug"):
                raise
            stderr.print(f"[bold red]error:[/] {escape(_bug(error))}")
            raise typer.Exit(EXIT_FAILED) from None

    return guarded


def _bug(error: Exception) -> str:
    notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="sluice-", suffix=".traceback", delete=False, errors="backslashreplace"
        ) as file:
            file.writelines(traceback.format_exception(error))
        where = f"its traceback is in {file.name}"
    except OSError as unwritable:
        where = f"see its traceback with --debug (it cannot be written: {unwritable})"
    return f"{type(error).__name__}: {str(error)[:500]}{notes}; this is a bug, {where}"
