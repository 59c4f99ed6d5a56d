"""What a step costs beside the model: prefix matching, and the turns of both nodes' loops.

    python -m sluice.benchmarks.scheduling

With the pools of DeepSeek-V4-Flash, but no memory behind them and no model:

    prefix match   keys of a prompt of 100,000 tokens and its longest cached prefix, all of it there
    decode turn    a DecodeNode's whole turn with 256 running requests: leases, arrivals, pages for
                   the next token, the batch's tensors, the choice of the largest of 512 logits,
                   expiry, and the message to the router. Only the forward pass is left out.
    sampled turn   the same with a random choice, at temperature 1
    prefill step   a scheduler's step: admission, chunks, the batch's tensors, and then what is
                   kept and expired. The forward pass and the transfer are left out.

Exit code 1 if the prefix match takes 5 ms or a decode turn 2 ms, in the median.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table

from sluice.benchmarks.provenance import RESULTS, print_provenance, provenance, write_csv
from sluice.benchmarks.replay import ModelFreeRunner, compute, make_job, make_scheduler
from sluice.cache.manager import CacheManager
from sluice.cache.spec import tables_of
from sluice.decode_node.node import DecodeNode
from sluice.deploy.common.collector import spare_streams
from sluice.engine.batch import build_inputs
from sluice.engine.request import Request
from sluice.model.presets import preset_pools
from sluice.protocol.config import parse_config
from sluice.protocol.messages import GenerateRequest, SamplingParams
from sluice.transfer.local_transport import LocalTransport
from sluice.transfer.receiver import Arrival

SPECS = preset_pools("v4-flash")
MATCHED_TOKENS, MAX_MATCH_MS = 100_000, 5.0
NUM_REQUESTS, MAX_DECODE_MS = 256, 2.0
DECODE_LENGTHS_TOKENS = (1_000, 8_000, 100_000)
NUM_TURNS = 300
VOCAB = 512


@dataclass(frozen=True)
class Cost:
    """A line of the CSV: milliseconds over `samples` measurements.

    median_ms and p99_ms are wall time; cpu_ms is the thread's own time, in the median, which other
    work on the machine disturbs less.
    """

    what: str
    num_requests: int
    num_tokens: int
    samples: int
    median_ms: float
    p99_ms: float
    cpu_ms: float


@dataclass(frozen=True)
class Seconds:
    """One turn's wall time and CPU time."""

    wall: float
    cpu: float


def cost(what: str, num_requests: int, num_tokens: int, seconds: list[Seconds]) -> Cost:
    walls = sorted(turn.wall for turn in seconds)
    p99 = walls[int(0.99 * (len(walls) - 1))]
    cpu = statistics.median(turn.cpu for turn in seconds)
    figures = (round(s * 1e3, 3) for s in (statistics.median(walls), p99, cpu))
    return Cost(what, num_requests, num_tokens, len(seconds), *figures)


def timed(turn: Callable[[], object], count: int) -> list[Seconds]:
    """What each of `count` turns takes."""
    seconds = []
    for _ in range(count):
        wall, cpu = time.perf_counter(), time.thread_time()
        turn()
        seconds.append(Seconds(time.perf_counter() - wall, time.thread_time() - cpu))
    return seconds


def ample_manager(num_requests: int, num_tokens: int) -> CacheManager:
    """A manager in which so many requests of so many tokens find room."""
    pages = {t: num_requests * (t.max_pages(2_048, num_tokens) + 1) for t in tables_of(SPECS)}
    return CacheManager(SPECS, pages, num_requests)


def prefix_match() -> Cost:
    """Keys, and the longest prefix to go on from, of a prompt that was computed before."""
    manager = ample_manager(64, 2 * MATCHED_TOKENS)
    token_ids = list(range(MATCHED_TOKENS))
    scheduler = make_scheduler(manager, resume_every_tokens=2_048)
    compute(scheduler, make_job(manager, "first", token_ids))

    def match() -> None:
        hit = manager.find_resumable(manager.keys_of(token_ids), token_ids)
        assert hit.num_tokens >= MATCHED_TOKENS - manager.unit_tokens

    return cost("prefix match", 1, MATCHED_TOKENS, timed(match, 100))


