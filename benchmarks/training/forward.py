"""DeepSeek-V4's forward pass for training: whole documents, differentiable, no cache.

The parameters are those of transformers' `DeepseekV4ForCausalLM`; this is another way through them.
The reference computes attention as one square matrix and picks compressed rows by a hard top-k,
which passes no gradient to the indexer. Here
 - the sliding window is computed block by block, each block of queries against two blocks of rows;
 - a layer with an indexer attends either to all compressed rows (ALL) or to the indexer's top-k
   (TOP_K), the latter being what serving does;
 - with ALL, the indexer learns from the attention it should have predicted: a KL term between the
   attention's mass on the compressed rows and the softmax of its scores, on detached inputs, as
   DeepSeek trains its sparse attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DeepseekV4ForCausalLM
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

from sluice.model.tokenizer import PAD_TOKEN_ID

MINUS_INF = float("-inf")
HIDDEN_SCORE = -1e4  # of rows a query may not see: finite, so that a row without any has a softmax
TINY = 1e-6


class Rows(Enum):
    """Which compressed rows a query of a layer with an indexer attends to."""

    ALL = "all"
    TOP_K = "top_k"


@dataclass(frozen=True)
class TrainingOutput:
    """What a forward pass of B documents of S tokens gives.

    logits: [B, S, vocab]. indexer_loss: the KL term's mean over layers; None with Rows.TOP_K or
    without indexers. expert_loads: for each learned router, its assignments by expert.
    """

    logits: Tensor
    indexer_loss: Tensor | None
    expert_loads: list[Tensor]


@dataclass(frozen=True)
class Rotation:
    """Rotary position embedding of tokens 0..S-1. cos, sin: [1, S, rope_dim / 2]."""

    cos: Tensor
    sin: Tensor

    def turn(self, x: Tensor, *, back: bool = False) -> Tensor:
        """Rotate x [B, S, num_heads, head_dim] by each token's position, or back again."""
        sin = -self.sin if back else self.sin
        return apply_rotary_pos_emb(x, self.cos, sin, unsqueeze_dim=2)

    def every(self, ratio: int, num_rows: int) -> Rotation:
        """Of the first token of each of the first `num_rows` blocks."""
        places = slice(0, num_rows * ratio, ratio)
        return Rotation(self.cos[:, places], self.sin[:, places])


@dataclass(frozen=True)
class Compressed:
    """A layer's compressed rows [B, T, head_dim] and, for each query, those it must not see.

    hidden: bool, [B or 1, S, T]. scores: the indexer's, [B, S, T], if it is to learn from them.
    """

    rows: Tensor
    hidden: Tensor
    scores: Tensor | None = None


def training_forward(
    model: DeepseekV4ForCausalLM, token_ids: Tensor, weights: Tensor, *, attend_to: Rows
) -> TrainingOutput:
    """Logits of every token, and what the indexers and routers learn from.

    token_ids: [B, S], int64. weights: [B, S], how much each query counts in the indexer's loss.
    With Rows.TOP_K the logits are those of the reference, up to rounding and to the choice between
    rows of exactly equal score.
    """
    num_tokens = token_ids.shape[1]
    padding = (0, -num_tokens % model.config.sliding_window)  # whole windows; nobody looks ahead
    token_ids, weights = F.pad(token_ids, padding, value=PAD_TOKEN_ID), F.pad(weights, padding)
    rotations = _rotations(model, token_ids)
    embedded = model.model.embed_tokens(token_ids)
    streams = embedded.unsqueeze(2).repeat(1, 1, model.config.hc_mult, 1)  # [B, S, hc, hidden]
    losses: list[Tensor] = []
    loads: list[Tensor] = []
    for layer in model.model.layers:
        block: Any = layer
        post, comb, collapsed = block.attn_hc(streams)
        normed = block.input_layernorm(collapsed)
        rotation = rotations[block.self_attn.rope_layer_type]
        output, loss = _attention(block.self_attn, normed, rotation, weights, attend_to)
        streams = _mix(streams, output, post, comb)
        losses += [] if loss is None else [loss]
        post, comb, collapsed = block.ffn_hc(streams)
        output, load = _experts(block.mlp, block.post_attention_layernorm(collapsed), token_ids)
        streams = _mix(streams, output, post, comb)
        loads += [] if load is None else [load]
    hidden = model.model.norm(model.model.hc_head(streams))
    indexer_loss = torch.stack(losses).mean() if losses else None
    return TrainingOutput(model.lm_head(hidden)[:, :num_tokens], indexer_loss, loads)


