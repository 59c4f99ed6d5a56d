"""Long outputs on a decode pool that holds a third of them: everybody finishes, with equal tokens.

    python -m sluice.benchmarks.preemption [--requests 16] [--output-tokens 4000] [--fits 5]

Runs the same requests twice through the router's dispatch and two nodes in this process: on a
decode node with room for all, and on one whose pages hold `--fits` of them, so that the youngest
are preempted and prefilled again. Exit code 0 only if every token is equal.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from sluice.benchmarks.in_process import InProcess
from sluice.benchmarks.provenance import RESULTS, print_provenance, provenance, write_csv
from sluice.engine.runner import Runner
from sluice.model.registry import Model, load_model
from sluice.protocol.config import RoleConfig, SluiceConfig, parse_config
from sluice.protocol.messages import GenerateRequest, Role, SamplingParams
from sluice.router.service import RouterService

MODEL = Path(__file__).parents[1] / "deploy" / "models" / "tiny-v4"
PROMPT_TOKENS = 50
AMPLE_BYTES = 256 << 20
TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Run:
    """Outputs by request, and what they took."""

    tokens: list[tuple[int, ...]]
    seconds: float
    num_preemptions: int


async def run(requests: list[GenerateRequest], decode_pages: int | None) -> Run:
    """Answer all requests at once; decode_pages: of each Full table, or ample memory."""
    common = {"max_running_requests": len(requests), "cache_bytes": AMPLE_BYTES}
    config = parse_config(
        {
            "model": {"path": str(MODEL)},
            "prefill": common,
            "decode": common,
            "router": {"request_timeout_s": TIMEOUT_S},
        }
    )

    def runner_of(model: Model, config: SluiceConfig, role: Role) -> Runner:
        runner = Runner.around(model, config, role)
        if role is Role.DECODE and decode_pages is not None:
            return _with_pages(runner, config.decode, decode_pages)
        return runner

    async with InProcess(config, runner_of) as cluster:
        started = time.perf_counter()
        total = sum(r.sampling.max_tokens for r in requests)
        with tqdm(total=total, unit="token", disable=None) as bar:
            tokens = await asyncio.gather(*(_answer(cluster.service, r, bar) for r in requests))
        seconds = time.perf_counter() - started
        return Run(tokens, seconds, _preemptions(cluster.service))


def _preemptions(service: RouterService) -> int:
    samples = [s for family in service.metrics.retries.collect() for s in family.samples]
    return sum(
        int(s.value)
        for s in samples
        if s.name.endswith("_total") and s.labels["reason"] == "preempted"
    )


def _with_pages(runner: Runner, role: RoleConfig, num_pages: int) -> Runner:
    """The runner again, with memory for `num_pages` pages of each Full table."""
    pages = {
        table: num_pages if table.keeps_all else count
        for table, count in runner.manager.num_pages.items()
    }
    cache_bytes = sum((pages[spec.table] + 1) * spec.page_bytes for spec in runner.specs)
    return Runner(
        runner.model,
        role.model_copy(update={"cache_bytes": cache_bytes}),
        max_step_tokens=role.max_running_requests,
        max_model_len=runner.max_model_len,
        resumes=False,
    )


async def _answer(service: RouterService, request: GenerateRequest, bar: Any) -> tuple[int, ...]:
    tokens: tuple[int, ...] = ()
    async for piece in service.generate(request, time.monotonic() + TIMEOUT_S):
        tokens += piece.token_ids
        bar.update(len(piece.token_ids))
    return tokens


def main() -> int:
    """Run both, compare, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=4000)
    parser.add_argument("--fits", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    origin = provenance(f"python -m sluice.benchmarks.preemption {' '.join(sys.argv[1:])}".strip())
    print_provenance(console, origin)
    rng = random.Random(0)
    sampling = SamplingParams(max_tokens=given.output_tokens, temperature=0.0)
    requests = [
        GenerateRequest(
            f"r{n}", tuple(rng.randrange(3, 2000) for _ in range(PROMPT_TOKENS)), sampling
        )
        for n in range(given.requests)
    ]
    length = PROMPT_TOKENS + given.output_tokens
    span = next(s.tokens_per_page for s in load_model(MODEL).specs if s.table.keeps_all)
    pages = given.fits * -(-length // span)
    ample = asyncio.run(run(requests, None))
    tight = asyncio.run(run(requests, pages))
    equal = sum(a == b for a, b in zip(ample.tokens, tight.tokens, strict=True))
    table = Table("decode pages", "requests", "seconds", "preemptions", "equal outputs")
    rows = [
        {"decode_pages": "ample", "seconds": ample.seconds, "preemptions": ample.num_preemptions},
        {"decode_pages": pages, "seconds": tight.seconds, "preemptions": tight.num_preemptions},
    ]
    for row in rows:
        row |= {"requests": given.requests, "equal_outputs": equal}
        cells = (row["decode_pages"], given.requests, f"{row['seconds']:.1f}", row["preemptions"])
        table.add_row(*map(str, cells), f"{equal} of {given.requests}")
    console.print(table)
    write_csv(RESULTS / "preemption.csv", origin, rows)
    return 0 if equal == given.requests else 1


if __name__ == "__main__":
    sys.exit(main())
