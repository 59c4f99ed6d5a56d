"""Frequencies of a dense model's rotary position embedding, for each way to stretch them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sluice.kernels.rope import inverse_frequencies
from sluice.model.dense.rope_config import RopeConfig, RopeType


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each pair: [head_dim // 2] fp32."""
    frequencies = inverse_frequencies(rope.theta, head_dim)
    match rope.kind:
        case RopeType.DEFAULT:
            return frequencies
        case RopeType.LINEAR:
            return frequencies / rope.factor
        case RopeType.LLAMA3:
            return _blend(frequencies, rope.factor, _llama3_kept(frequencies, rope))
        case RopeType.YARN:
            return _blend(frequencies, rope.factor, _yarn_kept(rope, head_dim))


def _blend(frequencies: Tensor, factor: float, kept: Tensor) -> Tensor:
    """kept: [head_dim // 2] from 0, divided by factor, to 1, left as it is."""
    return frequencies / factor * (1 - kept) + frequencies * kept


def _llama3_kept(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    turns = rope.original_max_tokens * frequencies / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    return ((turns - low) / (high - low)).clamp(0, 1)


def _yarn_kept(rope: RopeConfig, head_dim: int) -> Tensor:
    def pair_that_turns(times: float) -> float:
        turns = rope.original_max_tokens / (times * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    return 1 - ((pairs - low) / ((high - low) or 0.001)).clamp(0, 1)
