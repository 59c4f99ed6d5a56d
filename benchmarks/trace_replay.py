"""Hit rates of the prefix cache on request traces, through the real manager, without a model.

    python -m sluice.benchmarks.trace_replay --trace FILE [--trace FILE ...]
        [--memory unlimited] [--memory quarter] [--sweep] [--scale K] [--limit N] [--plot FILE]

Every prompt goes through a prefill node's scheduler and cache manager, with the pools of
DeepSeek-V4-Flash at their real shapes. Memory is `unlimited`, bytes, or a fraction (`quarter`,
`1/8`) of the working set: the bytes of all distinct blocks in Full pools. Limited memory compares

    sluice              resume points where they are likely to be used, others while there is room;
                        where none is left, the end of the history is computed again
    fixed distance      resume points at every --resume-every tokens and at prompts' ends
    prompt's end        window and state pages at prompts' ends alone; traces do not show its use,
                        since they know tokens by whole blocks, and prompts seldom end with one
    whole-prefix LRU    whole prompts as entries of one LRU list

Exit code 1 if a replay with unlimited memory misses the ideal hit rate by more than 2 %.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sluice.benchmarks.provenance import RESULTS, print_provenance, provenance, write_csv
from sluice.benchmarks.replay import (
    MAX_REQUESTS,
    NEVER_TOKENS,
    FixedPointsScheduler,
    Hits,
    make_scheduler,
    pages_for_all,
    pages_within,
    replay,
)
from sluice.benchmarks.traces import Trace, read_trace
from sluice.benchmarks.whole_prefix_lru import WholePrefixLru, replay_whole_prefixes
from sluice.cache.manager import CacheManager
from sluice.engine.runner import RESUME_SHARE
from sluice.model.presets import V4_FLASH, preset_pools
from sluice.model.v4.pools import replay_tokens
from sluice.prefill_node.scheduler import PrefillScheduler
from sluice.protocol.config import PrefillConfig

SPECS = preset_pools("v4-flash")
FULL_BYTES_PER_TOKEN = sum(s.page_bytes / s.tokens_per_page for s in SPECS if s.table.keeps_all)
REPLAY_TOKENS = replay_tokens(SPECS, V4_FLASH.sliding_window)
BOUNDED = [spec for spec in SPECS if not spec.table.keeps_all]
RESUME_BYTES = sum(len(s.pages(1024, 1024)) * s.page_bytes for s in BOUNDED)

RESUME_EVERY_TOKENS = PrefillConfig().resume_every_tokens
SWEEP = ((1024, 0.2), (2048, 0.2), (8192, 0.2), (4096, 0.1), (4096, 0.2))
TOLERANCE = 0.02


@dataclass(frozen=True)
class Case:
    """One replay to do. `memory_bytes` None: nothing is ever evicted."""

    memory: str
    memory_bytes: int | None
    policy: str = "sluice"
    resume_every_tokens: int = RESUME_EVERY_TOKENS
    resume_share: float = RESUME_SHARE


@dataclass(frozen=True)
class Result:
    """A line of the CSV. Rates are parts of all blocks, and of all tokens, of the trace."""

    trace: str
    num_requests: int
    memory: str
    memory_bytes: int | None
    policy: str
    resume_every_tokens: int | None
    resume_share: float
    block_hit_rate: float
    token_hit_rate: float
    ideal_block_hit_rate: float
    cpu_s: float


def cases(trace: Trace, memories: Sequence[str], *, sweep: bool) -> Iterator[Case]:
    """Ours and what it is compared with, for every memory; other parameters of ours on request."""
    for memory in memories:
        size = memory_bytes(memory, trace)
        if size is None:  # resume points cost nothing: one at every block
            yield Case(memory, size, resume_every_tokens=trace.block_tokens)
            continue
        yield Case(memory, size)
        for every, share in SWEEP if sweep else ():
            yield Case(memory, size, resume_every_tokens=every, resume_share=share)
        yield Case(memory, size, "fixed distance")
        yield Case(memory, size, "prompt's end", NEVER_TOKENS)
        for every in (1024, 2048, 4096) if sweep else (RESUME_EVERY_TOKENS,):
            yield Case(memory, size, "whole-prefix LRU", every, 0.0)


def memory_bytes(memory: str, trace: Trace) -> int | None:
    """Bytes of all pools. Raises ValueError for what is neither a size nor a part."""
    if memory == "unlimited":
        return None
    size = Fraction("1/4" if memory == "quarter" else memory)
    if size <= 1:
        return int(size * Fraction(trace.num_distinct_tokens * FULL_BYTES_PER_TOKEN))
    return int(size)


def run(trace: Trace, case: Case) -> Result:
    """Replay the trace once."""
    started = time.process_time()
    hits = _replay(trace, case)
    every = case.resume_every_tokens
    return Result(
        trace=trace.name,
        num_requests=len(trace.prompts),
        memory=case.memory,
        memory_bytes=case.memory_bytes,
        policy=case.policy,
        resume_every_tokens=None if every == NEVER_TOKENS else every,
        resume_share=case.resume_share,
        block_hit_rate=round(hits.num_blocks / trace.num_blocks, 4),
        token_hit_rate=round(hits.num_tokens / trace.num_tokens, 4),
        ideal_block_hit_rate=round(trace.ideal_hit_rate, 4),
        cpu_s=round(time.process_time() - started, 1),
    )


def _replay(trace: Trace, case: Case) -> Hits:
    if case.policy == "whole-prefix LRU":
        assert case.memory_bytes is not None, "without a limit nothing is ever given up"
        cache = WholePrefixLru(
            max_bytes=case.memory_bytes - working_bytes(trace, case.memory_bytes),
            bytes_per_token=FULL_BYTES_PER_TOKEN,
            resume_bytes=RESUME_BYTES,
            resume_every_tokens=case.resume_every_tokens,
        )
        return replay_whole_prefixes(trace, cache)
    every = case.resume_every_tokens
    if case.memory_bytes is None:
        num_pages = pages_for_all(SPECS, trace, every)
    else:
        num_pages = pages_within(SPECS, trace, case.memory_bytes, case.resume_share)
    manager = CacheManager(SPECS, num_pages, MAX_REQUESTS, replay_tokens=REPLAY_TOKENS)
    kind = PrefillScheduler if case.policy == "sluice" else FixedPointsScheduler
    scheduler = make_scheduler(manager, resume_every_tokens=every, kind=kind)
    return replay(trace, manager, scheduler, f"{trace.name}, {case.memory}, {case.policy}")


def working_bytes(trace: Trace, memory_bytes: int) -> int:
    """What running requests need of window and state pages, whoever caches what beside them."""
    pages = pages_within(SPECS, trace, memory_bytes, resume_share=0.0)
    return sum(pages[spec.table] * spec.page_bytes for spec in BOUNDED)


def result_table(results: Sequence[Result]) -> Table:
    table = Table("trace", "memory", "policy", "resume every", "share")
    for head in ("blocks hit", "ideal", "tokens hit", "CPU s"):
        table.add_column(head, justify="right")
    for result in results:
        size = "" if result.memory_bytes is None else f" ({result.memory_bytes / 1e9:.1f} GB)"
        table.add_row(
            result.trace,
            result.memory + size,
            result.policy,
            str(result.resume_every_tokens or "-"),
            f"{result.resume_share:.2f}",
            f"{result.block_hit_rate:.1%}",
            f"{result.ideal_block_hit_rate:.1%}",
            f"{result.token_hit_rate:.1%}",
            f"{result.cpu_s:.0f}",
        )
    return table


def plot(results: Sequence[Result], path: Path) -> None:
    """Hit rate over memory, one line a policy, one picture a trace; needs the `plot` extra."""
    import matplotlib.pyplot as plt

    traces = list(dict.fromkeys(result.trace for result in results))
    figure, axes = plt.subplots(1, len(traces), figsize=(5.5 * len(traces), 4), squeeze=False)
    for axis, trace in zip(axes[0], traces, strict=True):
        ours = [r for r in results if r.trace == trace and r.memory_bytes is not None]
        for policy in dict.fromkeys(result.policy for result in ours):
            line = {r.memory_bytes: r.block_hit_rate for r in ours if r.policy == policy}
            sizes = sorted(size for size in line if size is not None)
            axis.plot([s / 1e9 for s in sizes], [line[s] for s in sizes], "o-", label=policy)
        axis.axhline(ours[0].ideal_block_hit_rate, linestyle=":", label="ideal")
        axis.set(title=trace, xlabel="memory, GB", ylabel="blocks hit", ylim=0)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, action="append", required=True)
    parser.add_argument("--memory", action="append", help="may be given several times")
    parser.add_argument("--scale", type=int, default=1, help="divide lengths and blocks by this")
    parser.add_argument("--limit", type=int, help="replay only so many requests")
    parser.add_argument("--sweep", action="store_true", help="try other parameters of ours too")
    parser.add_argument("--plot", type=Path, help="draw hit rate over memory into this file")
    parser.add_argument("--csv", type=Path, default=RESULTS / "trace_replay.csv")
    given = parser.parse_args(arguments)
    console = Console()
    traces = [read_trace(path, scale=given.scale, limit=given.limit) for path in given.trace]
    origin = provenance(_command(given))
    print_provenance(console, origin)
    memories = given.memory or ["unlimited", "quarter"]
    results = [run(t, case) for t in traces for case in cases(t, memories, sweep=given.sweep)]
    console.print(result_table(results))
    write_csv(given.csv, origin, [asdict(result) for result in results])
    if given.plot is not None:
        plot(results, given.plot)
    missed = [
        result
        for result in results
        if result.memory_bytes is None
        and result.block_hit_rate < result.ideal_block_hit_rate * (1 - TOLERANCE)
    ]
    for result in missed:
        console.print(f"{result.trace}: more than {TOLERANCE:.0%} below the ideal hit rate")
    return 1 if missed else 0


def _command(given: argparse.Namespace) -> str:
    """The command, with traces by name alone."""
    parts = ["python -m sluice.benchmarks.trace_replay"]
    parts += [f"--trace {path.name}" for path in given.trace]
    parts += [f"--memory {memory}" for memory in given.memory or ()]
    parts += [f"--{key} {value}" for key in ("scale", "limit") if (value := vars(given)[key])]
    return " ".join([*parts, *(["--sweep"] if given.sweep else [])])


if __name__ == "__main__":
    sys.exit(main())
