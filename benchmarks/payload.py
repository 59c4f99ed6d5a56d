"""What one request moves from prefill to decode: bytes, pages and descriptors of every pool.

No model and no transfer: the pools of DeepSeek-V4-Flash at their real shapes go through the plan
that transfers use. `python -m sluice.benchmarks.payload` prints the tables and writes
benchmarks/results/payload.csv.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from sluice.benchmarks.provenance import RESULTS, print_provenance, provenance, write_csv
from sluice.cache.spec import Block, PoolSpec, TableSpec, tables_of
from sluice.model.presets import preset_pools
from sluice.protocol.messages import PageRun
from sluice.transfer.plan import byte_runs, rows_to_receive, touched_pages

MODEL = "v4-flash"
LENGTHS = (127, 128, 1_000, 8_191, 8_192, 131_072)
MINIMUM_LENGTHS = tuple(sorted({*LENGTHS, *(round(1.9**n) + n for n in range(4, 18))}))  # 20
MAX_EXCESS = 0.01
COMPARED_TOKENS = 8_192
LONG_TOKENS, MAX_DESCRIPTORS = 131_072, 2_000
CSV = RESULTS / "payload.csv"

# Computed from the pool layouts of SGLang 0.5.23 (whole pages, fp8 index rows, raw C128 state):
# the request ends at a page border, or just does not.
SGLANG_ALIGNED_MB, SGLANG_UNALIGNED_MB = 40.0, 59.0

Placement = Literal["contiguous", "scattered"]
Indexer = Literal["fp4", "fp8"]


@dataclass(frozen=True)
class Payload:
    """One pool's share of one request."""

    index_storage: str
    num_tokens: int
    placement: str  # of the physical pages, on both sides
    pool: str
    bytes: int
    pages: int
    descriptors: int
    descriptors_by_layer_and_page: int
    held_bytes: int  # of the pages that the request holds in the pool


def measure(index_storage: Indexer, num_tokens: int, placement: Placement) -> list[Payload]:
    """The payload of each pool, decode having nothing of the request."""
    specs = preset_pools(MODEL, index_storage=index_storage)
    source = _place(specs, num_tokens, placement, seed=1)
    target = _place(specs, num_tokens, placement, seed=2)
    return [
        _payload(spec, source[spec.table], target[spec.table], index_storage, num_tokens, placement)
        for spec in specs
    ]


def _payload(
    spec: PoolSpec,
    source: PageRun,
    target: PageRun,
    index_storage: str,
    num_tokens: int,
    placement: str,
) -> Payload:
    rows = rows_to_receive(spec, num_tokens)
    runs = byte_runs(spec, source, spec, target, rows)
    pages = len(touched_pages(spec, rows))
    return Payload(
        index_storage=index_storage,
        num_tokens=num_tokens,
        placement=placement,
        pool=spec.name,
        bytes=runs.total_bytes,
        pages=pages,
        descriptors=len(runs),
        descriptors_by_layer_and_page=pages * len(spec.layers),
        held_bytes=len(spec.pages(num_tokens, num_tokens)) * spec.page_bytes,
    )


def _place(
    specs: Sequence[PoolSpec], num_tokens: int, placement: Placement, seed: int
) -> dict[TableSpec, PageRun]:
    """Physical pages of a request: in one piece, or so that no two are neighbours."""
    rng = np.random.default_rng(seed)
    runs = {}
    for table in tables_of(specs):
        held = table.pages(num_tokens, num_tokens)
        if placement == "contiguous":
            physical = np.arange(1, len(held) + 1)
        else:
            physical = 1 + 2 * rng.permutation(len(held))
        runs[table] = PageRun(held.start, tuple(physical.tolist()))
    return runs


def excess(num_tokens: int) -> tuple[int, float, float]:
    """Bytes that move, and by what part they exceed two minima.

    The first: rows that decode needs, times a row's bytes. The second, stricter: without the half
    of a finished block's rows that only that block's own compressed row was made of.
    """
    specs = preset_pools(MODEL)
    moved = _total(measure("fp4", num_tokens, "scattered"), "bytes")
    needed = unused = 0
    for spec in specs:
        row_bytes = len(spec.layers) * spec.row_bytes
        needed += len(spec.live_rows(num_tokens)) * row_bytes
        if isinstance(spec.retention, Block) and spec.retention.overlap:
            finished = num_tokens // spec.retention.size * spec.retention.size
            unused += len(range(spec.live_rows(num_tokens).start, finished)) * row_bytes // 2
    return moved, moved / needed - 1, moved / (needed - unused) - 1


