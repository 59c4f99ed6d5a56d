"""Packed rows of pools: write vectors into them, read vectors from them.

`rows` is one layer's view of a pool of packed rows, [num_pages, rows_per_page, row_bytes] uint8,
strided as in kernels/rows.py; slots are as there. What is read back from what was written is the
released models' simulation of their quantisation: there is no other code for that.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels import codes
from sluice.kernels.aot import Case
from sluice.kernels.codes import bf16_bits, e2m1_code, e4m3_code, tile_exponent, tile_power
from sluice.kernels.launch import runs_triton
from sluice.kernels.packed_rows import (
    FP4_INDEX,
    FP8_INDEX,
    FP8_V4,
    LoadForm,
    PackedRows,
    RowFormat,
    RowLayout,
    Rows,
    load_rows,
)
from sluice.kernels.rows import gather_rows, row_offsets, write_rows

UNPACK_ROWS = 8  # of a program: 4 KB of codes in flight


def write_packed(rows: Tensor, slots: Tensor, values: Tensor, form: RowFormat) -> None:
    """Pack `values[i]` into the row at `slots[i]`.

    slots: [n] int64; -1 is not written. values: [n, dim], of any float dtype.
    """
    if runs_triton(values):
        _launch_pack(rows, slots, values, form)
    else:
        write_rows(rows, slots, pack_reference(values, form))


def gather_packed(rows: Tensor, slots: Tensor, form: RowFormat, dtype: torch.dtype) -> Tensor:
    """Vectors from the rows at `slots`, [*slots.shape, dim] of `dtype`; zeros where slot is -1."""
    if runs_triton(rows):
        return _launch_unpack(rows, slots, form, dtype)
    return unpack_reference(gather_rows(rows, slots), form, dtype)


def read_rows(rows: Rows, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Vectors at `slots`, packed or not: [*slots.shape, dim] of `dtype`; zeros where slot is -1."""
    if isinstance(rows, PackedRows):
        return gather_packed(rows.rows, slots, rows.form, dtype)
    return gather_rows(rows, slots).to(dtype)


def pack(x: Tensor, form: RowFormat) -> Tensor:
    """Vectors [..., dim] as bytes [..., row_bytes]."""
    if not runs_triton(x):
        return pack_reference(x, form)
    packed = x.new_empty(*x.shape[:-1], form.row_bytes, dtype=torch.uint8)
    _launch_pack(packed.view(-1, 1, form.row_bytes), None, x.flatten(0, -2), form)
    return packed


def unpack(packed: Tensor, form: RowFormat, dtype: torch.dtype) -> Tensor:
    """Vectors [..., dim] of `dtype` from bytes [..., row_bytes]; a row of zeros gives zeros."""
    if not runs_triton(packed):
        return unpack_reference(packed, form, dtype)
    found = _launch_unpack(packed.reshape(-1, 1, form.row_bytes), None, form, dtype)
    return found.view(*packed.shape[:-1], found.shape[-1])


def simulate(x: Tensor, form: RowFormat) -> Tensor:
    """What would be read back of x [..., dim] had it been written: a new tensor like x."""
    return unpack(pack(x, form), form, x.dtype)


def pack_reference(x: Tensor, form: RowFormat) -> Tensor:
    """`pack` in torch."""
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


def unpack_reference(packed: Tensor, form: RowFormat, dtype: torch.dtype) -> Tensor:
    """`unpack` in torch."""
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


def _launch_pack(rows: Tensor, slots: Tensor | None, values: Tensor, form: RowFormat) -> None:
    if len(values):
        _pack_rows[(len(values),)](
            values.contiguous(),
            slots,
            rows,
            *rows.stride()[:2],
            **_constants(form),
            PAGE_ROWS=rows.shape[1],
            num_warps=1,
        )


def _launch_unpack(
    rows: Tensor, slots: Tensor | None, form: RowFormat, dtype: torch.dtype
) -> Tensor:
    shape, dim = rows.shape[:1] if slots is None else slots.shape, form.num_coded + form.num_plain
    result = rows.new_empty(*shape, dim, dtype=dtype)
    if result.numel():
        slots = slots if slots is None else slots.reshape(-1)
        layout, num_rows = RowLayout.of(PackedRows(rows, form)), shape.numel()
        _unpack_rows[(triton.cdiv(num_rows, UNPACK_ROWS),)](
            layout.rows,
            slots,
            result,
            num_rows,
            layout.page_rows,
            *layout.strides,
            DIM=dim,
            BLOCK_DIM=triton.next_power_of_2(dim),
            BLOCK_ROWS=UNPACK_ROWS,
            FORM=layout.form,
        )
    return result


