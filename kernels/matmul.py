"""Products with weights that are plain, FP8 in blocks of 128 x 128, or FP4 in runs of 32 (A8W4).

The two block-scaled kinds are the released models': activations are rounded to e4m3 first, with a
power of two as the scale of every 128 channels, and sums are fp32. In a grouped product the rows
are sorted by the matrix that each is multiplied with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels import codes
from sluice.kernels.aot import Case
from sluice.kernels.codes import e2m1_value, e4m3_code, tile_exponent, tile_power, ue8m0_scale
from sluice.kernels.cpu import call, dtype_of, few_rows
from sluice.kernels.launch import dot, num_processors, runs_triton

BLOCK = 128  # channels that share a scale, of activations and, both ways, of FP8 weights
SPLIT_CHANNELS = 512  # at least, and a multiple of every depth
RUN = 32  # input channels that share a scale of FP4 weights
TILE_ROWS = (16, 128)  # of a program: for few rows, and where the weight's bytes are the floor
PLAIN, FP8, FP4 = 0, 8, 4
TILE_COLUMNS = {PLAIN: 128, FP8: 128, FP4: 64}  # FP4 takes registers to unpack


@dataclass(frozen=True)
class BlockScaled:
    """A weight [..., out, in] in few bits. Leading dimensions are matrices of a group.

    codes: float8_e4m3fn [..., out, in], or uint8 [..., out, in // 2]: two e2m1 in a byte, the even
        channel's low.
    scale: ue8m0 bytes, uint8: [..., ceil(out / 128), ceil(in / 128)], or [..., out, in // 32].
    """

    codes: Tensor
    scale: Tensor

    @property
    def kind(self) -> int:
        return FP4 if self.codes.dtype == torch.uint8 else FP8

    def __getitem__(self, matrix: int) -> BlockScaled:
        return BlockScaled(self.codes[matrix], self.scale[matrix])

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def shape(self) -> torch.Size:
        """[..., out, in], as a plain weight's would be."""
        *others, channels = self.codes.shape
        return torch.Size([*others, channels * (2 if self.kind == FP4 else 1)])

    def plain(self) -> Tensor:
        """The weight in fp32, [..., out, in]."""
        scale = codes.from_ue8m0(self.scale)
        if self.kind == FP4:
            return codes.decode_e2m1(self.codes) * scale.repeat_interleave(RUN, -1)
        values = self.codes.float()
        scale = scale.repeat_interleave(BLOCK, -2)[..., : values.shape[-2], :]
        return values * scale.repeat_interleave(BLOCK, -1)[..., : values.shape[-1]]


Weight = Tensor | BlockScaled


def linear(x: Tensor, weight: Weight) -> Tensor:
    """`x @ weight.T`: [n, out] of x's dtype.

    x: [n, in]; weight: [out, in], of x's dtype (torch multiplies that) or block-scaled.
    """
    if isinstance(weight, Tensor) and few_rows(x, weight):
        return _multiply_few(x.unsqueeze(1), weight.unsqueeze(0)).squeeze(1)
    if isinstance(weight, Tensor) or not runs_triton(x):
        return linear_reference(x, weight)
    result = x.new_empty(len(x), weight.shape[-2])
    return _launch(x, None, weight, _Tiles.of_one(x), result) if len(x) else result


def batched_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Each group of channels times its own matrix: [n, groups, out] of x's dtype.

    x: [n, groups, in]; weight: [groups, out, in], of x's dtype.
    """
    if few_rows(x, weight):
        return _multiply_few(x, weight)
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)


def grouped_linear(x: Tensor, weight: Weight, counts: Tensor, rows: Tensor | None = None) -> Tensor:
    """Sorted rows, each times its own matrix: [n, out] of x's dtype.

    x: [num_rows, in]; rows: [n] int64, the row of x that each row of the result is made from, or
        None for all in turn. weight: [num_matrices, out, in], of x's dtype or block-scaled.
    counts: [num_matrices] int64: that many rows of the result are of each matrix in turn. Shapes do
        not depend on it, and it is not waited for on a device.
    """
    if not runs_triton(x):
        return grouped_linear_reference(x, weight, counts, rows)
    n = len(x) if rows is None else len(rows)
    result = x.new_empty(n, weight.shape[-2])
    return _launch(x, rows, weight, _Tiles.of(counts, n), result) if n else result


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Activations [n, in] as e4m3 codes (uint8, the same shape) and fp32 scales [n, ceil(in/128)].

    Scales are powers of two, one for every 128 channels.
    """
    if not runs_triton(x):
        return quantise_reference(x)
    n, channels = x.shape
    result = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scale = x.new_empty(n, triton.cdiv(channels, BLOCK), dtype=torch.float32)
    if n:
        x = x.contiguous()
        _quantise[(n, scale.shape[1])](x, result, scale, channels, BLOCK=BLOCK, num_warps=1)
    return result, scale


def linear_reference(x: Tensor, weight: Weight) -> Tensor:
    """`linear` in torch."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight)
    rounded, scale = quantise_reference(x)
    values = codes.decode_e4m3(rounded) * scale.repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
    return F.linear(values, weight.plain()).to(x.dtype)


def grouped_linear_reference(
    x: Tensor, weight: Weight, counts: Tensor, rows: Tensor | None = None
) -> Tensor:
    """`grouped_linear` in torch, one matrix at a time."""
    sorted_x = x if rows is None else x[rows]
    groups = sorted_x.split(counts.tolist())
    parts = [linear_reference(group, weight[e]) for e, group in enumerate(groups) if len(group)]
    return torch.cat(parts) if parts else sorted_x.new_empty(0, weight.shape[-2])


def quantise_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantise` in torch."""
    channels = x.shape[1]
    tiles = F.pad(x.float(), (0, -channels % BLOCK)).unflatten(1, (-1, BLOCK))
    exponent = codes.scale_exponent(tiles.abs().amax(-1), "e4m3")
    rounded = codes.encode_e4m3(tiles * codes.power_of_two(-exponent).unsqueeze(-1))
    return rounded.flatten(1)[:, :channels].contiguous(), codes.power_of_two(exponent)


def _multiply_few(x: Tensor, weight: Tensor) -> Tensor:
    """x [n, groups, in] times weight [groups, out, in]: [n, groups, out]. Reads the weight once."""
    x = x if x.stride(2) == 1 else x.contiguous()
    (n, groups, channels), out = x.shape, weight.shape[1]
    result = x.new_empty(n, groups, out)
    sizes = (groups, n, out, channels, dtype_of(x), torch.get_num_threads())
    call("linear", x, x.stride(0), x.stride(1), weight, result, *sizes)
    return result


@dataclass(frozen=True)
class _Tiles:
    """Tiles of rows that share a matrix: the first row and matrix of each, and matrices' ends.

    There are as many as there could be; those that are not needed begin at their matrix's end.
    """

    first: Tensor | None
    matrix: Tensor | None
    ends: Tensor | None
    num_tiles: int
    rows: int  # of a tile

    @classmethod
    def of_one(cls, x: Tensor) -> _Tiles:
        rows = _tile_rows(len(x))
        return cls(None, None, None, triton.cdiv(len(x), rows), rows)

    @classmethod
    def of(cls, counts: Tensor, num_rows: int) -> _Tiles:
        rows = _tile_rows(triton.cdiv(num_rows, len(counts)))
        num_tiles = triton.cdiv(num_rows, rows) + len(counts) - 1
        ends, tiles = counts.cumsum(0), torch.div(counts + rows - 1, rows, rounding_mode="floor")
        tile_ends = tiles.cumsum(0)
        place = torch.arange(num_tiles, device=counts.device)
        matrix = torch.searchsorted(tile_ends, place, right=True).clamp(max=len(counts) - 1)
        within = place - (tile_ends - tiles)[matrix]
        return cls((ends - counts)[matrix] + within * rows, matrix, ends, num_tiles, rows)


def _tile_rows(num_rows: int) -> int:
    few, many = TILE_ROWS
    return many if num_rows > few else few


def _launch(
    x: Tensor, rows: Tensor | None, weight: Weight, tiles: _Tiles, result: Tensor
) -> Tensor:
    kind, values, weight_scale = PLAIN, weight, None
    x, x_scale, channels = x.contiguous(), None, x.shape[1]
    if isinstance(weight, BlockScaled):
        kind, values, weight_scale = weight.kind, weight.codes.view(torch.uint8), weight.scale
        x, x_scale = quantise(x)
    assert isinstance(values, Tensor) and values.is_contiguous(), "matrices lie one after another"
    out = result.shape[1]
    num_parts = triton.cdiv(out, TILE_COLUMNS[kind])
    num_splits = _num_splits(x, tiles, num_parts, channels)
    sums = (
        result
        if num_splits == 1
        else result.new_empty(num_splits, *result.shape, dtype=torch.float32)
    )
    _matmul[(tiles.num_tiles, num_parts, num_splits)](
        x,
        x_scale,
        rows,
        values,
        weight_scale,
        sums,
        tiles.first,
        tiles.matrix,
        tiles.ends,
        len(result),
        out,
        channels,
        KIND=kind,
        TILE_ROWS=tiles.rows,
        TILE_COLUMNS=TILE_COLUMNS[kind],
        TILE_DEPTH=_depth(kind, x.element_size()),
        SPLIT=triton.cdiv(triton.cdiv(channels, num_splits), SPLIT_CHANNELS) * SPLIT_CHANNELS,
        num_warps=_num_warps(tiles.rows),
    )
    return result if sums is result else sums.sum(0).to(result.dtype)


def _num_splits(x: Tensor, tiles: _Tiles, num_parts: int, channels: int) -> int:
    """Into how many sums over channels the work of one small tile is cut, to fill the device."""
    if tiles.num_tiles > 1 or tiles.rows > TILE_ROWS[0]:
        return 1
    return max(1, min(num_processors(x) // num_parts, channels // SPLIT_CHANNELS))


def _depth(kind: int, element_bytes: int) -> int:
    """Channels a step: a scale's block, or 128 bytes a row."""
    return BLOCK if kind != PLAIN else 128 // element_bytes


def _num_warps(tile_rows: int) -> int:
    return 4 if tile_rows < TILE_ROWS[1] else 8


@triton.jit
def _quantise(
    x: tl.tensor, result: tl.tensor, scale: tl.tensor, channels: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Program (row, block) rounds BLOCK channels of x [n, channels] to codes and their scale."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + row * channels + channel, mask=channel < channels, other=0).to(tl.float32)
    is_nan = tl.max((values != values).to(tl.int32), 0)
    exponent = tile_exponent(tl.max(tl.abs(values), 0), is_nan != 0, 448.0, 1e-4)
    code = e4m3_code(values * tile_power(-exponent))
    tl.store(result + row * channels + channel, code, mask=channel < channels)
    tl.store(scale + row * tl.num_programs(1) + block, tile_power(exponent))


@triton.jit
def _fp4_product(
    a: tl.tensor,
    weight: tl.tensor,
    weight_scale: tl.tensor,
    line: tl.tensor,
    inside: tl.tensor,
    start: tl.tensor,
    channels: tl.tensor,
    acc: tl.tensor,
) -> tl.tensor:
    """`acc + a @ w.T` of e4m3 codes a [rows, depth] and FP4 lines `line` [columns] of the weight.

    In two products, of the even channels and of the odd ones, as bytes hold them. In bf16, which
    is exact: two bits of mantissa, and fp32's range of exponents.
    """
    rows: tl.constexpr = a.shape[0]
    half: tl.constexpr = a.shape[1] // 2
    columns: tl.constexpr = line.shape[0]
    even, odd = tl.split(tl.reshape(a, (rows, half, 2)))
    even = even.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
    odd = odd.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
    run = start // 32 + tl.arange(0, half // 16)
    filled = inside[:, None] & (run[None, :] < channels // 32)
    run_at = line[:, None] * (channels // 32) + run[None, :]  # [columns, runs]
    scale = ue8m0_scale(tl.load(weight_scale + run_at, mask=filled, other=0))[:, :, None]
    packed = tl.load(
        weight + run_at[:, :, None] * 16 + tl.arange(0, 16)[None, None, :],
        mask=filled[:, :, None],
        other=0,
    ).to(tl.int32)
    low = tl.reshape((e2m1_value(packed & 15) * scale).to(tl.bfloat16), (columns, half))
    high = tl.reshape((e2m1_value(packed >> 4) * scale).to(tl.bfloat16), (columns, half))
    return dot(odd, tl.trans(high), dot(even, tl.trans(low), acc))


@triton.jit
def _matmul(
    x: tl.tensor,
    x_scale: tl.tensor,
    rows: tl.tensor,
    weight: tl.tensor,
    weight_scale: tl.tensor,
    result: tl.tensor,
    tile_first: tl.tensor,
    tile_matrix: tl.tensor,
    ends: tl.tensor,
    num_rows: tl.tensor,
    out: tl.tensor,
    channels: tl.tensor,
    KIND: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """Program (tile, part, split) writes TILE_ROWS x TILE_COLUMNS of result [num_rows, out].

    Where there are several splits, result is [num_splits, num_rows, out], of sums over SPLIT
    channels each.

    x: [*, channels], of which row i is `rows[i]`, or i without rows; plain, or e4m3 codes with
    x_scale fp32 [*, ceil(channels / 128)]. weight: [num_matrices, out, channels] plain (KIND 0) or
    e4m3 (8), or [num_matrices, out, channels // 2] (4), with weight_scale as in `BlockScaled`.
    tile_first, tile_matrix, ends: see `_Tiles`; None for one matrix.
    """
    tile = tl.program_id(0)
    first, end, matrix = tile * TILE_ROWS, num_rows, 0
    if tile_first is not None:
        first, matrix = tl.load(tile_first + tile), tl.load(tile_matrix + tile)
        end = tl.load(ends + matrix)
    row = (first + tl.arange(0, TILE_ROWS)).to(tl.int64)
    real = row < end
    source = row
    if rows is not None:
        source = tl.load(rows + row, mask=real, other=0)
    column = (tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)).to(tl.int64)
    inside = column < out
    line = matrix * out + column  # of all matrices' rows
    num_blocks = tl.cdiv(channels, 128)

    acc = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    split = tl.program_id(2)
    stop = tl.minimum(split * SPLIT + SPLIT, channels)
    # Tiles that are not needed multiply nothing.
    for start in range(split * SPLIT, tl.where(first < end, stop, 0), TILE_DEPTH):
        channel = start + tl.arange(0, TILE_DEPTH)
        held = channel[None, :] < channels
        a = tl.load(
            x + source[:, None] * channels + channel[None, :], mask=real[:, None] & held, other=0
        )
        partial = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
        if KIND == 4:
            partial = _fp4_product(a, weight, weight_scale, line, inside, start, channels, partial)
        else:
            b = tl.load(
                weight + line[:, None] * channels + channel[None, :],
                mask=inside[:, None] & held,
                other=0,
            )
            if KIND == 8:
                a = a.to(tl.float8e4nv, bitcast=True)
                b = b.to(tl.float8e4nv, bitcast=True)
                partial = dot(a, tl.trans(b), partial)
            else:
                acc = dot(a, tl.trans(b), acc)
        if KIND != 0:
            block = start // 128
            factor = tl.load(x_scale + source * num_blocks + block, mask=real, other=0)
            if KIND == 8:
                # Every column of the tile has one scale.
                line_block = matrix * tl.cdiv(out, 128) + tl.program_id(1) * TILE_COLUMNS // 128
                factor *= ue8m0_scale(tl.load(weight_scale + line_block * num_blocks + block))
            acc += partial * factor[:, None]
    tl.store(
        result + (split.to(tl.int64) * num_rows + row[:, None]) * out + column[None, :],
        acc.to(result.dtype.element_ty),
        mask=real[:, None] & inside[None, :],
    )


_SIZES = {"num_rows": "i32", "out": "i32:16", "channels": "i32:16"}
_GROUPS = {"rows": "*i64:16", "tile_first": "*i64:16", "tile_matrix": "*i64:16", "ends": "*i64:16"}
_SCALED = {"x": "*u8:16", "x_scale": "*fp32:16", "weight": "*u8:16", "weight_scale": "*u8:16"}
_PLAIN = {"x": "*bf16:16", "weight": "*bf16:16"}
_RESULT = {"result": "*bf16:16"}
AOT = (
    Case(
        _quantise,
        "bf16",
        {"x": "*bf16:16", "result": "*u8:16", "scale": "*fp32:16", "channels": "i32:16"},
        {"BLOCK": BLOCK},
        num_warps=1,
    ),
    *(
        Case(
            _matmul,
            f"{kind} {'experts' if groups else 'matrix'}, {tile_rows} rows",
            operands | groups | _RESULT | _SIZES,
            {"KIND": number, "TILE_ROWS": tile_rows, "TILE_COLUMNS": TILE_COLUMNS[number]}
            | {"TILE_DEPTH": _depth(number, 2), "SPLIT": 4096},
            num_warps=_num_warps(tile_rows),
        )
        for kind, number, operands, groups, tile_rows in (
            ("bf16", PLAIN, _PLAIN, _GROUPS, 16),
            ("bf16", PLAIN, _PLAIN, _GROUPS, 128),
            ("fp8", FP8, _SCALED, {}, 16),
            ("fp8", FP8, _SCALED, {}, 128),
            ("fp4", FP4, _SCALED, _GROUPS, 16),
            ("fp4", FP4, _SCALED, _GROUPS, 128),
        )
    ),
)
