"""PoolSpec: what a cache pool is, as data, with all arithmetic between tokens, rows and pages.

Nothing here knows a model, a device or torch, so that the router and the transfer planner can use
it. Every index is a position in the *full token coordinate*: the request's absolute token number,
which all pools share whatever their ratio.

Three retentions say which rows must stay once `num_tokens` tokens are computed:

    Full            |##########################|        every complete row
    Window(n)       |                 #########|        the last n-1 rows (the next one joins them)
    Block(n, k)     |               ####|####|##        rows of the unfinished block and of the
                                                        k blocks before it
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from sluice.cache.row_format import RowFormat

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}


@dataclass(frozen=True)
class Full:
    """Every complete row stays as long as the request lives."""

    max_live_tokens = None

    def first_live(self, num_tokens: int) -> int:
        """First token whose row must stay when `num_tokens` tokens are computed."""
        return 0

    def expires_at(self, token: int) -> float:
        """The number of computed tokens from which on the row of `token` need not stay."""
        return math.inf


@dataclass(frozen=True)
class Window:
    """The last `size - 1` rows stay: with the next token they make a window of `size`."""

    size: int

    @property
    def max_live_tokens(self) -> int:
        return self.size - 1

    def first_live(self, num_tokens: int) -> int:
        return max(0, num_tokens - (self.size - 1))

    def expires_at(self, token: int) -> float:
        return token + self.size


@dataclass(frozen=True)
class Block:
    """Rows of the unfinished block of `size` tokens stay, and of `overlap` blocks before it."""

    size: int
    overlap: int = 0

    @property
    def max_live_tokens(self) -> int:
        return self.size * (self.overlap + 1) - 1

    def first_live(self, num_tokens: int) -> int:
        return max(0, (num_tokens // self.size - self.overlap) * self.size)

    def expires_at(self, token: int) -> float:
        return (token // self.size + 1 + self.overlap) * self.size


Retention = Full | Window | Block


@dataclass(frozen=True)
class TableSpec:
    """What pools must have in common to share a page table: equal span and retention."""

    tokens_per_page: int
    retention: Retention

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Found once: tables are the keys of every look-up in the step loops."""
        return hash((self.tokens_per_page, self.retention))

    @property
    def keeps_all(self) -> bool:
        """Whether pages stay as long as the request lives, so that they grow with it."""
        return self.retention.max_live_tokens is None

    def pages(self, start: int, end: int) -> range:
        """Logical pages a request holds while tokens [start, end) are computed.

        `pages(n, n)` is what it holds between steps, with n tokens computed.
        """
        first = self.first_page(start)
        return range(first, max(first, self.page_end(end)))

    def first_page(self, num_tokens: int) -> int:
        """The first logical page held with `num_tokens` tokens computed."""
        return self.retention.first_live(num_tokens) // self.tokens_per_page

    def page_expires_at(self, logical_page: int) -> float:
        """The number of computed tokens from which on the page need not be held."""
        return self.retention.expires_at((logical_page + 1) * self.tokens_per_page - 1)

    def page_end(self, num_tokens: int) -> int:
        """One past the logical page of the last of `num_tokens` tokens."""
        return -(-num_tokens // self.tokens_per_page)

    def pages_to_admit(self, num_tokens: int, max_tokens: int) -> range:
        """Logical pages to take when a request with `num_tokens` computed tokens is admitted.

        A Full table takes them all at once for the request's greatest length, so that it can never
        run dry under an admitted request; the others hold a bounded number and slide.
        """
        if self.keeps_all:
            return self.pages(0, max_tokens)
        return self.pages(num_tokens, num_tokens)

    def max_pages(self, step_tokens: int, max_tokens: int) -> int:
        """Most pages one request can hold while it computes up to `step_tokens` tokens a step.

        `max_tokens` bounds the request's length and matters to Full tables only.
        """
        live = self.retention.max_live_tokens
        if live is None:
            return ceil_div(max_tokens, self.tokens_per_page)
        span = live + step_tokens  # a span of s tokens touches at most this many pages:
        return (span + self.tokens_per_page - 2) // self.tokens_per_page + 1


@dataclass(frozen=True)
class PoolSpec:
    """One cache pool: a tensor [num_pages, num_layers, rows_per_page, *row_shape].

    A page holds the rows of *all* layers of the pool for `tokens_per_page` tokens, contiguously.
    `layers` are the model's layer numbers in storage order; `row_shape` and `dtype` describe one
    row of one layer; a row stands for `tokens_per_row` tokens. `dtype` names numbers or a packed
    format; `choices` are the dtypes and formats that a role may store the pool in instead.

    Raises ValueError if the page span is not a whole number of rows or the dtype is unknown.
    """

    name: str
    layers: tuple[int, ...]
    row_shape: tuple[int, ...]
    dtype: str
    tokens_per_row: int
    tokens_per_page: int
    retention: Retention
    device: str = "cpu"
    choices: tuple[str | RowFormat, ...] = ()

    def __post_init__(self) -> None:
        if self.tokens_per_page <= 0 or self.tokens_per_page % self.tokens_per_row:
            raise ValueError(
                f"pool {self.name}: tokens_per_page is {self.tokens_per_page}, expected a positive "
                f"multiple of tokens_per_row ({self.tokens_per_row})"
            )
        if self.format is None and self.dtype not in DTYPE_BYTES:
            raise ValueError(
                f"pool {self.name}: dtype is {self.dtype!r}, expected one of "
                f"{', '.join([*DTYPE_BYTES, *self._formats])}"
            )

    def stored_as(self, dtype: str) -> PoolSpec:
        """The pool in another of its dtypes or formats. Raises ValueError if it has no such one."""
        known = list(dict.fromkeys([self.dtype, *map(_name, self.choices)]))
        if dtype not in known:
            raise ValueError(
                f"pool {self.name}: dtype is {dtype!r}, expected {' or '.join(known)}, "
                "which is what the model can keep there"
            )
        return replace(self, dtype=dtype)

    @property
    def format(self) -> RowFormat | None:
        """How rows are packed; None where they are plain numbers of `dtype`."""
        return self._formats.get(self.dtype)

    @property
    def _formats(self) -> dict[str, RowFormat]:
        return {choice.name: choice for choice in self.choices if isinstance(choice, RowFormat)}

    @property
    def table(self) -> TableSpec:
        """The page table this pool shares with pools of equal span and retention."""
        return TableSpec(self.tokens_per_page, self.retention)

    @property
    def rows_per_page(self) -> int:
        return self.tokens_per_page // self.tokens_per_row

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of one layer."""
        if self.format is not None:
            return self.format.row_bytes
        return math.prod(self.row_shape) * DTYPE_BYTES[self.dtype]

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Of the stored numbers; a packed row is `row_bytes` bytes."""
        row = self.row_shape if self.format is None else (self.row_bytes,)
        return (len(self.layers), self.rows_per_page, *row)

    @property
    def number_dtype(self) -> str:
        """The dtype of the stored numbers: bytes where rows are packed."""
        return self.dtype if self.format is None else "uint8"

    @property
    def page_bytes(self) -> int:
        return len(self.layers) * self.rows_per_page * self.row_bytes

    def pages(self, start: int, end: int) -> range:
        """Logical pages a request holds while tokens [start, end) are computed."""
        return self.table.pages(start, end)

    def live_rows(self, num_tokens: int) -> range:
        """Rows (full coordinate // tokens_per_row) that must stay at `num_tokens` tokens.

        A Full pool holds complete rows only; in a Block pool the last row may stand for an
        unfinished block, and is then still being accumulated.
        """
        first = self.retention.first_live(num_tokens) // self.tokens_per_row
        if isinstance(self.retention, Full):
            return range(first, num_tokens // self.tokens_per_row)
        return range(first, max(first, ceil_div(num_tokens, self.tokens_per_row)))

    def slots(self, physical_pages: Any, positions: Any) -> Any:
        """Slot (page * rows_per_page + offset) of the row that holds each token position.

        physical_pages: the page of each position (ints or integer array/tensor, same shape).
        """
        offset = positions % self.tokens_per_page // self.tokens_per_row
        return physical_pages * self.rows_per_page + offset


def _name(choice: str | RowFormat) -> str:
    return choice if isinstance(choice, str) else choice.name


def tables_of(specs: Iterable[PoolSpec]) -> tuple[TableSpec, ...]:
    """The distinct page tables of these pools, in order of first use."""
    return tuple(dict.fromkeys(spec.table for spec in specs))


def unit_tokens(specs: Iterable[PoolSpec]) -> int:
    """Tokens in a unit of cached history: whole pages of every table that keeps everything."""
    return math.lcm(*(table.tokens_per_page for table in tables_of(specs) if table.keeps_all))


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)
