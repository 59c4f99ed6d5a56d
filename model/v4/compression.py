"""Compressed rows of CSA and HCA layers: made from tokens, and chosen for attention."""

from __future__ import annotations

from torch import Tensor

from sluice.kernels.indexer import index_scores
from sluice.kernels.matmul import linear
from sluice.kernels.norm import norm_and_rotate
from sluice.kernels.rope import rotate_
from sluice.kernels.topk import causal_topk
from sluice.model.v4.placement import row_slots
from sluice.model.v4.pool_rows import Source
from sluice.model.v4.pools import C4_INDEX_K, C4_KV, C128_KV
from sluice.model.v4.step import CompressorStep, LayerStep
from sluice.model.v4.weights import AttentionWeights, CompressorWeights, IndexerWeights


def csa_source(x: Tensor, latent: Tensor, weights: AttentionWeights, at: LayerStep) -> Source:
    """Write a CSA layer's new rows, then let the indexer choose what each token attends to.

    x: [T, hidden]; latent: [T, q_lora_rank], the normalised input of the query matrices.
    """
    assert at.step.csa and weights.compressor and weights.indexer, "a CSA layer has all its parts"
    _compress(x, weights.compressor, at, at.step.csa.compressor)
    _compress(x, weights.indexer.compressor, at, at.step.csa.indexer)
    chosen = _choose(x, latent, weights.indexer, at)
    slots = row_slots(at.inputs, at.step.frame.pools[C4_KV].spec, chosen)
    return at.source(C4_KV, slots, x.dtype)


def hca_source(x: Tensor, weights: AttentionWeights, at: LayerStep) -> Source:
    """Write an HCA layer's new rows; each token attends to all that it can see.

    x: [T, hidden].
    """
    assert at.step.hca and weights.compressor, "an HCA layer has all its parts"
    _compress(x, weights.compressor, at, at.step.hca.compressor)
    return at.source(C128_KV, at.step.hca.read, x.dtype)


def _compress(x: Tensor, weights: CompressorWeights, at: LayerStep, step: CompressorStep) -> None:
    """Write the tokens' kv and score to the state pool, and the new rows to theirs."""
    tokens = linear(x.float(), weights.wkv_gate).unflatten(1, (2, -1))  # [T, 2, width]
    tokens[:, 1].add_(weights.ape[step.ape_row])
    new = step.state.update(at.rows(step.state.pool), tokens)  # [n, dim]
    if new.shape[0]:
        new = norm_and_rotate(new, weights.norm, at.config.norm_eps, step.row_rotation)
        at.store(step.rows, step.row_write, new)


def _choose(x: Tensor, latent: Tensor, weights: IndexerWeights, at: LayerStep) -> Tensor:
    """Numbers of the compressed rows each token attends to: [T, at most index_topk], -1 = none."""
    assert at.step.csa, "only CSA layers have an indexer"
    heads, dim = at.config.index_num_heads, at.config.index_head_dim
    queries = linear(latent, weights.wq_b).unflatten(1, (heads, dim))
    queries = at.matched(rotate_(queries, at.rotation), C4_INDEX_K)
    head_weights = linear(x.float(), weights.weights_proj) * (dim**-0.5 * heads**-0.5)
    scores = index_scores(
        queries,
        head_weights,
        *at.source(C4_INDEX_K, at.step.csa.index_read, x.dtype),
        at.inputs.query_start,
    )
    return causal_topk(scores, at.step.csa.num_visible, at.config.index_topk)
