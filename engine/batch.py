"""Batch: the chunks that one step computes, and their flat form for the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sluice.cache.manager import CacheManager
from sluice.cache.spec import TableSpec
from sluice.engine.request import Request
from sluice.model.inputs import ForwardInputs


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, end) of one request, computed in one step. Its pages are already held."""

    request: Request
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


def build_inputs(
    chunks: Sequence[Chunk], manager: CacheManager, device: str = "cpu"
) -> ForwardInputs:
    """The chunks as one ragged batch, with the page tables that `manager` keeps for them."""
    lengths = [chunk.num_tokens for chunk in chunks]
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    query_start = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    request_index = np.repeat(np.arange(len(chunks), dtype=np.int64), lengths)
    positions = np.arange(query_start[-1]) - query_start[request_index] + starts[request_index]
    token_ids = np.concatenate(
        [np.array(c.request.token_ids[c.start : c.end], dtype=np.int64) for c in chunks]
    )

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return ForwardInputs(
        token_ids=tensor(token_ids),
        positions=tensor(positions),
        request_index=tensor(request_index),
        query_start=tensor(query_start),
        num_computed=tensor(starts),
        page_tables={
            table: tensor(_page_table(table, chunks, manager)) for table in manager.tables
        },
    )


def _page_table(table: TableSpec, chunks: Sequence[Chunk], manager: CacheManager) -> np.ndarray:
    """Logical -> physical pages, [num_requests, max_pages], null page where none is held."""
    held = [manager.page_tables(chunk.request.grant_id)[table] for chunk in chunks]
    matrix = np.zeros((len(held), max(1, *(pages.end for pages in held))), dtype=np.int64)
    for row, pages in zip(matrix, held, strict=True):
        row[pages.first : pages.end] = pages.pages
    return matrix
