"""Rotary position embedding of interleaved pairs (2i, 2i+1) at the end of the last dimension."""

from __future__ import annotations

import math

import torch
from torch import Tensor


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
    """Unit complex numbers that rotate each pair: [*positions.shape, rope_dim // 2] complex64.

    Angles are fp32 products on purpose: the models were trained with them, and fp64 gives other
    values at a million tokens.
    """
    angles = positions.unsqueeze(-1).float() * frequencies
    return torch.polar(torch.ones_like(angles), angles)


def rotate_(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate the last `2 * rotation.shape[-1]` channels of x in place, and return x.

    x: [num_tokens, ..., dim], last dimension contiguous; rotation: [num_tokens, rope_dim // 2]
    complex64. The conjugate rotation undoes it.
    """
    rotation = rotation.view(rotation.shape[0], *[1] * (x.dim() - 2), rotation.shape[1])
    tail = x[..., -2 * rotation.shape[-1] :]
    if x.dtype == torch.float32:
        torch.view_as_complex(tail.unflatten(-1, (-1, 2))).mul_(rotation)
        return x
    pairs = torch.view_as_complex(tail.float().unflatten(-1, (-1, 2)))
    tail.copy_(torch.view_as_real(pairs * rotation).flatten(-2))
    return x
