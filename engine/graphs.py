"""DecodeSteps: one token of each request, computed on buffers that stay where they are.

Row i of every buffer is the i-th request of the batch. Only raw metadata is written before a step,
token ids, positions and page tables; all that follows from it for each pool is found inside. So on
a GPU a step is a graph, captured once for each size of batch:

1. A size that is new is captured on rows of null pages, which no request sees.
2. The step's requests are written to the first rows; a row is copied only where its pages changed.
3. The rest of the rows up to the captured size are null pages, and their logits are cut off.

On a CPU the same function runs on the same buffers, in the batch's own size. Steps of few requests
are recorded there, once for each size and width of page tables, and replayed: kernels/capture.py.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_

import numpy as np
import torch
from torch import Tensor

from sluice.cache.manager import CacheManager, PageTable
from sluice.cache.pools import NULL_PAGE
from sluice.cache.spec import TableSpec
from sluice.engine.batch import Chunk
from sluice.kernels.capture import Capture, NotRepeatable
from sluice.kernels.cpu import FEW_ROWS
from sluice.model.common.inputs import ForwardInputs, PoolView
from sluice.model.registry import Model

log = logging.getLogger(__name__)
MAX_RECORDED = 32  # the latest; each keeps the memory of its step
WARM_UP_STEPS = 2  # the first compiles kernels, the second finds them compiled


@dataclass(frozen=True)
class Buffer:
    """int64 numbers: what the host writes, and what a step reads, the same memory on a CPU."""

    host: np.ndarray
    device: Tensor

    @classmethod
    def of(cls, shape: tuple[int, ...], device: str) -> Buffer:
        on_cpu = device == "cpu"
        host = torch.zeros(shape, dtype=torch.int64, pin_memory=not on_cpu)
        return cls(host.numpy(), host if on_cpu else torch.zeros_like(host, device=device))

    def upload(self) -> None:
        """Copy to the device. The host must not write before the step's result was read."""
        if self.device.device.type != "cpu":
            self.device.copy_(torch.from_numpy(self.host), non_blocking=True)


class StepBuffers:
    """The inputs of a decode step. Owned by the node's loop thread, as the manager is."""

    def __init__(self, manager: CacheManager, *, max_tokens: int, device: str) -> None:
        """max_tokens: the greatest length of a request."""
        self._manager = manager
        num_rows, tables = manager.max_requests, manager.tables
        self._tables = {
            t: Buffer.of((num_rows, t.max_pages(1, max_tokens)), device) for t in tables
        }
        self._numbers = Buffer.of((3 + len(tables), num_rows), device)
        self._firsts = dict(zip(tables, self._numbers.host[3:], strict=True))
        self._rows = torch.arange(num_rows + 1, device=device)
        self._num_pages = {table: np.zeros(num_rows, dtype=np.int64) for table in tables}
        self._holders: list[Mapping[TableSpec, PageTable]] = []  # of the rows in use
        # The number of tokens from which on a row of a table is stale:
        self._valid_until = {table: np.zeros(num_rows, dtype=np.int64) for table in tables}
        self._viewed: tuple[int, Mapping[TableSpec, int]] = (0, {})
        self._views: ForwardInputs

    def inputs(self, num_rows: int, widths: Mapping[TableSpec, int] | None = None) -> ForwardInputs:
        """Views of the first rows, those of the last call where they are the same.

        widths: columns of the page tables; by default, on a CPU, as many as the longest row has.
        """
        widths = self.widths(num_rows) if widths is None else widths
        if (num_rows, widths) != self._viewed:
            self._viewed, self._views = (num_rows, widths), self._view(num_rows, widths)
        return self._views

    def _view(self, num_rows: int, widths: Mapping[TableSpec, int]) -> ForwardInputs:
        token_ids, positions, history, *firsts = self._numbers.device[:, :num_rows].unbind()
        first_pages = zip(self._tables, firsts, strict=True)
        return ForwardInputs(
            token_ids=token_ids,
            positions=positions,
            request_index=self._rows[:num_rows],
            query_start=self._rows[: num_rows + 1],
            num_computed=positions,
            num_history=history,
            page_tables={t: b.device[:num_rows, : widths[t]] for t, b in self._tables.items()},
            first_pages={t: first for t, first in first_pages if not t.keeps_all},
        )

    def widths(self, num_rows: int, *, rounded: bool = False) -> dict[TableSpec, int]:
        """Columns of each page table that the first rows need: on a GPU all.

        rounded: to the next power of two, so that few widths are met.
        """
        widths = {}
        for table, buffer in self._tables.items():
            widths[table] = buffer.device.shape[1]
            if buffer.device.device.type == "cpu":
                used = max(1, int(self._num_pages[table][:num_rows].max()))
                used = 1 << (used - 1).bit_length() if rounded else used
                widths[table] = min(used, widths[table])
        return widths

    def fill(self, chunks: Sequence[Chunk]) -> None:
        """Write one token of each request to the first rows, and null pages to the others."""
        holders = [self._manager.page_tables(chunk.request.grant_id) for chunk in chunks]
        self._seat(holders, chunks)
        numbers = self._numbers.host[:, : len(chunks)]
        numbers[0] = [request.token_ids[start] for request, start, _ in chunks]
        numbers[1] = [start for _, start, _ in chunks]
        for table, valid_until in self._valid_until.items():
            stale = np.flatnonzero(numbers[1] >= valid_until[: len(chunks)]).tolist()
            for row in stale:
                self._write(table, row, holders[row][table])
            if stale:
                self._tables[table].upload()
        self._numbers.upload()

    def clear(self) -> None:
        """Null pages everywhere."""
        self._seat([], [])
        for buffer in (self._numbers, *self._tables.values()):
            buffer.upload()

    def _seat(self, holders: list[Mapping[TableSpec, PageTable]], chunks: Sequence[Chunk]) -> None:
        """Give every holder its chunk's row: what is known moves there, the rest finds it stale."""
        before, self._holders = self._holders, holders
        if len(before) == len(holders) and all(map(is_, before, holders)):
            return
        row_of = {id(holder): row for row, holder in enumerate(before)}
        rows = np.array([row_of.get(id(holder), -1) for holder in holders], dtype=np.int64)
        in_use = max(len(before), len(holders))
        tables = [buffer.host for buffer in self._tables.values()]
        notes = [*self._num_pages.values(), *self._valid_until.values()]
        for array in (*tables, self._numbers.host.T, *notes):
            kept = array[rows]
            kept[rows < 0] = NULL_PAGE
            array[: len(holders)] = kept
            array[len(holders) : in_use] = NULL_PAGE
        history = [chunk.request.history_tokens for chunk in chunks]
        self._numbers.host[2, : len(chunks)] = history
        for buffer in self._tables.values():
            buffer.upload()

    def _write(self, table: TableSpec, row: int, pages: PageTable) -> None:
        """Bring a row of a table up to date."""
        count, num_pages = len(pages.pages), self._num_pages[table]
        target = self._tables[table].host[row]
        target[count : num_pages[row]] = NULL_PAGE
        target[:count] = pages.pages
        num_pages[row], self._firsts[table][row] = count, pages.first
        valid_until: float = pages.end * table.tokens_per_page
        if not table.keeps_all:
            valid_until = min(valid_until, table.page_expires_at(pages.first))
        self._valid_until[table][row] = valid_until


