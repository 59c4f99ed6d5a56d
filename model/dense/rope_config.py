"""RopeConfig: how a dense model turns positions into rotations, read from its config.json.

Two spellings are read: `rope_parameters` with everything in it, and the older `rope_theta` beside
`rope_scaling`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from sluice.model.common.fields import Fields
from sluice.protocol.reading import shown


class RopeType(StrEnum):
    DEFAULT = "default"
    LINEAR = "linear"  # all frequencies divided by factor
    LLAMA3 = "llama3"  # slow pairs divided by factor, fast ones kept, those between blended
    YARN = "yarn"  # the same idea with other bounds, and longer queries and keys


@dataclass(frozen=True)
class RopeConfig:
    """What is not used by a type has no meaning there."""

    theta: float
    kind: RopeType = RopeType.DEFAULT
    factor: float = 1.0
    original_max_tokens: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # length of rotated queries and keys


def parse_rope(fields: Fields, max_model_len: int) -> RopeConfig:
    """Raises ConfigError for types that are not supported, naming field and value."""
    rope = fields.section("rope_parameters")
    if not rope.data:
        rope = fields.section("rope_scaling")
    name = rope.get("rope_type", rope.get("type", "default"))
    if name not in list(RopeType):
        raise rope.error(f"rope_type is {shown(name)}, expected one of {', '.join(RopeType)}")
    rope.refuse_other_than({"partial_rotary_factor": 1.0})
    theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
    kind = RopeType(name)
    if kind is RopeType.DEFAULT:
        return RopeConfig(theta)
    original = rope.integer("original_max_position_embeddings", max_model_len)
    factor = _factor(rope, kind, max_model_len / original)
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_tokens=original,
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 4.0),
        beta_fast=rope.number_or_zero("beta_fast") or 32.0,
        beta_slow=rope.number_or_zero("beta_slow") or 1.0,
        truncate=rope.flag("truncate", True),
        attention_factor=_yarn_length(rope, factor) if kind is RopeType.YARN else 1.0,
    )


def _factor(rope: Fields, kind: RopeType, derived: float) -> float:
    """YaRN's may be left out, and follows from the lengths then."""
    return rope.number("factor", derived if kind is RopeType.YARN else None)


def _yarn_length(rope: Fields, factor: float) -> float:
    if rope.get("attention_factor", None) is not None:
        return rope.number("attention_factor")
    mscale, mscale_all_dim = rope.number_or_zero("mscale"), rope.number_or_zero("mscale_all_dim")
    if mscale and mscale_all_dim:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
