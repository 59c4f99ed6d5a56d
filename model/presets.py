"""DeepSeek-V4-Flash and -Pro at their real shapes: for planning, without any weights."""

from __future__ import annotations

import dataclasses
from typing import Literal

from sluice.cache.row_format import RowFormat
from sluice.cache.spec import PoolSpec
from sluice.model.v4.config import DeepseekV4Config, LayerType, MlpType, YarnConfig
from sluice.model.v4.pools import declare
from sluice.protocol.messages import ConfigError

_SLIDING, _CSA, _HCA = LayerType.SLIDING, LayerType.CSA, LayerType.HCA

V4_FLASH = DeepseekV4Config(
    vocab_size=129_280,
    hidden_size=4096,
    num_heads=64,
    head_dim=512,
    rope_dim=64,
    q_lora_rank=1024,
    o_groups=8,
    o_lora_rank=1024,
    sliding_window=128,
    layer_types=(_SLIDING, _SLIDING, *(_CSA, _HCA) * 20, _CSA),
    csa_ratio=4,
    hca_ratio=128,
    index_num_heads=64,
    index_head_dim=128,
    index_topk=512,
    mlp_types=(MlpType.HASH,) * 3 + (MlpType.TOPK,) * 40,
    num_experts=256,
    num_experts_per_token=6,
    expert_width=2048,
    routed_scale=1.5,
    swiglu_limit=10.0,
    max_model_len=1 << 20,
    rope_theta=10_000.0,
    compress_rope_theta=160_000.0,
    compress_yarn=YarnConfig(factor=16.0, original_max_tokens=65_536),
    hc_mult=4,
    hc_sinkhorn_iters=20,
)

V4_PRO = dataclasses.replace(
    V4_FLASH,
    hidden_size=7168,
    num_heads=128,
    q_lora_rank=1536,
    o_groups=16,
    layer_types=(_HCA, _HCA, *(_CSA, _HCA) * 29, _CSA),
    index_topk=1024,
    mlp_types=(MlpType.HASH,) * 3 + (MlpType.TOPK,) * 58,
    num_experts=384,
    expert_width=3072,
    routed_scale=2.5,
)

PRESETS = {"v4-flash": V4_FLASH, "v4-pro": V4_PRO}


def preset_pools(
    name: str,
    storage: Literal["fp8", "bfloat16"] = "fp8",
    index_storage: Literal["fp4", "fp8"] = "fp4",
) -> tuple[PoolSpec, ...]:
    """The pools of a preset. `index_storage` matters with fp8 only; state is fp32 in all.

    Raises ConfigError for an unknown preset.
    """
    if name not in PRESETS:
        raise ConfigError(f"preset {name!r} is unknown; known: {', '.join(PRESETS)}")
    specs = declare(PRESETS[name], dtype="bfloat16")
    if storage == "bfloat16":
        return specs
    return tuple(_packed(spec, ("fp8_v4", index_storage)) for spec in specs)


def _packed(spec: PoolSpec, formats: tuple[str, ...]) -> PoolSpec:
    """The pool in whichever of the formats it can take, or as it is."""
    for choice in spec.choices:
        if isinstance(choice, RowFormat) and choice.name in formats:
            return spec.stored_as(choice.name)
    return spec
