"""Packed rows that kernels unpack as they read them: they move once, and nothing is copied.

`load_rows` is what such kernels call in place of `tl.load`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.codes import e2m1_value, e4m3_value, ue8m0_scale

LoadForm = tuple[int, int, int, int, bool, bool, int]

# The released models' formats: kv rows, and index keys in either.
FP8_V4: LoadForm = (448, 64, 448, 576, False, False, 8)
FP8_INDEX: LoadForm = (128, 128, 128, 128, False, True, 4)
FP4_INDEX: LoadForm = (128, 32, 64, 64, True, False, 4)


class RowFormat(Protocol):
    """What must be known of a packed row: see cache/row_format.py. Offsets are bytes."""

    @property
    def num_coded(self) -> int: ...
    @property
    def num_plain(self) -> int: ...
    @property
    def tile(self) -> int: ...
    @property
    def num_tiles(self) -> int: ...
    @property
    def code(self) -> str: ...
    @property
    def scale(self) -> str: ...
    @property
    def plain_offset(self) -> int: ...
    @property
    def scale_offset(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...


@dataclass(frozen=True)
class PackedRows:
    """One layer's view of a pool [num_pages, rows_per_page, row_bytes] uint8, and their format."""

    rows: Tensor
    form: RowFormat


Rows = Tensor | PackedRows  # vectors, or those packed


@dataclass(frozen=True)
class RowLayout:
    """How kernels find rows: a pool's view, its strides in units of `form`, and `load_rows`' form.

    The unit is a constant of the kernel, so that it may load as many bytes at once.
    """

    rows: Tensor
    page_rows: int
    strides: tuple[int, int]  # between pages, and between rows of a page
    form: LoadForm | None

    @classmethod
    def of(cls, rows: Rows) -> RowLayout:
        if isinstance(rows, Tensor):
            return cls(rows, rows.shape[1], (rows.stride(0), rows.stride(1)), None)
        memory, form = rows.rows, rows.form
        page, row = memory.stride(0), memory.stride(1)
        unit = math.gcd(16, page, row)
        places = (form.num_coded, form.tile, form.plain_offset, form.scale_offset)
        load_form = (*places, form.code == "e2m1", form.scale == "float32", unit)
        return cls(memory, memory.shape[1], (page // unit, row // unit), load_form)


@triton.jit
def load_rows(
    rows: tl.tensor,
    at: tl.tensor,
    there: tl.tensor,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    FORM: tl.constexpr,
) -> tl.tensor:
    """Vectors [n, BLOCK_DIM] of the rows that begin at units `at` [n], zeros where not `there`.

    Channels from DIM on are zeros. FORM: None for vectors, whose units are elements and which keep
    their dtype. fp32 come of a packed row, by (coded channels, channels of a tile, bytes before the
    plain channels, bytes before the scales, whether codes are FP4, whether scales are fp32, bytes
    of a unit).
    """
    channel = tl.arange(0, BLOCK_DIM)
    held = there[:, None]
    if DIM < BLOCK_DIM:
        held = held & (channel < DIM)[None, :]
    if FORM is None:
        values = tl.load(rows + at[:, None] + channel[None, :], mask=held, other=0.0)
    else:
        start = rows + (at * FORM[6])[:, None]
        values = _coded(start, there, BLOCK_DIM, FORM)
        if FORM[0] < DIM:
            words = (start + FORM[2]).to(tl.pointer_type(tl.bfloat16), bitcast=True)
            is_plain = (channel >= FORM[0])[None, :]
            plain = tl.load(words + (channel - FORM[0])[None, :], mask=held & is_plain, other=0.0)
            values = tl.where(is_plain, plain.to(tl.float32), values)
    return values


@triton.jit
def _coded(
    start: tl.tensor, there: tl.tensor, BLOCK_DIM: tl.constexpr, FORM: tl.constexpr
) -> tl.tensor:
    """Coded channels of the rows at pointers `start` [n, 1]: [n, BLOCK_DIM] fp32, zeros beyond.

    A tile's scale is loaded once, and spread over it by shape.
    """
    if FORM[4]:
        byte = tl.arange(0, BLOCK_DIM // 2)
        held = there[:, None] & (byte < FORM[0] // 2)[None, :]
        code = tl.load(start + byte[None, :], mask=held, other=0).to(tl.int32)
        values = tl.interleave(e2m1_value(code & 15), e2m1_value(code >> 4))
    else:
        channel = tl.arange(0, BLOCK_DIM)
        held = there[:, None] & (channel < FORM[0])[None, :]
        values = e4m3_value(tl.load(start + channel[None, :], mask=held, other=0))
    width: tl.constexpr = min(FORM[1], BLOCK_DIM)
    tile = tl.arange(0, BLOCK_DIM // width)
    held = there[:, None] & (tile * width < FORM[0])[None, :]
    if FORM[5]:
        wide = (start + FORM[3]).to(tl.pointer_type(tl.float32), bitcast=True)
        scale = tl.load(wide + tile[None, :], mask=held, other=0.0)
    else:
        scale = ue8m0_scale(tl.load(start + FORM[3] + tile[None, :], mask=held, other=0))
    tiles = tl.reshape(values, (values.shape[0], BLOCK_DIM // width, width)) * scale[:, :, None]
    return tl.reshape(tiles, (values.shape[0], BLOCK_DIM))
