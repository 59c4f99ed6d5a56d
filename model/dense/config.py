"""DenseConfig: what the config.json of a Llama-family or Qwen3 checkpoint says.

All these models are one decoder with a few switches, so one config describes them; `_FAMILIES`
says which switches an architecture sets, and what transformers assumes where a field is absent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sluice.model.common.fields import MAX_LAYERS, Fields
from sluice.model.dense.rope_config import RopeConfig, parse_rope
from sluice.protocol.messages import ConfigError
from sluice.protocol.reading import shown


@dataclass(frozen=True)
class DenseConfig:
    """Shapes and constants of one model. Raises ConfigError if they contradict each other."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    max_model_len: int
    norm_eps: float
    rope: RopeConfig
    qkv_bias: bool  # q_proj, k_proj and v_proj have biases
    output_bias: bool  # o_proj has one
    mlp_bias: bool
    qk_norm: bool  # queries and keys are normalised head by head
    tied_head: bool  # the output head is the embedding
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        for problem in _contradictions(self):
            raise ConfigError(f"{self.architecture} config: {problem}")


def _contradictions(config: DenseConfig) -> Iterator[str]:
    if (last := max(config.eos_token_ids, default=0)) >= config.vocab_size:
        yield f"eos_token_id is {last}, expected one below vocab_size ({config.vocab_size})"
    if config.num_heads % config.num_kv_heads:
        yield (
            f"num_attention_heads is {config.num_heads}, expected a multiple of "
            f"num_key_value_heads ({config.num_kv_heads})"
        )
    if config.head_dim % 2:
        yield f"head_dim is {config.head_dim}, expected an even number (rotary pairs)"


@dataclass(frozen=True)
class _Family:
    """How an architecture differs. `bias_field` is the field that switches attention biases."""

    qkv_bias: bool = False
    bias_field: str | None = None
    mlp_bias: bool = False  # whether mlp_bias may be set
    qk_norm: bool = False
    head_dim: int | None = None  # None: hidden_size / num_attention_heads


_FAMILIES = {
    "LlamaForCausalLM": _Family(bias_field="attention_bias", mlp_bias=True),
    "MistralForCausalLM": _Family(),
    "Qwen2ForCausalLM": _Family(qkv_bias=True),
    "Qwen3ForCausalLM": _Family(bias_field="attention_bias", qk_norm=True, head_dim=128),
}
DENSE_ARCHITECTURES = tuple(_FAMILIES)


def parse_dense_config(data: Mapping[str, Any], source: str, architecture: str) -> DenseConfig:
    """A config.json's content. Raises ConfigError naming the field."""
    fields, family = Fields(data, source), _FAMILIES[architecture]
    _refuse_unsupported(fields, family)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    max_model_len = fields.integer("max_position_embeddings")
    _refuse_windows(fields, architecture, max_model_len)
    biased = family.bias_field is not None and fields.flag(family.bias_field)
    return DenseConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=fields.integer("num_hidden_layers", maximum=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", family.head_dim or hidden_size // num_heads),
        mlp_width=fields.integer("intermediate_size"),
        max_model_len=max_model_len,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=parse_rope(fields, max_model_len),
        qkv_bias=family.qkv_bias or biased,
        output_bias=biased,
        mlp_bias=family.mlp_bias and fields.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        tied_head=fields.flag("tie_word_embeddings"),
        eos_token_ids=fields.token_ids("eos_token_id"),
    )


def _refuse_unsupported(fields: Fields, family: _Family) -> None:
    supported: dict[str, Any] = {"hidden_act": "silu", "partial_rotary_factor": 1.0}
    if not family.mlp_bias:
        supported["mlp_bias"] = False
    if family.bias_field is None:
        supported["attention_bias"] = family.qkv_bias
    fields.refuse_other_than(supported)
    if fields.get("quantization_config", None) is not None:
        method = fields.section("quantization_config").get("quant_method", "unknown")
        raise fields.error(
            f"quantization_config says {shown(method)}; expected float32, float16 or bfloat16 "
            "weights: convert the checkpoint first"
        )


def _refuse_windows(fields: Fields, architecture: str, max_model_len: int) -> None:
    """Attention sees everything here; a window that no request can outgrow changes nothing."""
    given = fields.get("layer_types", None) is not None
    for kind in fields.sequence("layer_types") if given else []:
        if kind != "full_attention":
            raise fields.error(
                f"layer_types holds {shown(kind)}, only 'full_attention' is supported"
            )
    if architecture == "MistralForCausalLM":
        has_window = fields.data.get("sliding_window", 4096) is not None
    else:
        has_window = fields.flag("use_sliding_window")
    # transformers' value where it is absent
    window = fields.integer("sliding_window", 4096) if has_window else max_model_len
    if window < max_model_len:
        raise fields.error(
            f"sliding_window is {window}, expected null or at least max_position_embeddings "
            f"({max_model_len}): attention within a window is not supported; lower "
            f"max_position_embeddings to {window} to serve requests up to that length"
        )
