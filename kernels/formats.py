"""Packed rows of pools: write vectors into them, read vectors from them.

`rows` is one layer's view of a pool of packed rows, [num_pages, rows_per_page, row_bytes] uint8,
strided as in kernels/rows.py; slots are as there. What is read back from what was written is the
released models' simulation of their quantisation: there is no other code for that.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice.kernels import codes
from sluice.kernels.rows import gather_rows, write_rows


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


def write_packed(rows: Tensor, slots: Tensor, values: Tensor, form: RowFormat) -> None:
    """Pack `values[i]` into the row at `slots[i]`.

    slots: [n] int64; -1 is not written. values: [n, dim], of any float dtype.
    """
    write_rows(rows, slots, pack(values, form))


def gather_packed(rows: Tensor, slots: Tensor, form: RowFormat, dtype: torch.dtype) -> Tensor:
    """Vectors from the rows at `slots`, [*slots.shape, dim] of `dtype`; zeros where slot is -1."""
    return unpack(gather_rows(rows, slots), form, dtype)


def simulate(x: Tensor, form: RowFormat) -> Tensor:
    """What would be read back of x [..., dim] had it been written: a new tensor like x."""
    return unpack(pack(x, form), form, x.dtype)


def pack(x: Tensor, form: RowFormat) -> Tensor:
    """Vectors [..., dim] as bytes [..., row_bytes]."""
    packed = x.new_zeros(*x.shape[:-1], form.row_bytes, dtype=torch.uint8)
    coded, plain = x.split([form.num_coded, form.num_plain], dim=-1)
    tiles = _tiles(coded.float(), form)  # [..., num_tiles, tile]
    exponent = codes.scale_exponent(tiles.abs().amax(-1), form.code)  # [..., num_tiles]
    tiles = tiles * codes.power_of_two(-exponent).unsqueeze(-1)
    encode = codes.encode_e4m3 if form.code == "e4m3" else codes.encode_e2m1
    packed[..., : form.plain_offset] = encode(tiles.flatten(-2)[..., : form.num_coded])
    packed[..., form.plain_offset : form.scale_offset] = plain.bfloat16().view(torch.uint8)
    scales = _scales_as_bytes(exponent, form)
    packed[..., form.scale_offset : form.scale_offset + scales.shape[-1]] = scales
    return packed


def unpack(packed: Tensor, form: RowFormat, dtype: torch.dtype) -> Tensor:
    """Vectors [..., dim] of `dtype` from bytes [..., row_bytes]; a row of zeros gives zeros."""
    coded = packed[..., : form.plain_offset]
    plain = packed[..., form.plain_offset : form.scale_offset].contiguous().view(torch.bfloat16)
    values = codes.decode_e4m3(coded) if form.code == "e4m3" else codes.decode_e2m1(coded)
    tiles = _tiles(values, form) * _scales(packed, form).unsqueeze(-1)
    return torch.cat([tiles.flatten(-2)[..., : form.num_coded].to(dtype), plain.to(dtype)], dim=-1)


def _tiles(coded: Tensor, form: RowFormat) -> Tensor:
    """[..., num_coded] as [..., num_tiles, tile]; the last tile may be filled up with zeros."""
    missing = form.num_tiles * form.tile - form.num_coded
    return F.pad(coded, (0, missing)).unflatten(-1, (form.num_tiles, form.tile))


def _scales_as_bytes(exponent: Tensor, form: RowFormat) -> Tensor:
    if form.scale == "ue8m0":
        return (exponent + 127).to(torch.uint8)
    return codes.power_of_two(exponent).view(torch.uint8)


def _scales(packed: Tensor, form: RowFormat) -> Tensor:
    """The scales of packed rows: fp32 [..., num_tiles]."""
    if form.scale == "ue8m0":
        return codes.from_ue8m0(packed[..., form.scale_offset :][..., : form.num_tiles])
    held = packed[..., form.scale_offset : form.scale_offset + 4 * form.num_tiles]
    return held.contiguous().view(torch.float32)
