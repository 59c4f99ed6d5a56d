"""DeepseekV4Config: what a DeepSeek-V4 checkpoint's config.json says, in one dialect.

Two dialects are read. The official one gives `compress_ratios` (0 sliding, 4 CSA, any other HCA),
`num_hash_layers`, `qk_rope_head_dim` and `rope_scaling`; transformers writes `layer_types`,
`mlp_layer_types`, `compress_rates` and nested `rope_parameters`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from sluice.model.common.fields import MAX_LAYERS, Fields, read_json
from sluice.protocol.messages import ConfigError
from sluice.protocol.reading import shown

Kind = TypeVar("Kind", bound=StrEnum)

MAX_RATIO = 4096  # tokens a compressed row, at most; a page spans two rows of each ratio
CSA_RATIO = 4  # what makes a layer CSA in the official dialect


class LayerType(StrEnum):
    """What a layer's attention sees beyond the sliding window that every layer has."""

    SLIDING = "sliding_attention"  # nothing
    CSA = "compressed_sparse_attention"  # the indexer's choice of finely compressed rows
    HCA = "heavily_compressed_attention"  # all of the coarsely compressed rows


class MlpType(StrEnum):
    """How a layer's router picks experts."""

    HASH = "hash_moe"  # by token id, from a table
    TOPK = "moe"  # by score


@dataclass(frozen=True)
class YarnConfig:
    factor: float
    original_max_tokens: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class DeepseekV4Config:
    """Shapes and constants of one model. Raises ConfigError if they contradict each other."""

    architecture: ClassVar[str] = "DeepseekV4ForCausalLM"

    vocab_size: int
    hidden_size: int
    num_heads: int
    head_dim: int
    rope_dim: int  # the last channels of a head, which carry the position
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int  # tokens a query sees raw, itself included
    layer_types: tuple[LayerType, ...]
    csa_ratio: int  # tokens per compressed row
    hca_ratio: int
    index_num_heads: int
    index_head_dim: int
    index_topk: int
    mlp_types: tuple[MlpType, ...]
    num_experts: int
    num_experts_per_token: int
    expert_width: int
    routed_scale: float
    swiglu_limit: float
    max_model_len: int
    rope_theta: float  # sliding layers
    compress_rope_theta: float  # CSA and HCA layers
    compress_yarn: YarnConfig | None
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float = 1e-6
    norm_eps: float = 1e-6
    bos_token_id: int = 0
    eos_token_ids: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        for problem in _contradictions(self):
            raise ConfigError(f"DeepSeek-V4 config: {problem}")

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    def layers_of(self, layer_type: LayerType) -> tuple[int, ...]:
        """Numbers of the layers of this type."""
        return tuple(n for n, kind in enumerate(self.layer_types) if kind is layer_type)


def _contradictions(config: DeepseekV4Config) -> Iterator[str]:
    heads, groups = config.num_heads, config.o_groups
    if (last := max(config.eos_token_ids, default=0)) >= config.vocab_size:
        yield f"eos_token_id is {last}, expected one below vocab_size ({config.vocab_size})"
    if len(config.mlp_types) != config.num_layers:
        yield f"{len(config.mlp_types)} MLP layer types for {config.num_layers} layers"
    if heads % groups:
        yield f"num_attention_heads is {heads}, expected a multiple of o_groups ({groups})"
    if config.rope_dim % 2 or config.rope_dim > min(config.head_dim, config.index_head_dim):
        yield (
            f"qk_rope_head_dim is {config.rope_dim}, expected an even number up to head_dim "
            f"({config.head_dim}) and index_head_dim ({config.index_head_dim})"
        )
    if config.num_experts_per_token > config.num_experts:
        yield (
            f"num_experts_per_tok is {config.num_experts_per_token}, expected at most "
            f"n_routed_experts ({config.num_experts})"
        )


def read_config(folder: Path) -> DeepseekV4Config:
    """The config of a checkpoint folder. Raises ConfigError."""
    return parse_config(read_json(folder / "config.json"), source=str(folder / "config.json"))


def parse_config(data: Mapping[str, Any], source: str = "config.json") -> DeepseekV4Config:
    """A config.json's content, either dialect. Raises ConfigError naming the field."""
    fields = Fields(data, source)
    fields.refuse_other_than(_SUPPORTED)
    fields.section("quantization_config").refuse_other_than(_QUANTISED)
    layer_types, csa_ratio, hca_ratio = _layers(fields)
    return DeepseekV4Config(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        num_heads=fields.integer("num_attention_heads"),
        head_dim=fields.integer("head_dim"),
        rope_dim=_rope_dim(fields),
        q_lora_rank=fields.integer("q_lora_rank"),
        o_groups=fields.integer("o_groups"),
        o_lora_rank=fields.integer("o_lora_rank"),
        sliding_window=fields.integer("sliding_window"),
        layer_types=layer_types,
        csa_ratio=csa_ratio,
        hca_ratio=hca_ratio,
        index_num_heads=fields.integer("index_n_heads"),
        index_head_dim=fields.integer("index_head_dim"),
        index_topk=fields.integer("index_topk"),
        mlp_types=_mlp_types(fields, len(layer_types)),
        num_experts=fields.integer("n_routed_experts"),
        num_experts_per_token=fields.integer("num_experts_per_tok"),
        expert_width=fields.integer("moe_intermediate_size"),
        routed_scale=fields.number("routed_scaling_factor"),
        swiglu_limit=fields.number("swiglu_limit", 10.0),
        max_model_len=fields.integer("max_position_embeddings"),
        rope_theta=_main_theta(fields),
        compress_rope_theta=_compress_theta(fields),
        compress_yarn=_compress_yarn(fields),
        hc_mult=fields.integer("hc_mult"),
        hc_sinkhorn_iters=fields.integer("hc_sinkhorn_iters"),
        hc_eps=fields.number("hc_eps", 1e-6),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        bos_token_id=fields.count("bos_token_id", 0),
        eos_token_ids=fields.token_ids("eos_token_id", 1),
    )