def _rotations(model: DeepseekV4ForCausalLM, token_ids: Tensor) -> dict[str, Rotation]:
    positions = torch.arange(token_ids.shape[1])[None]
    like = model.model.embed_tokens.weight
    embedding = model.model.rotary_emb
    return {
        kind: Rotation(*embedding(like, position_ids=positions, layer_type=kind))
        for kind in ("main", "compress")
    }


def _mix(streams: Tensor, output: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Residual streams [B, S, hc, hidden] after a sublayer whose output is [B, S, hidden]."""
    carried = torch.matmul(comb.transpose(-1, -2), streams)
    return post.unsqueeze(-1) * output.unsqueeze(-2) + carried


def _attention(
    attention: Any, hidden: Tensor, rotation: Rotation, weights: Tensor, attend_to: Rows
) -> tuple[Tensor, Tensor | None]:
    """A layer's attention output [B, S, hidden] and its indexer's loss. hidden: [B, S, hidden]."""
    head_dim, window = attention.head_dim, attention.sliding_window
    latent = attention.q_a_norm(attention.q_a_proj(hidden))
    queries = attention.q_b_norm(attention.q_b_proj(latent).unflatten(-1, (-1, head_dim)))
    queries = rotation.turn(queries) * attention.scaling  # [B, S, num_heads, head_dim]
    rows = rotation.turn(attention.kv_norm(attention.kv_proj(hidden)).unsqueeze(2)).squeeze(2)
    pairs = _two_windows(rows, window)
    scores = [_window_scores(queries, pairs, window)]  # [B, S, num_heads, 2 * window]
    compressed = _compressed(attention, hidden, latent, rotation, attend_to)
    if compressed is not None:
        far = _times(queries, compressed.rows.transpose(1, 2)).float()
        scores.append(far.masked_fill(compressed.hidden.unsqueeze(2), MINUS_INF))
    scores.append(attention.sinks.view(1, 1, -1, 1).expand(*queries.shape[:3], 1))
    mass = torch.cat(scores, dim=-1).softmax(-1)
    near = mass[..., : 2 * window].to(rows.dtype).unflatten(1, (-1, window)).flatten(0, 1)
    output = _times(near, pairs).view_as(queries)
    loss = None
    if compressed is not None:
        far = mass[..., 2 * window : -1]
        output = output + _times(far.to(rows.dtype), compressed.rows)
        if compressed.scores is not None:
            loss = _indexer_loss(compressed, far, weights)
    grouped = rotation.turn(output, back=True).unflatten(2, (attention.o_a_proj.n_groups, -1))
    return attention.o_b_proj(attention.o_a_proj(grouped.flatten(3)).flatten(2)), loss


def _times(x: Tensor, y: Tensor) -> Tensor:
    """x [N, S, num_heads, K] times y [N, K, L], as one matrix product a document."""
    return torch.bmm(x.flatten(1, 2), y).unflatten(1, x.shape[1:3])


def _two_windows(rows: Tensor, window: int) -> Tensor:
    """[B * S / window, 2 * window, head_dim]: each block of rows behind its predecessor."""
    blocks = rows.unflatten(1, (-1, window))
    before = F.pad(blocks[:, :-1], (0, 0, 0, 0, 1, 0))
    return torch.cat([before, blocks], dim=2).flatten(0, 1)


def _window_scores(queries: Tensor, pairs: Tensor, window: int) -> Tensor:
    """[B, S, num_heads, 2 * window], fp32, -inf outside of (query - window, query]."""
    num_tokens = queries.shape[1]
    blocked = queries.unflatten(1, (-1, window)).flatten(0, 1)
    scores = _times(blocked, pairs.transpose(1, 2)).float()
    query = torch.arange(num_tokens)[:, None]
    row = torch.arange(2 * window) - window + query // window * window
    seen = (row >= 0) & (row <= query) & (row > query - window)  # [S, 2 * window]
    return scores.view(*queries.shape[:3], -1).masked_fill(~seen[None, :, None], MINUS_INF)


def _compressed(
    attention: Any, hidden: Tensor, latent: Tensor, rotation: Rotation, attend_to: Rows
) -> Compressed | None:
    """The layer's compressed rows and who sees which; None if there are none."""
    compressor = attention.compressor
    if compressor is None or hidden.shape[1] < compressor.compress_rate:
        return None
    rows = _compress(compressor, hidden, rotation)
    complete = (
        torch.arange(1, hidden.shape[1] + 1, device=hidden.device) // compressor.compress_rate
    )
    future = torch.arange(rows.shape[1], device=hidden.device)[None] >= complete[:, None]
    future = future[None]  # [1, S, T]
    indexer = getattr(compressor, "indexer", None)
    if indexer is None:
        return Compressed(rows, future)
    scores = _indexer_scores(indexer, hidden.detach(), latent.detach(), rotation)
    scores = scores.masked_fill(future, HIDDEN_SCORE)
    if attend_to is Rows.ALL:
        return Compressed(rows, future, scores)
    chosen = scores.topk(min(indexer.index_topk, rows.shape[1]), dim=-1).indices
    passed_over = torch.ones_like(scores, dtype=torch.bool).scatter_(2, chosen, False)
    return Compressed(rows, future | passed_over)


def _compress(compressor: Any, hidden: Tensor, rotation: Rotation) -> Tensor:
    """Compressed rows [B, T, head_dim] of the complete blocks in hidden [B, S, hidden].

    A projection of twice head_dim has two series: the first goes to the next block's row.
    """
    ratio, head_dim = compressor.compress_rate, compressor.head_dim
    num_rows = hidden.shape[1] // ratio
    used = hidden[:, : num_rows * ratio]
    values = compressor.kv_proj(used).unflatten(1, (num_rows, ratio))
    gates = compressor.gate_proj(used).unflatten(1, (num_rows, ratio)) + compressor.position_bias
    if values.shape[-1] == 2 * head_dim:
        values, gates = _overlapped(values, 0.0), _overlapped(gates, MINUS_INF)
    shares = gates.softmax(2, dtype=torch.float32).to(values.dtype)
    rows = compressor.kv_norm((values * shares).sum(2))
    return rotation.every(ratio, num_rows).turn(rows.unsqueeze(2)).squeeze(2)


def _overlapped(x: Tensor, before_first: float) -> Tensor:
    """[B, T, ratio, 2 * head_dim] to [B, T, 2 * ratio, head_dim]: the block before, this one."""
    for_next, own = x.chunk(2, dim=-1)
    before = F.pad(for_next[:, :-1], (0, 0, 0, 0, 1, 0), value=before_first)
    return torch.cat([before, own], dim=2)


def _indexer_scores(indexer: Any, hidden: Tensor, latent: Tensor, rotation: Rotation) -> Tensor:
    """The indexer's scores [B, S, T], fp32, of every row for every query."""
    keys = _compress(indexer, hidden, rotation)
    queries = rotation.turn(indexer.q_b_proj(latent).unflatten(-1, (-1, indexer.head_dim)))
    by_head = F.relu(_times(queries, keys.transpose(1, 2)).float())  # [B, S, num_heads, T]
    scorer = indexer.scorer
    importance = scorer.weights_proj(hidden).float() * scorer.weights_scaling
    return (by_head * scorer.softmax_scale * importance.unsqueeze(-1)).sum(2)


def _indexer_loss(compressed: Compressed, mass: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean over queries of KL(mass || softmax of scores).

    mass: the attention's on compressed rows, [B, S, num_heads, T]; no gradient flows into it.
    """
    assert compressed.scores is not None, "the indexer's loss needs its scores"
    target = mass.detach().sum(2)
    target = target / target.sum(-1, keepdim=True).clamp_min(TINY)
    predicted = compressed.scores.log_softmax(-1)
    divergence = (torch.xlogy(target, target) - target * predicted).sum(-1)  # [B, S]
    counts = weights * ~compressed.hidden.all(-1)  # queries that see a row
    return (divergence * counts).sum() / counts.sum().clamp_min(TINY)


def _experts(mlp: Any, hidden: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """A mixture of experts' output [B, S, hidden] and, if its router learns, the experts' loads."""
    flat = hidden.flatten(0, 1)
    _, shares, experts = mlp.gate(hidden, token_ids) if mlp.is_hash else mlp.gate(hidden)
    routed = mlp.experts(flat, experts, shares).view_as(hidden)
    load = (
        None if mlp.is_hash else torch.bincount(experts.flatten(), minlength=mlp.gate.num_experts)
    )
    return routed + mlp.shared_experts(hidden), load
