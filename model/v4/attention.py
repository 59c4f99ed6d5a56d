"""DeepSeek-V4's attention over pool pages: the window, and the compressed rows of its layer type.

Each layer writes this step's rows first and then reads everything it attends to from the pools, so
that a token computed now and one computed long ago are read the same way.
"""

from __future__ import annotations

from torch import Tensor

from sluice.kernels.attention import sparse_attention
from sluice.kernels.matmul import batched_linear, linear
from sluice.kernels.norm import norm_and_rotate, rms_norm
from sluice.model.v4.compression import csa_source, hca_source
from sluice.model.v4.config import LayerType
from sluice.model.v4.pools import SWA_KV
from sluice.model.v4.step import LayerStep
from sluice.model.v4.weights import AttentionWeights


def attention(x: Tensor, weights: AttentionWeights, at: LayerStep) -> Tensor:
    """One layer's attention: [T, hidden] to [T, hidden]. Writes the layer's new rows."""
    config, eps = at.config, at.config.norm_eps
    latent = rms_norm(linear(x, weights.wq_a), weights.q_norm, eps)  # [T, q_lora_rank]
    queries = linear(latent, weights.wq_b).unflatten(1, (config.num_heads, -1))
    queries = norm_and_rotate(queries, None, eps, at.rotation)
    kv = norm_and_rotate(linear(x, weights.wkv), weights.kv_norm, eps, at.rotation)

    at.store(SWA_KV, at.step.window.write, kv)
    sources = [at.source(SWA_KV, at.step.window.read, x.dtype)]
    if at.layer_type is LayerType.CSA:
        sources.append(csa_source(x, latent, weights, at))
    elif at.layer_type is LayerType.HCA:
        sources.append(hca_source(x, weights, at))

    scale = config.head_dim**-0.5
    return _project(sparse_attention(queries, sources, weights.sinks, scale, at.rotation), weights)


def _project(output: Tensor, weights: AttentionWeights) -> Tensor:
    """Heads to hidden, each group of heads through its own low-rank matrix first."""
    groups = output.reshape(output.shape[0], weights.wo_a.shape[0], -1)
    latent = batched_linear(groups, weights.wo_a)  # [T, groups, rank]
    return linear(latent.flatten(1), weights.wo_b)
