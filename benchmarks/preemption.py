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
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from sluice.benchmarks.provenance import RESULTS, print_provenance, provenance, write_csv
from sluice.cache.spec import tables_of
from sluice.decode_node.client import AsyncDecode
from sluice.decode_node.node import DecodeNode
from sluice.engine.config import parse_config
from sluice.engine.protocol import (
    ClusterState,
    GenerateRequest,
    InvalidRequest,
    Role,
    SamplingParams,
)
from sluice.engine.runner import Runner
from sluice.model.registry import load_model
from sluice.prefill_node.client import AsyncPrefill
from sluice.prefill_node.node import PrefillNode
from sluice.router.service import RouterService
from sluice.transfer.local_transport import LocalTransport

MODEL = Path(__file__).parents[1] / "deploy" / "models" / "tiny-v4"
PROMPT_TOKENS = 50
AMPLE_BYTES = 256 << 20
TIMEOUT_S = 3600.0


class FixedCluster:
    """Two nodes that nobody scales."""

    async def state(self) -> ClusterState:
        return ClusterState({})

    async def scale(self, role: Role, replicas: int) -> None:
        raise InvalidRequest(f"{role}: the benchmark's nodes are fixed")

    async def drain(self, node_id: str) -> None:
        raise InvalidRequest(f"{node_id}: the benchmark's nodes are fixed")


@dataclass(frozen=True)
class Run:
    """Outputs by request, and what they took."""

    tokens: list[tuple[int, ...]]
    seconds: float
    num_preemptions: int


async def run(requests: list[GenerateRequest], decode_pages: int | None) -> Run:
    """Answer all requests at once; decode_pages: of each Full table, or ample memory."""
    model = load_model(MODEL)
    common = {"max_running_requests": len(requests), "cache_bytes": AMPLE_BYTES}
    config = parse_config(
        {
            "model": {"path": str(MODEL)},
            "prefill": common,
            "decode": common,
            "router": {"request_timeout_s": TIMEOUT_S},
        }
    )
    prefill_runner = Runner.around(model, config, Role.PREFILL)
    decode_runner = Runner.around(model, config, Role.DECODE)
    if decode_pages is not None:
        decode_runner = _with_pages(decode_runner, config.decode.model_copy(), decode_pages)
    tag = uuid.uuid4().hex
    prefill = PrefillNode(prefill_runner, LocalTransport(f"p{tag}"), config, "prefill-0", "here")
    decode = DecodeNode(decode_runner, LocalTransport(f"d{tag}"), config, "decode-0", "here")
    prefill.start()
    decode.start()
    await asyncio.wrap_future(prefill.connect(decode.info))
    service = RouterService(config, FixedCluster())
    await service.start()
    service.set_nodes([AsyncPrefill(prefill)], [AsyncDecode(decode)])
    started = time.perf_counter()
    try:
        total = sum(r.sampling.max_tokens for r in requests)
        with tqdm(total=total, unit="token", disable=None) as bar:
            tokens = await asyncio.gather(*(_answer(service, r, bar) for r in requests))
        preemptions = service.metrics.retries.labels("preempted")._value.get()
        return Run(tokens, time.perf_counter() - started, int(preemptions))
    finally:
        await service.stop(limit_s=5)
        decode.stop()
        prefill.stop()


def _with_pages(runner: Runner, role: Any, num_pages: int) -> Runner:
    """The runner again, with memory for `num_pages` pages of each Full table."""
    full = [spec for spec in runner.specs if spec.table.keeps_all]
    page_bytes = sum(spec.page_bytes for spec in full)
    bounded_bytes = sum(
        (runner.manager.num_pages[table] + 1) * spec.page_bytes
        for spec in runner.specs
        for table in tables_of([spec])
        if not table.keeps_all
    )
    cache_bytes = bounded_bytes + (num_pages + 1) * page_bytes
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
