"""The weights of DeepSeek-V4 as the forward pass wants them: typed, fused and in its dtypes.

Matrices are in the model's dtype. Norms, sinks, hyper-connections, router, compressors, the
indexer's head weights and the output head are fp32, whatever that is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.model.config import DeepseekV4Config, LayerType, MlpType


@dataclass(frozen=True)
class HyperWeights:
    """One mix of the residual streams. fn: [m, n * hidden]; scale: [m] or [1]; base: [m]; fp32."""

    fn: Tensor
    scale: Tensor
    base: Tensor


@dataclass(frozen=True)
class CompressorWeights:
    """wkv_gate: [2 * width, hidden], kv first; ape: [ratio, width]; norm: [dim]; all fp32."""

    wkv_gate: Tensor
    ape: Tensor
    norm: Tensor


@dataclass(frozen=True)
class IndexerWeights:
    """wq_b: [heads * dim, q_lora_rank]; weights_proj: [heads, hidden] fp32."""

    wq_b: Tensor
    weights_proj: Tensor
    compressor: CompressorWeights


@dataclass(frozen=True)
class AttentionWeights:
    """wo_a: [o_groups, o_lora_rank, heads * head_dim / o_groups]; the others as stored."""

    wq_a: Tensor
    q_norm: Tensor
    wq_b: Tensor
    wkv: Tensor
    kv_norm: Tensor
    sinks: Tensor
    wo_a: Tensor
    wo_b: Tensor
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None


@dataclass(frozen=True)
class MoeWeights:
    """w13: [experts, 2 * width, hidden], w2: [experts, hidden, width]; one of bias, tid2eid."""

    gate: Tensor
    bias: Tensor | None
    tid2eid: Tensor | None
    w13: Tensor
    w2: Tensor
    shared_w13: Tensor
    shared_w2: Tensor


@dataclass(frozen=True)
class LayerWeights:
    attn_hc: HyperWeights
    attn_norm: Tensor
    attention: AttentionWeights
    ffn_hc: HyperWeights
    ffn_norm: Tensor
    moe: MoeWeights


@dataclass(frozen=True)
class ModelWeights:
    embed: Tensor
    layers: tuple[LayerWeights, ...]
    head_hc: HyperWeights
    norm: Tensor
    head: Tensor


def build_weights(
    tensors: Mapping[str, Tensor], config: DeepseekV4Config, *, dtype: torch.dtype, device: str
) -> ModelWeights:
    """Weights from tensors under official names, which must be complete."""
    source = _Source(tensors, config, dtype, device)
    return ModelWeights(
        embed=source.matrix("embed.weight"),
        layers=tuple(_layer(source, n) for n in range(config.num_layers)),
        head_hc=source.hyper("hc_head"),
        norm=source.fp32("norm.weight"),
        head=source.fp32("head.weight"),
    )


class _Source:
    """Access to the checkpoint's tensors by name, below a prefix, cast and moved."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        config: DeepseekV4Config,
        dtype: torch.dtype,
        device: str,
        prefix: str = "",
    ) -> None:
        self.tensors = tensors
        self.config = config
        self.dtype = dtype
        self.device = device
        self.prefix = prefix

    def below(self, prefix: str) -> _Source:
        return _Source(self.tensors, self.config, self.dtype, self.device, self.prefix + prefix)

    def raw(self, name: str) -> Tensor:
        return self.tensors[self.prefix + name].to(self.device)

    def matrix(self, name: str) -> Tensor:
        return self.tensors[self.prefix + name].to(self.device, self.dtype)

    def fp32(self, name: str) -> Tensor:
        return self.tensors[self.prefix + name].to(self.device, torch.float32)

    def gate_up(self, expert: str) -> Tensor:
        return torch.cat([self.matrix(f"{expert}.w1.weight"), self.matrix(f"{expert}.w3.weight")])

    def hyper(self, name: str) -> HyperWeights:
        fn = self.fp32(f"{name}_fn")
        scale = self.fp32(f"{name}_scale")
        if len(scale) == 3:  # one each for pre, post and comb: spread over their rows of fn
            n = self.config.hc_mult
            repeats = torch.tensor([n, n, n * n], device=scale.device)
            scale = scale.repeat_interleave(repeats)
        return HyperWeights(fn, scale, self.fp32(f"{name}_base"))


def _layer(source: _Source, layer: int) -> LayerWeights:
    source = source.below(f"layers.{layer}.")
    config = source.config
    return LayerWeights(
        attn_hc=source.hyper("hc_attn"),
        attn_norm=source.fp32("attn_norm.weight"),
        attention=_attention(source.below("attn."), config.layer_types[layer]),
        ffn_hc=source.hyper("hc_ffn"),
        ffn_norm=source.fp32("ffn_norm.weight"),
        moe=_moe(source.below("ffn."), config.mlp_types[layer]),
    )


def _attention(source: _Source, layer_type: LayerType) -> AttentionWeights:
    compressed = layer_type is not LayerType.SLIDING
    return AttentionWeights(
        wq_a=source.matrix("wq_a.weight"),
        q_norm=source.fp32("q_norm.weight"),
        wq_b=source.matrix("wq_b.weight"),
        wkv=source.matrix("wkv.weight"),
        kv_norm=source.fp32("kv_norm.weight"),
        sinks=source.fp32("attn_sink"),
        wo_a=source.matrix("wo_a.weight").unflatten(0, (source.config.o_groups, -1)),
        wo_b=source.matrix("wo_b.weight"),
        compressor=_compressor(source.below("compressor.")) if compressed else None,
        indexer=_indexer(source.below("indexer.")) if layer_type is LayerType.CSA else None,
    )


def _compressor(source: _Source) -> CompressorWeights:
    return CompressorWeights(
        wkv_gate=torch.cat([source.fp32("wkv.weight"), source.fp32("wgate.weight")]),
        ape=source.fp32("ape"),
        norm=source.fp32("norm.weight"),
    )


def _indexer(source: _Source) -> IndexerWeights:
    return IndexerWeights(
        wq_b=source.matrix("wq_b.weight"),
        weights_proj=source.fp32("weights_proj.weight"),
        compressor=_compressor(source.below("compressor.")),
    )


def _moe(source: _Source, mlp_type: MlpType) -> MoeWeights:
    experts = [f"experts.{e}" for e in range(source.config.num_experts)]
    by_hash = mlp_type is MlpType.HASH
    return MoeWeights(
        gate=source.fp32("gate.weight"),
        bias=None if by_hash else source.fp32("gate.bias"),
        tid2eid=source.raw("gate.tid2eid").long() if by_hash else None,
        w13=torch.stack([source.gate_up(expert) for expert in experts]),
        w2=torch.stack([source.matrix(f"{expert}.w2.weight") for expert in experts]),
        shared_w13=source.gate_up("shared_experts"),
        shared_w2=source.matrix("shared_experts.w2.weight"),
    )
