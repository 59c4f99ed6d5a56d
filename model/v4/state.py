"""Compressor state: what is kept of unfinished blocks, and the new rows that come out of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sluice.kernels.accumulators import accumulate_blocks, close_blocks
from sluice.kernels.compressor import compress_overlapping, compress_raw
from sluice.kernels.rows import write_rows


class State(Protocol):
    """One step's slots in a compressor's state."""

    @property
    def pool(self) -> str: ...

    def update(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Take in the step's tokens; returns the new rows, fp32 [n, dim], before norm and rotation.

        rows: the layer's view [num_pages, rows_per_page, *row_shape] of the pool, written in place.
        tokens: [T, 2, width] fp32, the tokens' kv and score.
        """
        ...


@dataclass(frozen=True)
class RawState:
    """Every token's kv and score; width is twice the row's where blocks overlap."""

    pool: str
    write: Tensor  # [T]
    read: Tensor  # [n, ratio], or [n, 2 * ratio] where blocks overlap: the tokens of each new row
    overlap: bool

    def update(self, rows: Tensor, tokens: Tensor) -> Tensor:
        write_rows(rows, self.write, tokens)
        compress = compress_overlapping if self.overlap else compress_raw
        return compress(rows, self.read)


@dataclass(frozen=True)
class AccumulatedState:
    """Running softmax accumulators of every block that the step touches, finished or not."""

    pool: str
    read: Tensor  # [n], -1 where the block begins in this step
    write: Tensor  # [n], -1 where the step finishes the block
    block_of_token: Tensor  # [T]

    def update(self, rows: Tensor, tokens: Tensor) -> Tensor:
        kv, score = tokens.unbind(1)
        blocks = accumulate_blocks(rows, self.read, self.block_of_token, kv, score)
        write_rows(rows, self.write, blocks)
        return close_blocks(blocks)
