"""Staging: memory in which rows take the target's layout before they are written.

From pool to pool a run is as long as both layouts allow. Where they differ that is a few rows of
one layer, and rows of another dtype cannot be written as they are at all. Such rows are copied into
a bay of registered memory first, as whole pages of the target's kind:

    source pages   |L0 L1 ..|L0 L1 ..|           256 tokens each
    bay            |L0 L1|L0 L1|L0 L1|L0 L1|     128 tokens each: one run a page

A bay belongs to one post and comes back with its end, so what is in flight bounds the memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from sluice.cache.pools import Pool
from sluice.cache.spec import PoolSpec
from sluice.protocol.messages import PageRun
from sluice.transfer.plan import ByteRuns, byte_runs, check_held, page_borders, touched_pages
from sluice.transfer.rows import rows_of

# Descriptors of 18 KiB move as fast as a single one, those of 2 KiB at a fifth, those of 584 bytes
# at a tenth of it: measured with NIXL 1.5.1, UCX and shared memory.
PACK_BELOW_BYTES = 16 << 10
NUM_BAYS = 8
ALIGNMENT_BYTES = 64

# Rows of one pool, [n, num_layers, *row], as the target stores them.
Convert = Callable[[Tensor, PoolSpec, PoolSpec], Tensor]


def needs_packing(source: PoolSpec, target: PoolSpec, bay_bytes: int) -> bool:
    """Whether rows of this pool go through a bay: they must, or it is faster and they can."""
    if source.dtype != target.dtype:
        return True
    if source.rows_per_page == target.rows_per_page:
        return False
    run_bytes = math.gcd(source.rows_per_page, target.rows_per_page) * source.row_bytes
    return run_bytes < PACK_BELOW_BYTES and target.page_bytes <= bay_bytes


@dataclass(frozen=True)
class Packed:
    """Rows of one pool in a bay: `pages` [num_pages, *page_shape], from logical page `first` on.

    runs: from the staging memory's first byte into the target's pool.
    """

    spec: PoolSpec
    pages: Tensor
    first: int
    runs: ByteRuns

    @property
    def pool(self) -> Pool:
        return Pool(self.spec, self.pages)

    @property
    def run(self) -> PageRun:
        """Where the pages lie in `pool`."""
        return PageRun(self.first, tuple(range(len(self.pages))))


class Bay:
    """A part of the staging memory that is filled from its beginning."""

    def __init__(self, memory: Tensor, start: int, num_bytes: int) -> None:
        """memory: uint8, all of the staging memory."""
        self._memory = memory
        self._start, self._end = start, start + num_bytes
        self.clear()

    def clear(self) -> None:
        self._next = self._reserved = self._start

    def reserve(self, target: PoolSpec, rows: range) -> range:
        """The first of these rows, as many as there is room for in pages of the target."""
        num_pages = (self._end - self._reserved) // target.page_bytes
        end = (rows.start // target.rows_per_page + num_pages) * target.rows_per_page
        fitting = range(rows.start, max(rows.start, min(rows.stop, end)))
        self._reserved += _padded(len(touched_pages(target, fitting)) * target.page_bytes)
        return fitting

    def pack(
        self,
        source: Pool,
        source_run: PageRun,
        target: PoolSpec,
        target_run: PageRun,
        rows: range,
        convert: Convert,
    ) -> Packed:
        """Copy rows into room reserved for them. Raises TransferFailed for missing pages."""
        held = touched_pages(target, rows)
        start, num_bytes = self._next, len(held) * target.page_bytes
        self._next = start + _padded(num_bytes)
        assert self._next <= self._reserved, "rows are packed where room is reserved for them"
        memory = self._memory[start : start + num_bytes]
        pages = memory.view(getattr(torch, target.number_dtype)).view(-1, *target.page_shape)
        _fill(pages, held.start, source, source_run, target, rows, convert)
        here = PageRun(held.start, tuple(range(1, 1 + len(held))))
        runs = byte_runs(target, here, target, target_run, rows)
        offset = start - target.page_bytes  # the page numbered 1 begins at `start`
        moved = ByteRuns(runs.source_offset + offset, runs.target_offset, runs.num_bytes)
        return Packed(target, pages, held.start, moved)


class Staging:
    """Slots of one registered piece of memory. Belongs to the loop thread."""

    def __init__(self, num_bytes: int, device: str) -> None:
        """device: where the pools are: `cpu`, `cuda`, or `host` for pinned memory."""
        on = "cpu" if device == "host" else device
        pinned = device == "host"
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=on, pin_memory=pinned)
        bay_bytes = self.bay_bytes_of(num_bytes)
        self._free = [Bay(self.memory, i * bay_bytes, bay_bytes) for i in range(NUM_BAYS)]

    @staticmethod
    def bay_bytes_of(num_bytes: int) -> int:
        """What a bay of so much staging memory has."""
        return num_bytes // NUM_BAYS // ALIGNMENT_BYTES * ALIGNMENT_BYTES

    @staticmethod
    def bytes_for(bay_bytes: int) -> int:
        """The least staging memory whose bays have so much."""
        return _padded(bay_bytes) * NUM_BAYS

    def take(self) -> Bay | None:
        """An empty bay, None while all are in flight."""
        return self._free.pop() if self._free else None

    def give_back(self, bay: Bay) -> None:
        bay.clear()
        self._free.append(bay)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _fill(
    pages: Tensor,
    first: int,
    source: Pool,
    source_run: PageRun,
    target: PoolSpec,
    rows: range,
    convert: Convert,
) -> None:
    """Copy rows into `pages` of the target's layout, the first of which is logical page `first`.

    What else lies in those pages is left undefined. On a device the copies are over when this
    returns: a transfer reads the memory at once.
    """
    spec = source.spec
    check_held(spec, source_run, rows, "source")
    if spec.dtype == target.dtype:
        _gather(pages, first, source, source_run, target, rows)
    else:
        converted = convert(rows_of(source, source_run, rows), spec, target)
        for start, end in pairwise(page_borders(rows, (target.rows_per_page,)).tolist()):
            offset = start % target.rows_per_page
            there = pages[start // target.rows_per_page - first, :, offset : offset + end - start]
            there.copy_(converted[start - rows.start : end - rows.start].transpose(0, 1))
    if pages.is_cuda:
        torch.cuda.current_stream(pages.device).synchronize()


def _gather(
    pages: Tensor, first: int, source: Pool, source_run: PageRun, target: PoolSpec, rows: range
) -> None:
    """Fill `pages` in one go, with pieces of one layer that no page border of either side cuts.

    A loop over pages takes 5 ms for 32,768 tokens of V4-Flash in pages of half the size, this
    takes 2. Pieces without any of `rows` get those of the first: nobody reads them.
    """
    spec = source.spec
    piece_rows = math.gcd(spec.rows_per_page, target.rows_per_page)
    offsets = torch.arange(0, target.rows_per_page, piece_rows)
    start = torch.arange(len(pages))[:, None] * target.rows_per_page + offsets
    start += first * target.rows_per_page  # [num_pages, pieces per page], the first row of each
    lowest = rows.start // piece_rows * piece_rows
    start[(start < lowest) | (start >= rows.stop)] = lowest
    held = torch.tensor(source_run.pages)[start // spec.rows_per_page - source_run.first]
    layers = torch.arange(len(spec.layers))[:, None]
    piece = (held[:, None] * len(layers) + layers) * (spec.rows_per_page // piece_rows)
    piece += (start % spec.rows_per_page // piece_rows)[:, None]  # [num_pages, num_layers, pieces]
    piece_shape = (-1, piece_rows * math.prod(spec.page_shape[2:]))
    index = piece.flatten().to(pages.device)
    torch.index_select(source.tensor.view(piece_shape), 0, index, out=pages.view(piece_shape))
