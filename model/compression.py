"""Compressed rows of CSA and HCA layers: made from this step's tokens, and chosen for attention."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from sluice.kernels.compressor import accumulate_blocks, close_blocks, compress_overlapping
from sluice.kernels.indexer import causal_topk, index_scores
from sluice.kernels.norm import rms_norm
from sluice.kernels.rope import rotate_
from sluice.kernels.rows import write_rows
from sluice.model.placement import row_slots
from sluice.model.pools import (
    C4_INDEX_K,
    C4_INDEX_STATE,
    C4_KV,
    C4_STATE,
    C128_KV,
    C128_STATE,
)
from sluice.model.step import LayerStep, OverlapCompressorStep
from sluice.model.weights import AttentionWeights, CompressorWeights, IndexerWeights

Source = tuple[Tensor, Tensor]  # a pool's layer view, and the slots [T, k] to attend to there


def csa_source(x: Tensor, latent: Tensor, weights: AttentionWeights, at: LayerStep) -> Source:
    """Write a CSA layer's new rows, then let the indexer choose what each token attends to.

    x: [T, hidden]; latent: [T, q_lora_rank], the normalised input of the query matrices.
    """
    assert at.step.csa and weights.compressor and weights.indexer, "a CSA layer has all its parts"
    slots = at.step.csa
    _compress(x, weights.compressor, at, slots.compressor, at.rows(C4_STATE), at.rows(C4_KV))
    _compress(
        x,
        weights.indexer.compressor,
        at,
        slots.indexer,
        at.rows(C4_INDEX_STATE),
        at.rows(C4_INDEX_K),
    )
    chosen = _choose(x, latent, weights.indexer, at)
    return at.rows(C4_KV), row_slots(at.step.inputs, at.pools[C4_KV].spec, chosen)


def _compress(
    x: Tensor,
    weights: CompressorWeights,
    at: LayerStep,
    slots: OverlapCompressorStep,
    state: Tensor,
    rows: Tensor,
) -> None:
    """Write the tokens' kv and score to the state pool, and the finished blocks' rows.

    state: [num_pages, rows_per_page, 2, 2 * dim]; rows: [num_pages, rows_per_page, dim].
    """
    assert at.step.csa, "only CSA layers compress with overlap"
    tokens = F.linear(x.float(), weights.wkv_gate).unflatten(1, (2, -1))  # [T, 2, 2 * dim]
    tokens[:, 1] += weights.ape[at.step.csa.ape_row]
    write_rows(state, slots.state_write, tokens)
    if slots.row_write.shape[0]:
        new = rms_norm(
            compress_overlapping(state, slots.state_read), weights.norm, at.config.norm_eps
        )
        write_rows(rows, slots.row_write, rotate_(new, at.step.csa.row_rotation))


def _choose(x: Tensor, latent: Tensor, weights: IndexerWeights, at: LayerStep) -> Tensor:
    """Numbers of the compressed rows each token attends to: [T, at most index_topk], -1 = none."""
    assert at.step.csa, "only CSA layers have an indexer"
    heads, dim = at.config.index_num_heads, at.config.index_head_dim
    queries = F.linear(latent, weights.wq_b).unflatten(1, (heads, dim))
    queries = rotate_(queries, at.rotation)
    head_weights = F.linear(x.float(), weights.weights_proj) * (dim**-0.5 * heads**-0.5)
    scores = index_scores(
        queries,
        head_weights,
        at.rows(C4_INDEX_K),
        at.step.csa.index_read,
        at.step.inputs.query_start,
    )
    return causal_topk(scores, at.step.csa.num_visible, at.config.index_topk)


def hca_source(x: Tensor, weights: AttentionWeights, at: LayerStep) -> Source:
    """Write an HCA layer's new rows; each token attends to all that it can see.

    x: [T, hidden].
    """
    assert at.step.hca and weights.compressor, "an HCA layer has all its parts"
    slots, compressor = at.step.hca, weights.compressor
    kv, score = F.linear(x.float(), compressor.wkv_gate).chunk(2, dim=1)  # [T, head_dim] each
    score = score + compressor.ape[slots.ape_row]
    state, rows = at.rows(C128_STATE), at.rows(C128_KV)
    blocks = accumulate_blocks(state, slots.state_read, slots.block_of_token, kv, score)
    write_rows(state, slots.state_write, blocks)
    new = rms_norm(close_blocks(blocks), compressor.norm, at.config.norm_eps)
    write_rows(rows, slots.row_write, rotate_(new, slots.row_rotation))
    return rows, slots.read
