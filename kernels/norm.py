"""Root-mean-square normalisation, with a weight or without, and the rotation that may follow."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.aot import Case
from sluice.kernels.cpu import call, compiled, dtype_of
from sluice.kernels.launch import runs_triton
from sluice.kernels.rope import real_rotation, rotate_reference_, rotated_pairs

WARP_ELEMENTS = 1024  # of a row: 32 a thread


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension, statistics and product in fp32.

    x: [..., dim]; weight: [dim] fp32, or None for ones. Returns a new tensor of x's dtype.
    """
    if runs_triton(x):
        return _launch(x, weight, eps, None)
    if compiled(x):
        return _compiled(x, weight, eps, None)
    return rms_norm_reference(x, weight, eps)


def norm_and_rotate(x: Tensor, weight: Tensor | None, eps: float, rotation: Tensor) -> Tensor:
    """`rotate_(rms_norm(x, weight, eps), rotation)` in one pass over memory.

    x: [num_tokens, ..., dim]; rotation: [num_tokens, rope_dim // 2] complex64.
    """
    if runs_triton(x):
        return _launch(x, weight, eps, rotation)
    if compiled(x):
        return _compiled(x, weight, eps, rotation)
    return norm_and_rotate_reference(x, weight, eps, rotation)


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`rms_norm` in torch."""
    return F.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)


def norm_and_rotate_reference(
    x: Tensor, weight: Tensor | None, eps: float, rotation: Tensor
) -> Tensor:
    """`norm_and_rotate` in torch."""
    return rotate_reference_(rms_norm_reference(x, weight, eps), rotation)


def _compiled(x: Tensor, weight: Tensor | None, eps: float, rotation: Tensor | None) -> Tensor:
    rows = x.unsqueeze(0) if x.dim() == 1 else x
    rows = rows.reshape(len(rows), -1, x.shape[-1])  # [num_tokens, rows_per_token, dim]
    rows = rows if rows.stride(2) == 1 else rows.contiguous()
    result = x.new_empty(x.shape)
    turns, inverse = (None, False) if rotation is None else real_rotation(rotation)
    pairs = 0 if rotation is None else rotation.shape[1]
    sizes = (*rows.shape, eps, pairs, inverse, dtype_of(x), torch.get_num_threads())
    call("norm_rotate", rows, *rows.stride()[:2], result, weight, turns, *sizes)
    return result


def _launch(x: Tensor, weight: Tensor | None, eps: float, rotation: Tensor | None) -> Tensor:
    flat, result = x.reshape(-1, x.shape[-1]), x.new_empty(x.shape)
    num_rows, dim = flat.shape
    if not result.numel():
        return result
    turns, inverse = (None, False) if rotation is None else real_rotation(rotation)
    block = triton.next_power_of_2(dim)
    _norm_rotate[(num_rows,)](
        flat,
        weight,
        turns,
        result,
        eps,
        flat.stride(0),
        num_rows // x.shape[0],
        DIM=dim,
        ROPE_DIM=0 if rotation is None else 2 * rotation.shape[1],
        INVERSE=inverse,
        BLOCK=block,
        PAIRS=1 if rotation is None else triton.next_power_of_2(rotation.shape[1]),
        num_warps=min(8, max(1, block // WARP_ELEMENTS)),
    )
    return result


@triton.jit
def _norm_rotate(
    x: tl.tensor,
    weight: tl.tensor,
    rotation: tl.tensor,
    result: tl.tensor,
    eps: tl.tensor,
    row_stride: tl.tensor,
    rows_per_token: tl.tensor,
    DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    INVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """Row i of x [num_rows, DIM] (rows `row_stride` apart) into row i of result, contiguous.

    weight: [DIM] fp32 or None. rotation: fp32 [num_tokens, ROPE_DIM // 2, 2] or None; its row
    `i // rows_per_token` turns the last ROPE_DIM channels, rounded to the result's dtype before.
    """
    row = tl.program_id(0).to(tl.int64)
    source, target = x + row * row_stride, result + row * DIM
    dtype = result.dtype.element_ty
    channel = tl.arange(0, BLOCK)
    values = tl.load(source + channel, mask=channel < DIM, other=0).to(tl.float32)
    inverse_rms = 1.0 / tl.sqrt_rn(tl.sum(values * values, 0) / DIM + eps)
    values *= inverse_rms
    if weight is not None:
        values *= tl.load(weight + channel, mask=channel < DIM, other=0)
    tl.store(target + channel, values.to(dtype), mask=channel < DIM - ROPE_DIM)
    if ROPE_DIM > 0:
        pair = tl.arange(0, PAIRS)
        tail = DIM - ROPE_DIM + 2 * pair
        real = tail < DIM
        even = tl.load(source + tail, mask=real, other=0).to(tl.float32) * inverse_rms
        odd = tl.load(source + tail + 1, mask=real, other=0).to(tl.float32) * inverse_rms
        if weight is not None:
            even *= tl.load(weight + tail, mask=real, other=0)
            odd *= tl.load(weight + tail + 1, mask=real, other=0)
        turn = rotation + (row // rows_per_token * (ROPE_DIM // 2) + pair) * 2
        even, odd = rotated_pairs(even.to(dtype), odd.to(dtype), turn, real, INVERSE)
        tl.store(target + tail, even.to(dtype), mask=real)
        tl.store(target + tail + 1, odd.to(dtype), mask=real)


_SIGNATURE = {"x": "*bf16:16", "result": "*bf16:16", "eps": "fp32", "row_stride": "i32:16"}
_SIGNATURE |= {"rows_per_token": "i32"}
AOT = (
    Case(
        _norm_rotate,
        "V4-Flash hidden",
        _SIGNATURE | {"weight": "*fp32:16"},
        {"DIM": 4096, "ROPE_DIM": 0, "INVERSE": False, "BLOCK": 4096, "PAIRS": 1},
        num_warps=4,
    ),
    Case(
        _norm_rotate,
        "V4-Flash heads",
        _SIGNATURE | {"rotation": "*fp32:16"},
        {"DIM": 512, "ROPE_DIM": 64, "INVERSE": False, "BLOCK": 512, "PAIRS": 32},
        num_warps=1,
    ),
)
