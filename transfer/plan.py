"""From two pools' layouts, pages and a range of rows to the byte runs that move them.

Pure arithmetic on numpy: no tensor, no transport. Rows are absolute (token // tokens_per_row), so
that source and target need not agree on page size, on which pages are cached, or on where the
request's pages begin.

    rows           |  a . . . . . . . . . . . . . . . b  |
    source pages   |-------|-------|-------|-------|         rows are cut at the page borders of
    target pages   |---------------|---------------|         both sides; each piece is one run a
    pieces            |----|-------|-------|----|            layer, and touching runs are merged
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from sluice.cache.pools import NULL_PAGE
from sluice.cache.spec import Full, PoolSpec, TableSpec
from sluice.protocol.messages import IncompatiblePeers, PageRun, TransferFailed

Memory = TypeVar("Memory")
Integers = npt.NDArray[np.int64]

# The meaning of a row. The rest, and a dtype among the model's `choices`, is up to a role.
MUST_AGREE = ("layers", "row_shape", "tokens_per_row", "retention", "choices")


@dataclass(frozen=True)
class ByteRuns:
    """Contiguous copies between two pools; offsets are bytes from each pool's first byte.

    All three arrays are int64 [num_runs], ordered by source_offset; runs do not overlap.
    """

    source_offset: Integers
    target_offset: Integers
    num_bytes: Integers

    def __len__(self) -> int:
        return len(self.num_bytes)

    @property
    def total_bytes(self) -> int:
        return int(self.num_bytes.sum())


@dataclass(frozen=True)
class Copy:
    """Runs from registered memory of one node, by its name, into a pool of the other."""

    source: str
    target: str
    runs: ByteRuns


def named(memories: Mapping[str, Memory], name: str) -> Memory:
    """Registered memory by its name. Raises TransferFailed: the name may come from a peer."""
    if name not in memories:
        raise TransferFailed(f"no memory is named {name!r}, only {', '.join(memories)}")
    return memories[name]


@dataclass(frozen=True)
class PoolTraffic:
    """What moved of one pool: pages of the target touched for the first time, bytes, runs."""

    pages: int
    bytes: int
    descriptors: int


def check_mapping(source: Sequence[PoolSpec], target: Sequence[PoolSpec]) -> None:
    """Raise IncompatiblePeers unless every pool of one side has its like on the other.

    Pools are paired by name, in any order. Page sizes, devices, and dtypes that the model converts
    into each other may differ.
    """
    sources, targets = _by_name(source, "source"), _by_name(target, "target")
    for name in sources.keys() ^ targets.keys():
        side = "target" if name in sources else "source"
        raise IncompatiblePeers(
            f"pool {name}: the {side} has no such pool, its pools are "
            f"{', '.join(targets if name in sources else sources)}; "
            "start both nodes with the same model and cache_path"
        )
    for name, ours in sources.items():
        for field in MUST_AGREE:
            here, there = getattr(ours, field), getattr(targets[name], field)
            if here != there:
                raise IncompatiblePeers(
                    f"pool {name}: {field} is {here} at the source and {there} at the target, "
                    "expected equal; start both nodes with the same model"
                )
        _check_dtype(ours, targets[name])


def _check_dtype(source: PoolSpec, target: PoolSpec) -> None:
    try:
        source.stored_as(target.dtype)
    except ValueError as error:
        raise IncompatiblePeers(
            f"pool {source.name}: dtype is {source.dtype} at the source and {target.dtype} at the "
            f"target, and nothing converts one into the other ({error}); choose the same dtype on "
            "both roles"
        ) from error


def rows_to_receive(spec: PoolSpec, num_tokens: int, skip_tokens: int = 0) -> range:
    """All rows a target needs of a request of `num_tokens` computed tokens.

    skip_tokens: of Full pools the target holds every row that was complete at that length; the
    others are always sent whole, since what is live moves on with the length.
    """
    live = spec.live_rows(num_tokens)
    skipped = skip_tokens // spec.tokens_per_row if spec.table.keeps_all else 0
    first = max(live.start, skipped)
    return range(first, max(first, live.stop))


def rows_to_send(
    spec: PoolSpec, *, start: int, end: int, num_tokens: int, skip_tokens: int = 0
) -> range:
    """Rows to send once tokens [start, end) are computed, of a request of `num_tokens` tokens.

    A Full pool sends the rows that were completed in the chunk. The others send nothing before
    the last chunk (end == num_tokens), and then only what retention keeps.
    """
    wanted = rows_to_receive(spec, num_tokens, skip_tokens)
    if not isinstance(spec.retention, Full):
        return wanted if end == num_tokens else range(wanted.start, wanted.start)
    first = max(start // spec.tokens_per_row, wanted.start)
    return range(first, max(first, end // spec.tokens_per_row))


def byte_runs(
    source: PoolSpec, source_run: PageRun, target: PoolSpec, target_run: PageRun, rows: range
) -> ByteRuns:
    """The fewest contiguous copies that move `rows` of all layers from one pool to the other.

    The specs must have passed `check_mapping` and have the same dtype. Raises TransferFailed if a
    row lies in a page that a run does not list: nothing outside of those is ever read or written.
    """
    check_held(source, source_run, rows, "source")
    check_held(target, target_run, rows, "target")
    edges = page_borders(rows, (source.rows_per_page, target.rows_per_page))
    starts, num_rows = edges[:-1], np.diff(edges)
    return _merged(
        source_offset=_offsets(source, source_run, starts).ravel(),
        target_offset=_offsets(target, target_run, starts).ravel(),
        num_bytes=np.repeat(num_rows * source.row_bytes, len(source.layers)),
    )


def check_landing(
    copies: Sequence[Copy],
    specs: Mapping[str, PoolSpec],
    pages: Mapping[TableSpec, PageRun],
    rows: Mapping[str, range],
) -> None:
    """Raise TransferFailed unless copies fill just these rows of these pages, each byte once."""
    for name in rows.keys() | {copy.target for copy in copies}:
        if name not in specs or name not in rows:
            raise TransferFailed(f"pool {name}: bytes come for it, and no rows of it are spoken of")
        spec, run = specs[name], pages[specs[name].table]
        expected = byte_runs(spec, run, spec, run, rows[name])
        found = [copy.runs for copy in copies if copy.target == name]
        if not found or not _fills(found, expected):
            raise TransferFailed(
                f"pool {name}: runs do not fill {rows[name]} in the grant's pages, or go beyond"
            )


def _fills(found: Sequence[ByteRuns], expected: ByteRuns) -> bool:
    """Whether runs, in any pieces and order, cover the target bytes of the expected ones."""
    start = np.concatenate([runs.target_offset for runs in found])
    end = start + np.concatenate([runs.num_bytes for runs in found])
    order = np.argsort(start)
    start, end = start[order], end[order]
    apart = start[1:] != end[:-1]  # runs that overlap are apart, too: then ends are not in order
    heads, tails = np.concatenate([[True], apart]), np.concatenate([apart, [True]])
    expected_end = expected.target_offset + expected.num_bytes
    return np.array_equal(start[heads], expected.target_offset) and np.array_equal(
        end[tails], expected_end
    )


def touched_pages(spec: PoolSpec, rows: range) -> range:
    """Logical pages in which `rows` lie."""
    if not rows:
        return range(0)
    return range(rows.start // spec.rows_per_page, (rows.stop - 1) // spec.rows_per_page + 1)


def traffic_of(runs: ByteRuns, num_pages: int) -> PoolTraffic:
    return PoolTraffic(pages=num_pages, bytes=runs.total_bytes, descriptors=len(runs))


def _by_name(specs: Sequence[PoolSpec], side: str) -> Mapping[str, PoolSpec]:
    by_name = {spec.name: spec for spec in specs}
    if len(by_name) != len(specs):
        names = [spec.name for spec in specs]
        twice = next(name for name in names if names.count(name) > 1)
        raise IncompatiblePeers(
            f"pool {twice}: the {side} declares it more than once; give each pool its own name"
        )
    return by_name


def page_borders(rows: range, page_sizes: Sequence[int]) -> Integers:
    """`rows.start`, every page border inside `rows`, and `rows.stop`; int64, ascending."""
    if not rows:
        return np.zeros(1, dtype=np.int64)
    inner = [np.arange((rows.start // size + 1) * size, rows.stop, size) for size in page_sizes]
    return np.unique(np.concatenate([[rows.start, rows.stop], *inner])).astype(np.int64)


def check_held(spec: PoolSpec, run: PageRun, rows: range, side: str) -> None:
    """Raise TransferFailed unless all rows lie in pages that the run lists."""
    needed = touched_pages(spec, rows)
    if needed and (needed.start < run.first or needed.stop > run.first + len(run.pages)):
        raise TransferFailed(
            f"pool {spec.name}: rows {rows.start} to {rows.stop - 1} are outside the {side}'s "
            f"logical pages [{run.first}, {run.first + len(run.pages)}); the {side} holds too few "
            "pages"
        )
    physical = run.pages[needed.start - run.first : needed.stop - run.first] if needed else ()
    if physical and min(physical) <= NULL_PAGE:
        raise TransferFailed(
            f"pool {spec.name}: the {side} lists page {min(physical)}, expected pages above "
            f"{NULL_PAGE}, the null page, which no request holds"
        )


def _offsets(spec: PoolSpec, run: PageRun, rows: Integers) -> Integers:
    """Byte offset of each row in each layer, [num_rows, num_layers]."""
    physical = np.asarray(run.pages, dtype=np.int64)[rows // spec.rows_per_page - run.first]
    first_layer = physical * spec.page_bytes + rows % spec.rows_per_page * spec.row_bytes
    layers = np.arange(len(spec.layers), dtype=np.int64) * spec.rows_per_page * spec.row_bytes
    return first_layer[:, None] + layers


def _merged(source_offset: Integers, target_offset: Integers, num_bytes: Integers) -> ByteRuns:
    """Join runs that touch on both sides.

    Ordered by source offset, two runs that touch on both sides stand next to each other, whatever
    the order of pages; so one pass finds all.
    """
    order = np.argsort(source_offset)
    source, target, size = source_offset[order], target_offset[order], num_bytes[order]
    apart = (source[1:] != source[:-1] + size[:-1]) | (target[1:] != target[:-1] + size[:-1])
    heads = np.flatnonzero(np.concatenate([np.ones(min(1, len(size)), dtype=bool), apart]))
    joined = np.add.reduceat(size, heads) if len(size) else size
    return ByteRuns(source[heads], target[heads], joined)
