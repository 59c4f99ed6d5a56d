"""The weights of DeepSeek-V4 as the forward pass wants them: typed, fused and in its dtypes.

Matrices are in the model's dtype, or in their released codes and scales, with which the model was
trained to be multiplied. Norms, sinks, hyper-connections, router, compressors, the indexer's head
weights and the output head are fp32, whatever that is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sluice.kernels.matmul import BLOCK, FP8, BlockScaled, Weight
from sluice.model.v4.config import DeepseekV4Config, LayerType, MlpType
from sluice.protocol.messages import ConfigError


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

    wq_b: Weight
    weights_proj: Tensor
    compressor: CompressorWeights


@dataclass(frozen=True)
class AttentionWeights:
    """wo_a: [o_groups, o_lora_rank, heads * head_dim / o_groups]; the others as stored.

    The release's own code multiplies wo_a plain too, without rounding the heads' output.
    """

    wq_a: Weight
    q_norm: Tensor
    wq_b: Weight
    wkv: Weight
    kv_norm: Tensor
    sinks: Tensor
    wo_a: Tensor
    wo_b: Weight
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None


@dataclass(frozen=True)
class MoeWeights:
    """w13: [experts, 2 * width, hidden], w2: [experts, hidden, width]; one of bias, tid2eid."""

    gate: Tensor
    bias: Tensor | None
    tid2eid: Tensor | None
    w13: Weight
    w2: Weight
    shared_w13: Weight
    shared_w2: Weight


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
    weights: Mapping[str, Weight],
    config: DeepseekV4Config,
    *,
    dtype: torch.dtype,
    device: str,
    stored: bool = False,
) -> ModelWeights:
    """Weights from those under official names, which must be complete.

    stored: whether matrices that are block-scaled stay so. Raises ConfigError if they cannot.
    """
    source = _Source(weights, config, dtype, device, stored)
    return ModelWeights(
        embed=source.plain("embed.weight"),
        layers=tuple(_layer(source, n) for n in range(config.num_layers)),
        head_hc=source.hyper("hc_head"),
        norm=source.fp32("norm.weight"),
        head=source.fp32("head.weight"),
    )


@dataclass(frozen=True)
class _Source:
    """Access to the checkpoint's weights by name, below a prefix, cast and moved."""

    weights: Mapping[str, Weight]
    config: DeepseekV4Config
    dtype: torch.dtype
    device: str
    stored: bool
    prefix: str = ""

    def below(self, prefix: str) -> _Source:
        return replace(self, prefix=self.prefix + prefix)

    def raw(self, name: str) -> Weight:
        """On the device, as stored."""
        weight = self.weights[self.prefix + name]
        if isinstance(weight, Tensor):
            return weight.to(self.device)
        return BlockScaled(weight.codes.to(self.device), weight.scale.to(self.device))

    def plain(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Values, exactly: a code times a power of two fits into bf16."""
        weight = self.raw(name)
        values = weight if isinstance(weight, Tensor) else weight.plain()
        return values.to(dtype or self.dtype)

    def fp32(self, name: str) -> Tensor:
        return self.plain(name, torch.float32)

    def matrix(self, name: str) -> Weight:
        """What is only ever multiplied with: plain, or as stored."""
        weight = self.raw(name)
        keep = self.stored and isinstance(weight, BlockScaled)
        return weight if keep else self.plain(name)

    def gate_up(self, expert: str) -> Weight:
        gate, up = (self.matrix(f"{expert}.{part}.weight") for part in ("w1", "w3"))
        width = self.config.expert_width
        if isinstance(gate, BlockScaled) and gate.kind == FP8 and width % BLOCK:
            raise ConfigError(
                f"{self.prefix}{expert}: moe_intermediate_size is {width}, expected a multiple of "
                f"{BLOCK} where FP8 weights stay as stored; set model.weights to dequantized"
            )
        return self.joined(torch.cat, [gate, up], expert)

    def joined(
        self, join: Callable[[list[Tensor]], Tensor], parts: Sequence[Weight], name: str
    ) -> Weight:
        """Matrices cat or stacked, all plain or all in one code."""
        plain = [part for part in parts if isinstance(part, Tensor)]
        scaled = [part for part in parts if isinstance(part, BlockScaled)]
        if (plain and scaled) or len({part.kind for part in scaled}) > 1:
            raise ConfigError(
                f"{self.prefix}{name}: some weights are FP8, FP4 or plain and others are not, "
                "expected one kind; set model.weights to dequantized"
            )
        if plain:
            return join(plain)
        codes, scales = [part.codes for part in scaled], [part.scale for part in scaled]
        return BlockScaled(join(codes), join(scales))

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
        wo_a=source.plain("wo_a.weight").unflatten(0, (source.config.o_groups, -1)),
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
        tid2eid=source.plain("gate.tid2eid", torch.int64) if by_hash else None,
        w13=source.joined(torch.stack, [source.gate_up(e) for e in experts], "experts"),
        w2=source.joined(
            torch.stack, [source.matrix(f"{e}.w2.weight") for e in experts], "experts"
        ),
        shared_w13=source.gate_up("shared_experts"),
        shared_w2=source.matrix("shared_experts.w2.weight"),
    )