def decode_turn(num_tokens: int, temperature: float = 0.0) -> Cost:
    """A turn with all requests running, each with a prompt of its own of about that length."""
    what = "sampled turn" if temperature else "decode turn"
    sampling = SamplingParams(max_tokens=900, temperature=temperature)
    runner = ModelFreeRunner(
        ample_manager(NUM_REQUESTS, num_tokens + 1_000), torch.zeros(NUM_REQUESTS, VOCAB)
    )
    config = parse_config({"model": {"path": "none"}, "transfer": {"lease_s": 3600}})
    name = f"{what} {num_tokens}"
    node = DecodeNode(runner, LocalTransport(name), config, name, "")
    received: Counter[str] = Counter()  # tokens by request; the chunks are dropped, as on their way
    node.subscribe("router", lambda chunks: received.update(c.request_id for c in chunks or ()))
    for number in range(NUM_REQUESTS):  # each a token shorter, so that pages end in turn
        prompt = tuple(range(number * num_tokens, (number + 1) * num_tokens - number))
        _run_on(node, GenerateRequest(f"r{number}", prompt, sampling))
    spare_streams()  # as a node's process does when it has started
    seconds = timed(node._turn, NUM_TURNS)
    every_turn = Counter({f"r{number}": NUM_TURNS for number in range(NUM_REQUESTS)})
    assert received == every_turn, "every turn gives every request a token"
    node.stop()
    return cost(what, NUM_REQUESTS, num_tokens, seconds)


def _run_on(node: DecodeNode, request: GenerateRequest) -> None:
    """Let the node go on with a prompt as if its pages had just landed."""
    grant = node._reserve(Request.of(request, request.request_id), request)
    stream = node._grants.get(grant.grant_id)
    assert stream is not None
    node._take_arrival(stream, Arrival(grant.grant_id, first_token=1))


def prefill_step(num_requests: int, num_tokens: int, max_batch_tokens: int) -> Cost:
    """Steps from the arrival of all prompts to the end of the last."""
    manager = ample_manager(2 * num_requests, num_tokens)
    scheduler = make_scheduler(
        manager, resume_every_tokens=2_048, max_batch_tokens=max_batch_tokens
    )
    jobs = {}
    for number in range(num_requests):
        tokens = list(range(number * num_tokens, (number + 1) * num_tokens))
        job = jobs[f"r{number}"] = make_job(manager, f"r{number}", tokens)
        scheduler.add(job)

    def step() -> bool:
        chunks = scheduler.next_chunks()
        if chunks:
            build_inputs(chunks, manager)
        for chunk in chunks:
            chunk.request.num_computed_tokens = chunk.end
            scheduler.settle(jobs[chunk.request.grant_id])
        return bool(chunks)

    seconds = []
    while not all(job.computed for job in jobs.values()):
        seconds += timed(step, 1)
    return cost("prefill step", num_requests, num_tokens, seconds)


def measure() -> Iterator[Cost]:
    yield prefix_match()
    for num_tokens in DECODE_LENGTHS_TOKENS:
        yield decode_turn(num_tokens)
    yield decode_turn(8_000, temperature=1.0)
    yield prefill_step(1, 100_000, 2_048)
    yield prefill_step(64, 8_000, 8_192)


def main() -> int:
    """Measure, print, write the CSV."""
    torch.set_num_threads(1)
    console = Console()
    origin = provenance("python -m sluice.benchmarks.scheduling")
    print_provenance(console, origin)
    costs = list(measure())
    table = Table(
        "what", "requests", "tokens each", "samples", "median ms", "p99 ms", "median CPU ms"
    )
    for line in costs:
        table.add_row(*(str(value) for value in asdict(line).values()))
    console.print(table)
    write_csv(RESULTS / "scheduling.csv", origin, [asdict(line) for line in costs])
    limits = {"prefix match": MAX_MATCH_MS, "decode turn": MAX_DECODE_MS}
    slow = [line for line in costs if line.median_ms >= limits.get(line.what, float("inf"))]
    for line in slow:
        console.print(f"{line.what}: {line.median_ms} ms, goal below {limits[line.what]} ms")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