_SUPPORTED: dict[str, Any] = {  # other values would need another forward pass
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
_QUANTISED: dict[str, Any] = {  # of FP8 weights; whether experts are FP4 the tensors say
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def _layers(fields: Fields) -> tuple[tuple[LayerType, ...], int, int]:
    """Layer types, CSA ratio and HCA ratio, from either dialect."""
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    if "layer_types" in fields.data:
        types = _types(fields, "layer_types", LayerType, num_layers)
        rates = fields.section("compress_rates")
        csa = rates.integer(LayerType.CSA, CSA_RATIO, MAX_RATIO)
        return types, csa, rates.integer(LayerType.HCA, 128, MAX_RATIO)
    ratios = fields.sequence("compress_ratios")[:num_layers]  # more follow for MTP layers
    if len(ratios) != num_layers:
        raise fields.error(f"compress_ratios has {len(ratios)} entries for {num_layers} layers")
    for ratio in ratios:
        if type(ratio) is not int or not 0 <= ratio <= MAX_RATIO:
            raise fields.error(
                f"compress_ratios holds {shown(ratio)}, expected integers from 0 to {MAX_RATIO}"
            )
    coarse = sorted(set(ratios) - {0, CSA_RATIO})
    if len(coarse) > 1:
        raise fields.error(
            f"compress_ratios holds {coarse}, expected 0 (sliding), {CSA_RATIO} (CSA) and one "
            "other ratio (HCA)"
        )
    kinds = {0: LayerType.SLIDING, CSA_RATIO: LayerType.CSA}
    types = tuple(kinds.get(ratio, LayerType.HCA) for ratio in ratios)
    return types, CSA_RATIO, coarse[0] if coarse else 128


def _mlp_types(fields: Fields, num_layers: int) -> tuple[MlpType, ...]:
    if "mlp_layer_types" in fields.data:
        return _types(fields, "mlp_layer_types", MlpType, num_layers)
    num_hash = min(fields.count("num_hash_layers"), num_layers)
    return (MlpType.HASH,) * num_hash + (MlpType.TOPK,) * (num_layers - num_hash)


def _types(fields: Fields, name: str, kind: type[Kind], num_layers: int) -> tuple[Kind, ...]:
    values = fields.sequence(name)
    if len(values) != num_layers:
        raise fields.error(f"{name} has {len(values)} entries for {num_layers} layers")
    for number, value in enumerate(values):
        if value not in list(kind):
            raise fields.error(
                f"{name}[{number}] is {shown(value)}, expected one of {', '.join(kind)}"
            )
    return tuple(kind(value) for value in values)


def _rope_dim(fields: Fields) -> int:
    if "qk_rope_head_dim" in fields.data:
        return fields.integer("qk_rope_head_dim")
    return int(fields.integer("head_dim") * fields.number("partial_rotary_factor"))


def _rope(fields: Fields, branch: str) -> Fields:
    """transformers' parameters of one branch, `main` or `compress`; empty in the other dialect."""
    return fields.section("rope_parameters").section(branch)


def _main_theta(fields: Fields) -> float:
    main = _rope(fields, "main")
    main.refuse_other_than({"rope_type": "default"})
    return main.number_or_zero("rope_theta") or fields.number("rope_theta")


def _compress_theta(fields: Fields) -> float:
    compress = _rope(fields, "compress")
    return compress.number_or_zero("rope_theta") or fields.number("compress_rope_theta")


def _compress_yarn(fields: Fields) -> YarnConfig | None:
    compress = _rope(fields, "compress")
    yarn = compress if compress.data else fields.section("rope_scaling")
    kind = yarn.get("rope_type", yarn.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise fields.error(
            f"rope type of compressed layers is {shown(kind)}, expected yarn or default"
        )
    yarn.refuse_other_than({"attention_factor": 1.0})
    return YarnConfig(
        factor=yarn.number("factor"),
        original_max_tokens=yarn.integer("original_max_position_embeddings"),
        beta_fast=yarn.number_or_zero("beta_fast") or 32.0,
        beta_slow=yarn.number_or_zero("beta_slow") or 1.0,
    )
