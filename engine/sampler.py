"""Sampling: the next token of each request from its logits.

A request's draw depends on its seed and the output position alone, and how it is used on its own
parameters, so it gives the same tokens alone, in a batch, after preemption and after fail-over.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sluice.engine.draws import uniform
from sluice.engine.protocol import SamplingParams


def sample(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    """Next token of each request.

    logits: [num_requests, vocab], fp32. positions: the output position each draw is for.
    Equal logits go to the lowest token id.
    """
    tokens = logits.argmax(dim=-1)
    random = [row for row, p in enumerate(params) if p.temperature > 0]
    # Sorting a vocabulary costs more than all else: only those who ask for it pay.
    ranked = [row for row in random if params[row].top_k or params[row].top_p < 1]
    unranked = [row for row in random if not (params[row].top_k or params[row].top_p < 1)]
    for rows, draw in ((ranked, _draw_ranked), (unranked, _draw)):
        if rows:
            some = [params[row] for row in rows]
            seeds = [p.seed for p in some]
            draws = torch.from_numpy(uniform(seeds, [positions[row] for row in rows]))
            tokens[rows] = draw(logits[rows], some, draws.to(logits.device))
    return tokens.tolist()


def _draw(logits: Tensor, params: Sequence[SamplingParams], draws: Tensor) -> Tensor:
    """Draws over what temperature and min-p leave, [n]. draws: [n] float64."""
    return _inverse_cdf(_weights(logits, logits.amax(dim=-1, keepdim=True), params), draws)


def _draw_ranked(logits: Tensor, params: Sequence[SamplingParams], draws: Tensor) -> Tensor:
    """Draws over what temperature, min-p, top-k and top-p leave, [n]. draws: [n] float64."""
    vocab = logits.shape[-1]
    values, token_ids = logits.sort(dim=-1, descending=True, stable=True)
    weights = _weights(values, values[:, :1], params)
    rank = torch.arange(vocab, device=logits.device)
    weights.masked_fill_(rank >= _column([p.top_k or vocab for p in params], logits), 0)
    before = weights.cumsum(dim=-1) - weights
    enough = before >= _column([p.top_p for p in params], logits) * weights.sum(-1, keepdim=True)
    weights.masked_fill_(enough & (rank > 0), 0)  # the likeliest always stays
    return token_ids.gather(1, _inverse_cdf(weights, draws)[:, None])[:, 0]


def _weights(logits: Tensor, largest: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Each token's probability in terms of the likeliest one's, 0 below min-p: [n, vocab] fp64.

    In fp64, since at a tiny temperature the scaled logits of fp32 would overflow.
    """
    scaled = (logits - largest).double().div_(_column([p.temperature for p in params], logits))
    weights = scaled.exp_()
    if any(p.min_p for p in params):
        weights.masked_fill_(weights < _column([p.min_p for p in params], logits), 0)
    return weights


def _inverse_cdf(weights: Tensor, draws: Tensor) -> Tensor:
    """The index at which the weights' running sum passes each draw's share of the whole, [n]."""
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    chosen = torch.searchsorted(cumulative, draws[:, None] * total, right=True)
    last = torch.searchsorted(cumulative, total)  # rounding must not lead beyond a weight above 0
    return torch.minimum(chosen, last)[:, 0]


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    """[n, 1] float64 on the device of `like`."""
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]