def _constants(form: RowFormat) -> dict[str, Any]:
    return {
        "NUM_CODED": form.num_coded,
        "NUM_PLAIN": form.num_plain,
        "TILE": form.tile,
        "NUM_TILES": form.num_tiles,
        "PLAIN_OFFSET": form.plain_offset,
        "SCALE_OFFSET": form.scale_offset,
        "ROW_BYTES": form.row_bytes,
        "FP4": form.code == "e2m1",
        "FP32_SCALE": form.scale == "float32",
        "TILES": triton.next_power_of_2(form.num_tiles),
        "PLAIN": triton.next_power_of_2(max(1, form.num_plain)),
    }


@triton.jit
def _pack_rows(
    values: tl.tensor,
    slots: tl.tensor,
    rows: tl.tensor,
    page_stride: tl.tensor,
    row_stride: tl.tensor,
    NUM_CODED: tl.constexpr,
    NUM_PLAIN: tl.constexpr,
    TILE: tl.constexpr,
    NUM_TILES: tl.constexpr,
    PLAIN_OFFSET: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    FP4: tl.constexpr,
    FP32_SCALE: tl.constexpr,
    TILES: tl.constexpr,
    PLAIN: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
) -> None:
    """Program i packs row i of values [n, dim] into slot `slots[i]` of rows, or into row i.

    rows: uint8 [num_pages, PAGE_ROWS, ROW_BYTES]; every byte of a row is written, and nothing at
    slot -1. slots: [n] int64, or None.
    """
    index = tl.program_id(0).to(tl.int64)
    slot = index
    if slots is not None:
        slot = tl.load(slots + index)
    row = rows + row_offsets(slot, page_stride, row_stride, PAGE_ROWS)
    vector = values + index * (NUM_CODED + NUM_PLAIN)
    end = tl.where(slot >= 0, NUM_CODED, 0)  # of the channels to write

    tile = tl.arange(0, TILES)
    if FP4:
        low = tile[:, None] * TILE + 2 * tl.arange(0, TILE // 2)[None, :]
        even = tl.load(vector + low, mask=low < NUM_CODED, other=0).to(tl.float32)
        odd = tl.load(vector + low + 1, mask=low < NUM_CODED, other=0).to(tl.float32)
        amax = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 1)
        is_nan = tl.max(((even != even) | (odd != odd)).to(tl.int32), 1)
        exponent = tile_exponent(amax, is_nan != 0, 6.0, 7.052966104933725e-38)
        inverse = tile_power(-exponent)[:, None]
        code = e2m1_code(even * inverse) | e2m1_code(odd * inverse) << 4
        tl.store(row + low // 2, code.to(tl.uint8), mask=low < end)
    else:
        channel = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
        x = tl.load(vector + channel, mask=channel < NUM_CODED, other=0).to(tl.float32)
        is_nan = tl.max((x != x).to(tl.int32), 1)
        exponent = tile_exponent(tl.max(tl.abs(x), 1), is_nan != 0, 448.0, 1e-4)
        code = e4m3_code(x * tile_power(-exponent)[:, None])
        tl.store(row + channel, code, mask=channel < end)

    scale_bytes: tl.constexpr = 4 if FP32_SCALE else 1
    num_scales = tl.where(slot >= 0, NUM_TILES, 0)
    scales = row + SCALE_OFFSET
    if FP32_SCALE:
        wide = scales.to(tl.pointer_type(tl.float32), bitcast=True)
        tl.store(wide + tile, tile_power(exponent), mask=tile < num_scales)
    else:
        tl.store(scales + tile, (exponent + 127).to(tl.uint8), mask=tile < num_scales)
    pad = SCALE_OFFSET + NUM_TILES * scale_bytes + tl.arange(0, 4)
    zero = tl.zeros([4], tl.uint8)
    tl.store(row + pad, zero, mask=pad < tl.where(slot >= 0, ROW_BYTES, 0))

    if NUM_PLAIN > 0:
        channel = tl.arange(0, PLAIN)
        x = tl.load(vector + NUM_CODED + channel, mask=channel < NUM_PLAIN, other=0)
        words = (row + PLAIN_OFFSET).to(tl.pointer_type(tl.uint16), bitcast=True)
        num_plain = tl.where(slot >= 0, NUM_PLAIN, 0)
        tl.store(words + channel, bf16_bits(x.to(tl.float32)), mask=channel < num_plain)


@triton.jit
def _unpack_rows(
    rows: tl.tensor,
    slots: tl.tensor,
    result: tl.tensor,
    num_rows: tl.tensor,
    page_rows: tl.tensor,
    page_stride: tl.tensor,
    row_stride: tl.tensor,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    FORM: tl.constexpr,
) -> None:
    """Program i unpacks BLOCK_ROWS slots of `slots` [num_rows] into result [num_rows, DIM].

    Without slots rows are taken in turn. Strides are in units of FORM: see `load_rows`. Nothing is
    read at slot -1, which gives zeros.
    """
    index = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    real = index < num_rows
    slot = index
    if slots is not None:
        slot = tl.load(slots + index, mask=real, other=-1)
    at = row_offsets(slot, page_stride, row_stride, page_rows)
    values = load_rows(rows, at, real & (slot >= 0), DIM, BLOCK_DIM, FORM)
    channel = tl.arange(0, BLOCK_DIM)
    tl.store(
        result + index[:, None] * DIM + channel[None, :],
        values.to(result.dtype.element_ty),
        mask=real[:, None] & (channel < DIM)[None, :],
    )


# The released models' shapes: kv rows, and index keys in either format.
_FP8_V4 = {"NUM_CODED": 448, "NUM_PLAIN": 64, "TILE": 64, "NUM_TILES": 7, "PLAIN_OFFSET": 448}
_FP8_V4 |= {"SCALE_OFFSET": 576, "ROW_BYTES": 584, "FP4": False, "FP32_SCALE": False}
_FP8_V4 |= {"TILES": 8, "PLAIN": 64, "PAGE_ROWS": 64}
_FP8 = {"NUM_CODED": 128, "NUM_PLAIN": 0, "TILE": 128, "NUM_TILES": 1, "PLAIN_OFFSET": 128}
_FP8 |= {"SCALE_OFFSET": 128, "ROW_BYTES": 132, "FP4": False, "FP32_SCALE": True}
_FP8 |= {"TILES": 1, "PLAIN": 1, "PAGE_ROWS": 64}
_FP4 = {"NUM_CODED": 128, "NUM_PLAIN": 0, "TILE": 32, "NUM_TILES": 4, "PLAIN_OFFSET": 64}
_FP4 |= {"SCALE_OFFSET": 64, "ROW_BYTES": 68, "FP4": True, "FP32_SCALE": False}
_FP4 |= {"TILES": 4, "PLAIN": 1, "PAGE_ROWS": 64}
_STRIDES = {"page_stride": "i64", "row_stride": "i32"}
_UNPACK = {"rows": "*u8:16", "slots": "*i64:16", "result": "*bf16:16"}
_UNPACK |= {"num_rows": "i32", "page_rows": "i32", "page_stride": "i64", "row_stride": "i32"}


def _unpack_constants(form: LoadForm, dim: int) -> dict[str, Any]:
    return {"DIM": dim, "BLOCK_DIM": dim, "BLOCK_ROWS": UNPACK_ROWS, "FORM": form}


AOT = (
    # Of packing to fp4, ptxas sets 8 bytes of stack aside that no instruction touches.
    *(
        Case(
            _pack_rows,
            label,
            {"values": "*bf16:16", "slots": "*i64:16", "rows": "*u8:16"} | _STRIDES,
            constants,
            num_warps=1,
            may_spill=label == "fp4",
        )
        for label, constants in (("fp8_v4", _FP8_V4), ("fp8", _FP8), ("fp4", _FP4))
    ),
    Case(_unpack_rows, "fp8_v4", _UNPACK, _unpack_constants(FP8_V4, 512)),
    Case(_unpack_rows, "fp8", _UNPACK, _unpack_constants(FP8_INDEX, 128)),
    Case(_unpack_rows, "fp4", _UNPACK, _unpack_constants(FP4_INDEX, 128)),
)
