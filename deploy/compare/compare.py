"""`sluice compare`: the same prompts at temperature 0 through two deployments, A and B.

1. Both configs are checked, and the prompts chosen, before anything starts.
2. A is started under a namespace and on a port of its own, unless its URL was given; one request
   warms it up; every prompt is measured; it ends. Then the same with B.
3. The answers are compared; tables, CSV files and a plot say what each request cost.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

from sluice.benchmarks.provenance import provenance
from sluice.deploy.commands import detach, locate, preflight
from sluice.deploy.common.http_client import RouterClient
from sluice.deploy.common.reporting import stderr, stdout
from sluice.deploy.compare import plot as compare_plot
from sluice.deploy.compare.measures import Measure, decode_specs, measure
from sluice.deploy.compare.prompts import Prompt, passages, read_prompts
from sluice.deploy.compare.report import print_report, write_report
from sluice.deploy.compare.result import Comparison, pair_up
from sluice.model.registry import describe
from sluice.protocol.config import SluiceConfig, load_config
from sluice.protocol.messages import ConfigError
from sluice.router.text.checkpoint import read_checkpoint

STOP_TIMEOUT_S = 60.0
WARM_UP = Prompt([1, 2, 3, 4, 5, 6, 7, 8])


@dataclass(frozen=True)
class Side:
    """One of the two deployments; `url` if it runs already."""

    letter: str
    path: Path
    config: SluiceConfig
    url: str | None

    @property
    def name(self) -> str:
        return f"{self.letter}: {self.path.stem}"

    @property
    def namespace(self) -> str:
        return f"compare-{self.letter.lower()}"


def compare(
    sides: tuple[Side, Side], *, prompts_file: Path | None, max_tokens: int, out: Path, plot: bool
) -> Comparison:
    """Measure, print and write the comparison of A and B. Raises SluiceError."""
    if plot:
        compare_plot.check_installed()
    for side in sides:
        _check(side)
    prompts = _prompts(sides, prompts_file, max_tokens)
    origin = provenance(_command(sides, prompts_file, max_tokens)) | {"load": _load()}
    a, b = (_measure_all(side, prompts, max_tokens) for side in sides)
    tokenizer = read_checkpoint(sides[0].config.model).tokenizer
    comparison = pair_up((sides[0].name, sides[1].name), a, b, tokenizer)
    print_report(stdout, comparison, origin)
    written = write_report(out, comparison, origin)
    if plot:
        written.append(out / "lengths.png")
        caption = (
            f"Points: requests, with {max_tokens} output tokens; lines: medians. "
            f"{origin['machine']}; commit {origin['commit']}; {origin['date']}"
        )
        compare_plot.plot(written[-1], comparison, caption)
    stdout.print(f"written: {', '.join(map(str, written))}")
    return comparison


def make_side(letter: str, path: Path, url: str | None) -> Side:
    """Read a side's config; what we start of it takes any free port. Raises ConfigError."""
    config = load_config(path)
    changes = {"router": config.router.model_copy(update={"port": 0})}
    return Side(letter, path, config.model_copy(update=changes), url)


def _check(side: Side) -> None:
    if side.url is None:
        preflight.check(side.config)
    else:  # it runs: only the model must be here, for its pools and its tokenizer
        preflight.check_model(side.config)


def _prompts(sides: tuple[Side, Side], file: Path | None, max_tokens: int) -> list[Prompt]:
    prompts = read_prompts(file) if file is not None else _passages(sides, max_tokens)
    if any(isinstance(prompt.content, list) for prompt in prompts):
        _check_same_tokens(sides)
    return prompts


def _passages(sides: tuple[Side, Side], max_tokens: int) -> list[Prompt]:
    models = [side.config.model for side in sides]
    limits = [model.max_model_len or describe(model.path).max_model_len for model in models]
    return passages(read_checkpoint(models[0]).tokenizer, min(limits) - max_tokens)


def _check_same_tokens(sides: tuple[Side, Side]) -> None:
    """Token ids mean the same text on both sides."""
    a, b = (side.config.model.path / "tokenizer.json" for side in sides)
    if a.read_bytes() != b.read_bytes():
        raise ConfigError(
            f"{a} and {b} differ, so that token ids cannot stand for the same prompt; give texts "
            "with --prompts FILE, one a line"
        )


def _measure_all(side: Side, prompts: list[Prompt], max_tokens: int) -> list[Measure]:
    specs = decode_specs(side.config)
    with (
        _running(side) as router,
        Progress(console=stderr, disable=not stderr.is_terminal, transient=True) as progress,
    ):
        measure(router, WARM_UP, max_tokens=max_tokens, specs=specs)
        listed = progress.track(prompts, description=side.name)
        return [measure(router, one, max_tokens=max_tokens, specs=specs) for one in listed]


@contextlib.contextmanager
def _running(side: Side) -> Iterator[RouterClient]:
    """A client of the side's deployment, which lives for the block if we had to start it."""
    if side.url is not None:
        with RouterClient(side.url, locate.admin_key(load_config(side.path).router)) as router:
            yield router
        return
    arguments = [str(side.path), "--namespace", side.namespace, "--port", "0"]
    with stderr.status(f"starting {side.name}"):
        deployment = detach.start(side.namespace, arguments)
    try:
        with locate.router(None, side.namespace, None) as router:
            yield router
    finally:
        with stderr.status(f"ending {side.name}"):
            detach.stop(deployment, STOP_TIMEOUT_S)


def _load() -> str:
    """What else the machine was doing, before anything of ours started."""
    return f"{os.getloadavg()[0]:.1f} processes ran or waited in the minute before"


def _command(sides: tuple[Side, Side], prompts_file: Path | None, max_tokens: int) -> str:
    words = ["sluice", "compare", *(str(side.path) for side in sides)]
    words += ["--max-tokens", str(max_tokens)]
    words += ["--prompts", str(prompts_file)] if prompts_file is not None else []
    for side in sides:
        words += [f"--url-{side.letter.lower()}", side.url] if side.url is not None else []
    return shlex.join(words)
