"""The weights of a dense model as the forward pass wants them: fused, typed, pairs side by side.

transformers rotates channel i of a head with channel i + dim/2; here the two lie beside each other,
as complex numbers do. So the rows of queries and keys are put in that order once, at load; the
products of queries and keys do not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.model.dense.config import DenseConfig


@dataclass(frozen=True)
class DenseLayerWeights:
    """qkv: [(num_heads + 2 * num_kv_heads) * head_dim, hidden]; gate_up: [2 * width, hidden].

    Norms are fp32, q_norm and k_norm [head_dim]; the rest is in the model's dtype.
    """

    attn_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True)
class DenseWeights:
    embed: Tensor
    layers: tuple[DenseLayerWeights, ...]
    norm: Tensor
    head: Tensor


def dense_shapes(config: DenseConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_head:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + name: shape for name, shape in _layer_shapes(config).items()}
    return shapes


def _layer_shapes(config: DenseConfig) -> dict[str, tuple[int, ...]]:
    hidden, width = config.hidden_size, config.mlp_width
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrices = {
        "self_attn.q_proj": (heads, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_heads, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_heads, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, heads, config.output_bias),
        "mlp.gate_proj": (width, hidden, config.mlp_bias),
        "mlp.up_proj": (width, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, width, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, (rows, columns, biased) in matrices.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if biased:
            shapes[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = (config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def without_derived(tensors: Mapping[str, Tensor], config: DenseConfig) -> dict[str, Tensor]:
    """Leave out what some checkpoints store beside the weights: frequencies, and a tied head."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not name.endswith("rotary_emb.inv_freq")
        and not (config.tied_head and name == "lm_head.weight")
    }


def build_dense_weights(
    tensors: Mapping[str, Tensor], config: DenseConfig, *, dtype: torch.dtype, device: str
) -> DenseWeights:
    """Fuse and cast. The tensors must be those of `dense_shapes`."""
    source = _Source(tensors, config, dtype, device)
    embed = source.cast("model.embed_tokens.weight")
    return DenseWeights(
        embed=embed,
        layers=tuple(source.layer(number) for number in range(config.num_layers)),
        norm=source.fp32("model.norm.weight"),
        head=embed if config.tied_head else source.cast("lm_head.weight"),
    )


@dataclass(frozen=True)
class _Source:
    tensors: Mapping[str, Tensor]
    config: DenseConfig
    dtype: torch.dtype
    device: str

    def cast(self, *names: str) -> Tensor:
        """The tensors, joined by rows, in the model's dtype."""
        parts = [self._ordered(name) for name in names]
        return torch.cat(parts).to(self.device, self.dtype)

    def optional(self, *names: str) -> Tensor | None:
        return self.cast(*names) if names[0] in self.tensors else None

    def fp32(self, name: str) -> Tensor:
        return self._ordered(name).to(self.device, torch.float32)

    def optional_fp32(self, name: str) -> Tensor | None:
        return self.fp32(name) if name in self.tensors else None

    def layer(self, number: int) -> DenseLayerWeights:
        attention, mlp = f"model.layers.{number}.self_attn", f"model.layers.{number}.mlp"
        qkv = [f"{attention}.{part}_proj" for part in "qkv"]
        gate_up = [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
        return DenseLayerWeights(
            attn_norm=self.fp32(f"model.layers.{number}.input_layernorm.weight"),
            qkv=self.cast(*[f"{name}.weight" for name in qkv]),
            qkv_bias=self.optional(*[f"{name}.bias" for name in qkv]),
            q_norm=self.optional_fp32(f"{attention}.q_norm.weight"),
            k_norm=self.optional_fp32(f"{attention}.k_norm.weight"),
            output=self.cast(f"{attention}.o_proj.weight"),
            output_bias=self.optional(f"{attention}.o_proj.bias"),
            mlp_norm=self.fp32(f"model.layers.{number}.post_attention_layernorm.weight"),
            gate_up=self.cast(*[f"{name}.weight" for name in gate_up]),
            gate_up_bias=self.optional(*[f"{name}.bias" for name in gate_up]),
            down=self.cast(f"{mlp}.down_proj.weight"),
            down_bias=self.optional(f"{mlp}.down_proj.bias"),
        )

    def _ordered(self, name: str) -> Tensor:
        """The tensor, with rotary pairs side by side where its rows are channels of q or k."""
        tensor = self.tensors[name]
        rotated = (".q_proj.", ".k_proj.", ".q_norm.", ".k_norm.")
        if not any(part in name for part in rotated):
            return tensor
        return pairs_beside(tensor, self.config.head_dim)


def pairs_beside(tensor: Tensor, head_dim: int) -> Tensor:
    """Rows [num_heads * head_dim, ...]: i and i + head_dim/2 of a head to 2i and 2i + 1."""
    heads = tensor.unflatten(0, (-1, 2, head_dim // 2))
    return heads.transpose(1, 2).flatten(0, 2)
