"""Rotary position embedding of interleaved pairs (2i, 2i+1) at the end of the last dimension."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.aot import Case
from sluice.kernels.cpu import FEW_ROWS, call, compiled, dtype_of
from sluice.kernels.launch import runs_triton


def inverse_frequencies(theta: float, rope_dim: int) -> Tensor:
    """Angle per position of each pair: [rope_dim // 2] fp32."""
    return 1.0 / theta ** (torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim)


def yarn_inverse_frequencies(
    theta: float,
    rope_dim: int,
    *,
    factor: float,
    original_max_tokens: int,
    beta_fast: float,
    beta_slow: float,
) -> Tensor:
    """`inverse_frequencies` stretched by YaRN: [rope_dim // 2] fp32.

    Pairs that turn more than `beta_fast` times within `original_max_tokens` stay, those that turn
    less than `beta_slow` times are slowed by `factor`, the ones between are blended.
    """

    def pair_that_turns(times: float) -> float:
        turns = original_max_tokens / (times * 2 * math.pi)
        return rope_dim * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(beta_slow)), rope_dim - 1)
    pairs = torch.arange(rope_dim // 2, dtype=torch.float32)
    slowed = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies = inverse_frequencies(theta, rope_dim)
    return frequencies / factor * slowed + frequencies * (1 - slowed)


def rotations(positions: Tensor, frequencies: Tensor) -> Tensor:
    """Unit complex numbers that rotate each pair: [n, rope_dim // 2] complex64, of positions [n].

    Angles are fp32 products on purpose: the models were trained with them, and fp64 gives other
    values at a million tokens.
    """
    if len(positions) <= FEW_ROWS and compiled(positions, frequencies):
        result = frequencies.new_empty(len(positions), len(frequencies), dtype=torch.complex64)
        call("rotations", positions.contiguous(), frequencies, result, *result.shape)
        return result
    angles = positions.unsqueeze(-1).float() * frequencies
    return torch.polar(torch.ones_like(angles), angles)


def rotate_(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate the last `2 * rotation.shape[-1]` channels of x in place, and return x.

    x: [num_tokens, ..., dim], last dimension contiguous; rotation: [num_tokens, rope_dim // 2]
    complex64. The conjugate rotation undoes it.
    """
    if runs_triton(x):
        _launch(x, rotation)
        return x
    if compiled(x):
        rows = _rows(x)
        turns, inverse = real_rotation(rotation)
        sizes = (*rows.shape, rotation.shape[1], inverse, dtype_of(x), torch.get_num_threads())
        call("rotate", rows, *rows.stride()[:2], turns, *sizes)
        return x
    return rotate_reference_(x, rotation)


def rotate_reference_(x: Tensor, rotation: Tensor) -> Tensor:
    """`rotate_` in torch."""
    rotation = rotation.view(rotation.shape[0], *[1] * (x.dim() - 2), rotation.shape[1])
    tail = x[..., -2 * rotation.shape[-1] :]
    if x.dtype == torch.float32:
        torch.view_as_complex(tail.unflatten(-1, (-1, 2))).mul_(rotation)
        return x
    pairs = torch.view_as_complex(tail.float().unflatten(-1, (-1, 2)))
    tail.copy_(torch.view_as_real(pairs * rotation).flatten(-2))
    return x


def real_rotation(rotation: Tensor) -> tuple[Tensor, bool]:
    """A rotation as kernels take it: fp32 [num_tokens, rope_dim // 2, 2], and whether to invert it.

    A conjugate is not computed: it stays a flag.
    """
    if rotation.is_conj():
        return torch.view_as_real(rotation.conj()).contiguous(), True
    return torch.view_as_real(rotation).contiguous(), False


def _rows(x: Tensor) -> Tensor:
    return x.view(x.shape[0], -1, x.shape[-1]) if x.dim() != 3 else x  # [num_tokens, heads, dim]


def _launch(x: Tensor, rotation: Tensor) -> None:
    rows = _rows(x)
    num_tokens, num_heads, dim = rows.shape
    if not rows.numel():
        return
    turns, inverse = real_rotation(rotation)
    _rotate[(num_tokens, num_heads)](
        rows[..., dim - 2 * rotation.shape[1] :],
        turns,
        *rows.stride()[:2],
        PAIRS=rotation.shape[1],
        BLOCK=triton.next_power_of_2(rotation.shape[1]),
        INVERSE=inverse,
        num_warps=1,
    )


@triton.jit
def rotated_pairs(
    even: tl.tensor, odd: tl.tensor, turn: tl.tensor, real: tl.tensor, INVERSE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Pairs [n] turned in fp32 by the complex numbers at pointers `turn` [n], where `real`."""
    cos, sin = tl.load(turn, mask=real), tl.load(turn + 1, mask=real)
    if INVERSE:
        sin = -sin
    even, odd = even.to(tl.float32), odd.to(tl.float32)
    return even * cos - odd * sin, even * sin + odd * cos


@triton.jit
def _rotate(
    x: tl.tensor,
    rotation: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    INVERSE: tl.constexpr,
) -> None:
    """Program (token, head) turns the 2 * PAIRS channels of x that begin at its strides, in place.

    rotation: fp32 [num_tokens, PAIRS, 2].
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, BLOCK)
    real = pair < PAIRS
    even_at = x + token * token_stride + head * head_stride + 2 * pair
    turn = rotation + (token * PAIRS + pair) * 2
    even, odd = tl.load(even_at, mask=real), tl.load(even_at + 1, mask=real)
    even, odd = rotated_pairs(even, odd, turn, real, INVERSE)
    tl.store(even_at, even.to(x.dtype.element_ty), mask=real)
    tl.store(even_at + 1, odd.to(x.dtype.element_ty), mask=real)


AOT = (
    Case(
        _rotate,
        "V4-Flash output",
        {
            "x": "*bf16:16",
            "rotation": "*fp32:16",
            "token_stride": "i32:16",
            "head_stride": "i32:16",
        },
        {"PAIRS": 32, "BLOCK": 32, "INVERSE": True},
        num_warps=1,
    ),
)