def _minimum_table() -> Table:
    table = Table(title="What moves beside what decode needs", title_justify="left")
    for head in ("tokens", "bytes", "above the rows' bytes", "above the half rows' bytes"):
        table.add_column(head, justify="right")
    for num_tokens in MINIMUM_LENGTHS:
        moved, rows, halves = excess(num_tokens)
        table.add_row(f"{num_tokens:,}", f"{moved:,}", f"{rows:.2%}", f"{halves:.2%}")
    return table


def _total(payloads: Iterable[Payload], field: str) -> int:
    return sum(getattr(payload, field) for payload in payloads)


def _length_table(num_tokens: int) -> Table:
    table = Table(title=f"{num_tokens:,} tokens, fp8 rows, fp4 indexer rows", title_justify="left")
    heads = ("bytes", "pages", "descriptors: contiguous", "scattered", "by layer and page")
    table.add_column("pool")
    for head in heads:
        table.add_column(head, justify="right")
    near, far = measure("fp4", num_tokens, "contiguous"), measure("fp4", num_tokens, "scattered")
    for one, other in zip(near, far, strict=True):
        counts = (one.bytes, one.pages, one.descriptors, other.descriptors)
        cells = (*counts, one.descriptors_by_layer_and_page)
        table.add_row(one.pool, *(f"{cell:,}" for cell in cells))
    sums = [_total(near, field) for field in ("bytes", "pages", "descriptors")]
    sums += [_total(far, "descriptors"), _total(far, "descriptors_by_layer_and_page")]
    table.add_section()
    table.add_row("all", *(f"{cell:,}" for cell in sums))
    return table


def _comparison_table() -> Table:
    table = Table(title=f"Payload around {COMPARED_TOKENS:,} tokens", title_justify="left")
    table.add_column("system")
    table.add_column("MB (10^6 bytes)", justify="right")
    for where, megabytes in (
        (f"{COMPARED_TOKENS:,} tokens, page-aligned", SGLANG_ALIGNED_MB),
        ("unaligned, up to", SGLANG_UNALIGNED_MB),
    ):
        table.add_row(f"SGLang 0.5.23 (computed from its layouts), {where}", f"{megabytes:.1f}")
    storages: tuple[Indexer, ...] = ("fp8", "fp4")
    for index_storage in storages:
        for num_tokens in (COMPARED_TOKENS, COMPARED_TOKENS - 1):
            total = _total(measure(index_storage, num_tokens, "scattered"), "bytes")
            name = f"Sluice, {index_storage} indexer rows, {num_tokens:,} tokens"
            table.add_row(name, f"{total / 1e6:.1f}")
    return table


def result_rows() -> Iterator[dict[str, Any]]:
    """Every length, placement and indexer storage, one pool a line."""
    storages: tuple[Indexer, ...] = ("fp4", "fp8")
    placements: tuple[Placement, ...] = ("contiguous", "scattered")
    for index_storage in storages:
        for num_tokens in LENGTHS:
            for placement in placements:
                for payload in measure(index_storage, num_tokens, placement):
                    yield asdict(payload)


def main() -> int:
    """Print the tables and write the CSV; 1 if a long request needs too many descriptors."""
    console = Console()
    origin = provenance("python -m sluice.benchmarks.payload")
    print_provenance(console, origin)
    for num_tokens in LENGTHS:
        console.print(_length_table(num_tokens))
    console.print(_comparison_table())
    console.print(_minimum_table())
    longest = measure("fp4", LONG_TOKENS, "scattered")
    needed, by_layer = (
        _total(longest, field) for field in ("descriptors", "descriptors_by_layer_and_page")
    )
    console.print(
        f"{LONG_TOKENS:,} tokens, scattered pages: {needed:,} descriptors (limit "
        f"{MAX_DESCRIPTORS:,}); one for each layer and page would be {by_layer:,}"
    )
    write_csv(CSV, origin, result_rows())
    console.print(f"written: {CSV}")
    too_much = any(excess(num_tokens)[1] > MAX_EXCESS for num_tokens in MINIMUM_LENGTHS)
    return 1 if needed > MAX_DESCRIPTORS or too_much else 0


if __name__ == "__main__":
    sys.exit(main())