class DecodeSteps:
    """A model's decode steps over the pools of one node."""

    def __init__(
        self,
        model: Model,
        pools: Mapping[str, PoolView],
        manager: CacheManager,
        *,
        max_tokens: int,
        device: str,
    ) -> None:
        self._model = model
        self._pools = pools
        self._on_cpu = device == "cpu"
        self._max_rows = manager.max_requests
        self._buffers = StepBuffers(manager, max_tokens=max_tokens, device=device)
        self._graphs: dict[int, Graph] = {}
        self._records = model.repeats
        self._recorded: OrderedDict[tuple[int, ...], Capture] = OrderedDict()

    @property
    def num_recorded(self) -> int:
        """Shapes of steps that are replayed on a CPU."""
        return len(self._recorded)

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """fp32 logits [num_requests, vocab] of chunks of one token each, whose pages are held.

        They may be overwritten by the next step.
        """
        if self._on_cpu:
            return self._run_on_cpu(chunks)
        graph = self._graph(graph_rows(len(chunks), self._max_rows))
        self._buffers.fill(chunks)
        graph.graph.replay()
        return graph.logits[: len(chunks)]

    def _run_on_cpu(self, chunks: Sequence[Chunk]) -> Tensor:
        """Replay the step of this shape, or compute it where replaying would save nothing."""
        num_rows = len(chunks)
        self._buffers.fill(chunks)
        if num_rows <= FEW_ROWS and self._records:
            widths = self._buffers.widths(num_rows, rounded=True)
            shape = (num_rows, *widths.values())
            if shape not in self._recorded:
                self._record(shape, lambda: self._compute(num_rows, widths))
                self._buffers.fill(chunks)
            if shape in self._recorded:
                self._recorded.move_to_end(shape)
                return self._recorded[shape].replay()
        return self._compute(num_rows)

    def _record(self, shape: tuple[int, ...], compute: Callable[[], Tensor]) -> None:
        """Record a step. Computing it changes state, so this is done on null pages."""
        self._buffers.clear()
        try:
            self._recorded[shape] = Capture(compute)
        except NotRepeatable as reason:
            log.info("event=steps_not_recorded reason=%r", str(reason))
            self._records = False
        if len(self._recorded) > MAX_RECORDED:
            self._recorded.popitem(last=False)

    def _compute(self, num_rows: int, widths: Mapping[TableSpec, int] | None = None) -> Tensor:
        return self._model.forward(self._buffers.inputs(num_rows, widths), self._pools)

    def _graph(self, num_rows: int) -> Graph:
        """The step of this size. Computing it changes state, so it is captured on null pages."""
        if num_rows not in self._graphs:
            self._buffers.clear()
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP_STEPS):
                    self._compute(num_rows)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            shared = next((known.graph.pool() for known in self._graphs.values()), None)
            with torch.cuda.graph(graph, pool=shared):
                logits = self._compute(num_rows)
            self._graphs[num_rows] = Graph(graph, logits)
        return self._graphs[num_rows]


@dataclass(frozen=True)
class Graph:
    """A captured step, and where it leaves its logits [num_rows, vocab]."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor


def graph_rows(num_requests: int, max_requests: int) -> int:
    """The size of graph for so many requests: a power of two, or all that may run."""
    return min(1 << (num_requests - 1).bit_length(), max_requests)
