"""Dense decoders (Llama, Mistral, Qwen2, Qwen3): the forward pass of one step over one pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice.cache.spec import PoolSpec
from sluice.kernels.dense_attention import Span, decode_attention, prompt_attention
from sluice.kernels.matmul import linear
from sluice.kernels.norm import rms_norm
from sluice.kernels.rope import rotate_, rotations
from sluice.kernels.rows import write_rows
from sluice.model.common.checkpoint import check_tensors, refuse_quantised, stored_tensors
from sluice.model.common.inputs import ForwardInputs, PoolView
from sluice.model.common.weight_files import fingerprint
from sluice.model.dense.config import DenseConfig
from sluice.model.dense.pools import KV
from sluice.model.dense.rope import rope_frequencies
from sluice.model.dense.weights import (
    DenseLayerWeights,
    DenseWeights,
    build_dense_weights,
    dense_shapes,
    without_derived,
)


@dataclass(frozen=True)
class DenseStep:
    """What all layers of a step share.

    rotation: [T, head_dim // 2] complex64; write: [T] slots; attend: (queries [T, num_heads,
    head_dim], a layer's rows) -> [T, num_heads, head_dim].
    """

    rotation: Tensor
    write: Tensor
    attend: Callable[[Tensor, Tensor], Tensor]


class DenseModel:
    """A loaded model. Holds weights and no request's data: all of that is in the pool."""

    def __init__(
        self,
        config: DenseConfig,
        weights: DenseWeights,
        specs: tuple[PoolSpec, ...],
        fingerprint: str,
    ) -> None:
        self.config = config
        self.weights = weights
        self.specs = specs
        self.fingerprint = fingerprint
        self.vocab_size = config.vocab_size
        self.max_model_len = config.max_model_len
        self.replay_tokens = 0
        self.repeats = True
        self._frequencies = rope_frequencies(config.rope, config.head_dim).to(weights.norm.device)

    @classmethod
    def load(
        cls,
        folder: Path,
        config: DenseConfig,
        specs: tuple[PoolSpec, ...],
        *,
        dtype: torch.dtype,
        device: str,
    ) -> DenseModel:
        """Read a checkpoint. Raises ConfigError if files or tensors are not as they should be."""
        tensors = without_derived(stored_tensors(folder), config)
        refuse_quantised(tensors, str(folder))
        check_tensors(tensors, dense_shapes(config), str(folder))
        weights = build_dense_weights(tensors, config, dtype=dtype, device=device)
        return cls(config, weights, specs, fingerprint(folder))

    @torch.inference_mode()
    def forward(
        self, inputs: ForwardInputs, pools: Mapping[str, PoolView], *, all_logits: bool = False
    ) -> Tensor:
        """Compute a step: write its rows to the pool, return fp32 logits.

        Returns [R, vocab] of each request's last token, or [T, vocab] with `all_logits`.
        """
        config, weights, pool = self.config, self.weights, pools[KV]
        step = self._plan(inputs, pool.spec)
        x = F.embedding(inputs.token_ids, weights.embed)  # [T, hidden]
        for number, layer in enumerate(weights.layers):
            normed = rms_norm(x, layer.attn_norm, config.norm_eps)
            x = x + self._attention(normed, layer, step, pool.layer(number))
            x = x + _mlp(rms_norm(x, layer.mlp_norm, config.norm_eps), layer)
        if not all_logits:
            x = x[inputs.query_start[1:] - 1]
        return linear(rms_norm(x, weights.norm, config.norm_eps), weights.head).float()

    def _plan(self, inputs: ForwardInputs, spec: PoolSpec) -> DenseStep:
        rotation = rotations(inputs.positions, self._frequencies)
        return DenseStep(
            rotation=rotation * self.config.rope.attention_factor,
            write=inputs.slots(spec, inputs.request_index, inputs.positions),
            attend=_attend_to(inputs, spec, self.config.head_dim**-0.5),
        )

    def _attention(
        self, x: Tensor, layer: DenseLayerWeights, step: DenseStep, rows: Tensor
    ) -> Tensor:
        """x: [T, hidden], normed. Writes keys and values to the rows. Returns [T, hidden]."""
        config = self.config
        qkv = _affine(x, layer.qkv, layer.qkv_bias).unflatten(1, (-1, config.head_dim))
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        queries, keys, values = qkv.split(heads, dim=1)  # [T, heads, head_dim]
        if layer.q_norm is not None and layer.k_norm is not None:
            queries = rms_norm(queries, layer.q_norm, config.norm_eps)
            keys = rms_norm(keys, layer.k_norm, config.norm_eps)
        rotate_(queries, step.rotation)
        rotate_(keys, step.rotation)
        write_rows(rows, step.write, torch.stack([keys, values], dim=1))
        attended = step.attend(queries, rows).flatten(1)
        return _affine(attended, layer.output, layer.output_bias)


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = linear(x, weight)
    return product if bias is None else product.add_(bias)


def _mlp(x: Tensor, layer: DenseLayerWeights) -> Tensor:
    gate, up = _affine(x, layer.gate_up, layer.gate_up_bias).chunk(2, dim=1)  # [T, width]
    # In place, though strided: 15 % of a prompt's time on a CPU, which a new tensor costs.
    return _affine(F.silu(gate, inplace=True).mul_(up), layer.down, layer.down_bias)


def _attend_to(
    inputs: ForwardInputs, spec: PoolSpec, scale: float
) -> Callable[[Tensor, Tensor], Tensor]:
    """Attention for this batch's shape: one query a request, or chunks."""
    pages = inputs.page_tables[spec.table]
    if inputs.token_ids.shape[0] == inputs.num_requests:
        num_tokens = inputs.num_computed + 1
        return lambda queries, rows: decode_attention(queries, rows, pages, num_tokens, scale)
    bounds, computed = inputs.query_start.tolist(), inputs.num_computed.tolist()
    spans = [
        Span(first, last, start + last - first)
        for first, last, start in zip(bounds, bounds[1:], computed, strict=False)
    ]
    return lambda queries, rows: prompt_attention(queries, rows, pages, spans, scale)
