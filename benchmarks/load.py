"""Many streams for minutes: right text, flat memory, nothing left behind; then bad company.

    python -m sluice.benchmarks.load [--namespace NAME] [--streams 500] [--seconds 300]

Without the namespace of a running deployment one is started: tiny-v4, a prefill and a decode node.

    load    N streams at once, each its next request when the last is answered. Every text must be
            the one that the same prompt got alone, at temperature 0
    alone   a few streams at once, for comparison with
    arrival the same few, from when 1,000 connections come that say nothing and 100 streams that
            nobody reads, of 1,000 tokens each: those are requests like others until it shows
    beside  the same few, once nothing is computed for the streams that nobody reads

Memory is what Linux counts as resident of the router and the nodes. It counts as flat if the median
of the last quarter of `load` is within 10 % of that of the second quarter; the first one warms up.
Afterwards no request may run and no page be in use. Exit code 1 if anything of this fails.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from rich.console import Console
from rich.table import Table

from sluice.benchmarks.load_client import (
    Answered,
    allow_many_connections,
    bad_clients,
    stream,
)
from sluice.benchmarks.memory import Sample, growth, sample
from sluice.benchmarks.provenance import RESULTS, print_provenance, provenance, write_csv
from sluice.deploy.commands import locate
from sluice.deploy.common.state import Deployment

MODEL = Path(__file__).parents[1] / "deploy/models/tiny-v4"
NAMESPACE = "load"
PROMPTS = (
    "Define love.",
    "It was the best of times",
    "The code is seven. Repeat the code:",
    "One two three four five",
    "Call me Ishmael.",
    "The cat sat on the mat and",
    "In the beginning",
    "To be, or not to be",
)
OUTPUT_TOKENS = 24
UNREAD_TOKENS = 1_000
NUM_IDLE, NUM_UNREAD = 1_000, 100
NUM_BESIDE, BESIDE_S = 20, 20.0
QUIET_LIMIT_S = 120.0
MAX_GROWTH = 0.1


@dataclass(frozen=True)
class Phase:
    """A line of load.csv."""

    phase: str
    num_streams: int
    seconds: float
    num_answers: int
    num_wrong: int
    num_failed: int
    answers_per_s: float
    first_token_p50_s: float
    first_token_p99_s: float
    answer_p50_s: float
    answer_p99_s: float


def body(model: str, prompt: str, num_tokens: int = OUTPUT_TOKENS) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


async def references(url: str, model: str) -> dict[str, str]:
    """What each prompt is answered when nothing else runs."""
    texts = {}
    for prompt in PROMPTS:
        answered = await stream(url, body(model, prompt))
        if answered.problem:
            raise SystemExit(f"{url}: {prompt!r}: {answered.problem}")
        texts[prompt] = answered.text
    return texts


async def load(
    url: str,
    model: str,
    expected: Mapping[str, str],
    *,
    name: str,
    num_streams: int,
    seconds: float,
) -> tuple[Phase, Counter[str]]:
    """Keep so many streams busy for so long, then let them finish; and what went wrong."""
    prompts = itertools.cycle(expected)
    answers: list[Answered] = []
    problems: Counter[str] = Counter()
    begin = time.monotonic()

    async def one_after_another() -> None:
        while time.monotonic() < begin + seconds:
            prompt = next(prompts)
            answered = await stream(url, body(model, prompt))
            answers.append(answered)
            if answered.problem:
                problems[answered.problem] += 1
                await asyncio.sleep(1)  # as a client told to retry does
            elif answered.text != expected[prompt]:
                problems["wrong text"] += 1

    await asyncio.gather(*(one_after_another() for _ in range(num_streams)))
    return _phase(name, num_streams, time.monotonic() - begin, answers, problems), problems


def _phase(
    name: str,
    num_streams: int,
    seconds: float,
    answers: Sequence[Answered],
    problems: Mapping[str, int],
) -> Phase:
    good = [answered for answered in answers if not answered.problem]
    num_wrong = problems.get("wrong text", 0)
    first, whole = sorted(a.first_s for a in good), sorted(a.whole_s for a in good)
    return Phase(
        name,
        num_streams,
        round(seconds, 1),
        len(answers),
        num_wrong,
        sum(problems.values()) - num_wrong,
        round(len(good) / seconds, 1),
        *(round(percentile(times, part), 3) for times in (first, whole) for part in (0.5, 0.99)),
    )


def percentile(ordered: Sequence[float], part: float) -> float:
    """Of values in ascending order; NaN of none."""
    return ordered[int(part * (len(ordered) - 1))] if ordered else float("nan")


async def unused(url: str, limit_s: float = QUIET_LIMIT_S) -> str:
    """What still runs or is still used after so long; empty as soon as nothing is."""
    end = time.monotonic() + limit_s
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as http:
        while True:
            nodes = (await http.get("/admin/status")).json()["nodes"]
            left = [
                f"{node['id']}: {node['running']} running, {node['waiting']} waiting, used {used}"
                for node in nodes
                if (used := {n: p["used"] for n, p in node["pools"].items() if p["used"]})
                or node["running"]
                or node["waiting"]
            ]
            if not left or time.monotonic() > end:
                return "; ".join(left)
            await asyncio.sleep(0.2)


@contextlib.contextmanager
def started() -> Iterator[Deployment]:
    """A deployment of our own for the block."""
    role = {"cache_bytes": 256 << 20, "max_running_requests": 64, "num_cpus": 1}
    config = {
        "model": {"path": str(MODEL), "name": "tiny-v4"},
        "prefill": role,
        "decode": role,
        "router": {"port": 0},
        "ray": {"namespace": NAMESPACE},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "load.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        _sluice("up", str(path), "--detach")
        try:
            yield locate.deployment(NAMESPACE)
        finally:
            _sluice("down", "--namespace", NAMESPACE)


def _sluice(*arguments: str) -> None:
    command = [sys.executable, "-m", "sluice.deploy.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: {done.stderr or done.stdout}")


async def run(
    deployment: Deployment, num_streams: int, seconds: float, say: Callable[[str], None]
) -> tuple[list[Phase], list[Sample], list[str]]:
    """All phases; their figures, the memory of the first one, and what failed."""
    url, model = deployment.url, deployment.model
    expected = await references(url, model)
    samples: list[Sample] = []
    sampler = asyncio.create_task(sample(deployment, samples))
    phase, problems = await load(
        url, model, expected, name="load", num_streams=num_streams, seconds=seconds
    )
    sampler.cancel()
    say(str(phase))
    failures = [f"load: {count} x {problem}" for problem, count in problems.items()]
    failures += [
        f"memory of {name} grew by {100 * part:.0f} %"
        for name, part in growth(samples).items()
        if part > MAX_GROWTH
    ]
    phases = [phase]
    unread = body(model, PROMPTS[0], UNREAD_TOKENS) | {"logprobs": 20}

    async def few(name: str) -> None:
        phase, problems = await load(
            url, model, expected, name=name, num_streams=NUM_BESIDE, seconds=BESIDE_S
        )
        say(str(phase))
        phases.append(phase)
        failures.extend(f"{name}: {count} x {problem}" for problem, count in problems.items())

    async def become_quiet(after: str) -> None:
        if left := await unused(url):
            failures.append(f"{after}: after {QUIET_LIMIT_S:g} s: {left}")

    await few("alone")
    async with bad_clients(url, unread, num_idle=NUM_IDLE, num_unread=NUM_UNREAD):
        await few("arrival")
        await become_quiet("arrival")
        await few("beside")
    await become_quiet("beside")
    return phases, samples, failures


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--namespace")
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=300.0)
    given = parser.parse_args(arguments)
    allow_many_connections()
    console = Console()
    origin = provenance(
        f"python -m sluice.benchmarks.load --streams {given.streams} --seconds {given.seconds:g}"
    )
    print_provenance(console, origin)
    deployed = (
        started()
        if given.namespace is None
        else contextlib.nullcontext(locate.deployment(given.namespace))
    )
    with deployed as deployment:
        phases, samples, failures = asyncio.run(
            run(deployment, given.streams, given.seconds, console.print)
        )
    table = Table(*asdict(phases[0]))
    for phase in phases:
        table.add_row(*(str(value) for value in asdict(phase).values()))
    console.print(table)
    for name, part in growth(samples).items():
        console.print(f"{name}: memory {100 * part:+.1f} %")
    for failure in failures:
        console.print(f"failed: {failure}", style="red")
    write_csv(RESULTS / "load.csv", origin, [asdict(phase) for phase in phases])
    write_csv(RESULTS / "load_memory.csv", origin, [asdict(taken) for taken in samples])
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
