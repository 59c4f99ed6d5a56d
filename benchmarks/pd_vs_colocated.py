"""Prefill and decode apart against colocated workers on the same cores, over HTTP.

    python -m sluice.benchmarks.pd_vs_colocated [--plot docs/pd_vs_colocated.png]

Three deployments of one small DeepSeek-V4 checkpoint, one after another, on two cores:

    apart       one prefill node and one decode node, a core each
    colocated   two decode nodes, a core each, which compute prompts themselves in chunks beside the
                tokens of running requests: router.local_prefill_below_tokens without a bound
    both        apart, with prompts below 500 tokens computed on decode

A few clients send prompts of one length, each its next one when the last is answered in full. No
prompt shares anything with another. Times are the clients' own: to the first token, between tokens
(the mean and the slowest hundredth), and tokens a second of all clients together.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

import httpx
import yaml
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from sluice.benchmarks.provenance import RESULTS, print_provenance, provenance, write_csv
from sluice.model.make_checkpoint import TINY, make_checkpoint

LENGTHS_TOKENS = (100, 400, 1_000, 2_000, 4_000, 8_000, 16_000)
PROMPT_TOKENS_A_POINT = 24_000  # so many at each length, within the two bounds below
MIN_REQUESTS, MAX_REQUESTS = 4, 24
NUM_CLIENTS = 4
OUTPUT_TOKENS = 64
MAX_MODEL_LEN = 20_000
SETUPS = ("apart", "colocated", "both")
LOCAL_BELOW_TOKENS = {"apart": 0, "colocated": MAX_MODEL_LEN, "both": 500}
NAMESPACE, PORT = "pd-vs-colocated", 8137
TIMEOUT_S = 1_200


@dataclass(frozen=True)
class Answer:
    """One request's times, in seconds since it was sent: of every token."""

    tokens_s: tuple[float, ...]

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in pairwise(self.tokens_s)]


@dataclass(frozen=True)
class Point:
    """A line of the CSV: one deployment at one length of prompts."""

    setup: str
    prompt_tokens: int
    num_requests: int
    ttft_ms: float  # median
    tpot_ms: float  # mean
    itl_p99_ms: float
    output_tokens_per_s: float


def config_of(setup: str, model: Path) -> dict[str, object]:
    """A deployment's YAML."""
    role = {"cache_bytes": 256 << 20, "num_cpus": 1, "max_running_requests": 16}
    return {
        "model": {"path": str(model), "name": "tiny", "max_model_len": MAX_MODEL_LEN},
        "prefill": {"replicas": 1, **role},
        "decode": {"replicas": 2 if setup == "colocated" else 1, **role},
        "router": {"port": PORT, "local_prefill_below_tokens": LOCAL_BELOW_TOKENS[setup]},
        "ray": {"namespace": NAMESPACE},
    }


class Deployment:
    """A running deployment; use as a context manager. `url` is its router's."""

    def __init__(self, setup: str, folder: Path) -> None:
        self._config = folder / f"{setup}.yaml"
        self._config.write_text(yaml.safe_dump(config_of(setup, folder / "model")))
        self.url = f"http://127.0.0.1:{PORT}"

    def __enter__(self) -> Deployment:
        _sluice("up", str(self._config), "--detach")
        return self

    def __exit__(self, *_: object) -> None:
        _sluice("down", "--namespace", NAMESPACE)


def _sluice(*arguments: str) -> str:
    command = [sys.executable, "-m", "sluice.deploy.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: {done.stderr or done.stdout}")
    return done.stdout


async def ask(client: httpx.AsyncClient, prompt: list[int]) -> Answer:
    """Stream one answer."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    started, arrived = time.perf_counter(), []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                arrived.append(time.perf_counter() - started)
    return Answer(tuple(arrived))


async def measure(setup: str, url: str, prompt_tokens: int, rng: random.Random) -> Point:
    """All clients together at one length."""
    wanted = PROMPT_TOKENS_A_POINT // prompt_tokens
    num_requests = max(MIN_REQUESTS, min(MAX_REQUESTS, wanted))
    prompts = [
        [rng.randrange(3, TINY.vocab_size) for _ in range(prompt_tokens)]
        for _ in range(num_requests)
    ]
    answers: list[Answer] = []
    bar = tqdm(total=num_requests, desc=f"{setup}, {prompt_tokens:,} tokens", disable=None)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:
        waiting = iter(prompts)

        async def send_in_turn() -> None:
            for prompt in waiting:
                answers.append(await ask(client, prompt))
                bar.update()

        started = time.perf_counter()
        await asyncio.gather(*(send_in_turn() for _ in range(NUM_CLIENTS)))
        seconds = time.perf_counter() - started
    bar.close()
    gaps = sorted(gap for answer in answers for gap in answer.gaps_s)
    return Point(
        setup=setup,
        prompt_tokens=prompt_tokens,
        num_requests=num_requests,
        ttft_ms=round(1e3 * statistics.median(a.tokens_s[0] for a in answers), 1),
        tpot_ms=round(1e3 * statistics.fmean(gaps), 2),
        itl_p99_ms=round(1e3 * gaps[int(0.99 * (len(gaps) - 1))], 1),
        output_tokens_per_s=round(num_requests * OUTPUT_TOKENS / seconds, 1),
    )


def run(setup: str, folder: Path, lengths: Sequence[int]) -> list[Point]:
    rng = random.Random(0)
    with Deployment(setup, folder) as deployment:
        asyncio.run(measure(setup, deployment.url, 50, rng))  # not counted: everything warms up
        return [asyncio.run(measure(setup, deployment.url, n, rng)) for n in lengths]


def plot(points: Sequence[Point], path: Path) -> None:
    """Four figures over the length of prompts, a line a deployment; needs the `plot` extra."""
    import matplotlib.pyplot as plt

    figures = (
        ("ttft_ms", "time to first token, ms (median)"),
        ("tpot_ms", "time per output token, ms (mean)"),
        ("itl_p99_ms", "between tokens, ms (99th percentile)"),
        ("output_tokens_per_s", "output tokens a second, all clients"),
    )
    figure, axes = plt.subplots(2, 2, figsize=(11, 7))
    for axis, (field, title) in zip(axes.flat, figures, strict=True):
        for setup in dict.fromkeys(point.setup for point in points):
            line = [point for point in points if point.setup == setup]
            lengths = [point.prompt_tokens for point in line]
            axis.plot(lengths, [getattr(p, field) for p in line], "o-", label=setup)
        axis.set(xscale="log", yscale="log", title=title, xlabel="prompt, tokens")
        axis.grid(alpha=0.3)
    axes.flat[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, action="append", help="may be given several times")
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args(arguments)
    console = Console()
    chosen = "".join(f" --tokens {tokens}" for tokens in given.tokens or ())
    origin = provenance(f"python -m sluice.benchmarks.pd_vs_colocated{chosen}")
    print_provenance(console, origin)
    points: list[Point] = []
    with tempfile.TemporaryDirectory() as folder:
        config = replace(TINY, max_model_len=MAX_MODEL_LEN)
        make_checkpoint(Path(folder) / "model", config=config, seed=0)
        for setup in SETUPS:
            points += run(setup, Path(folder), given.tokens or LENGTHS_TOKENS)
    table = Table(*asdict(points[0]))
    for point in points:
        table.add_row(*(str(value) for value in asdict(point).values()))
    console.print(table)
    write_csv(RESULTS / "pd_vs_colocated.csv", origin, [asdict(point) for point in points])
    if given.plot is not None:
        plot(points, given.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
