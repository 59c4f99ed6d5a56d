"""Sampling: the next token of each request from its logits.

The random draw for output position i is a function of (request seed, i) alone (Philox, a
counter-based generator: Salmon et al., SC'11), so a request gives the same tokens alone, in a
batch, after preemption and after fail-over.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sluice.engine.protocol import SamplingParams


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> list[int]:
    """Next token of each request.

    logits: [num_requests, vocab], fp32. positions: the output position each draw is for.
    Equal logits go to the lowest token id.
    """
    tokens = logits.argmax(dim=-1)
    random = [row for row, p in enumerate(params) if p.temperature > 0]
    if random:
        tokens[random] = _draw(
            logits[random], [params[row] for row in random], [positions[row] for row in random]
        )
    return tokens.tolist()


def _draw(
    logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> torch.Tensor:
    """Inverse-CDF draws over what temperature, min-p, top-k and top-p leave, [num_requests]."""

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    temperature = column([p.temperature for p in params])
    top_k = column([p.top_k or logits.shape[-1] for p in params])
    top_p = column([p.top_p for p in params])
    min_p = column([p.min_p for p in params])
    draws = column([uniform(p.seed, at) for p, at in zip(params, positions, strict=True)])

    # fp64: at a tiny temperature the scaled logits of fp32 would overflow.
    scaled, token_ids = logits.double().sort(dim=-1, descending=True, stable=True)
    scaled = (scaled - scaled[:, :1]) / temperature
    rank = torch.arange(logits.shape[-1], device=logits.device)
    dropped = (rank >= top_k) | (scaled < min_p.log())  # the likeliest token is at 0
    probs = scaled.masked_fill(dropped, -torch.inf).softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    probs = probs.masked_fill((before >= top_p) & (rank > 0), 0.0)  # the first always stays
    cumulative = probs.cumsum(dim=-1)
    chosen = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)
    last = (probs > 0).sum(dim=-1, keepdim=True) - 1  # rounding must not leave the kept tokens
    return token_ids.gather(1, torch.minimum(chosen, last))[:, 0]


def uniform(seed: int, position: int) -> float:
    """The draw in [0, 1) for one output position."""
    generator = np.random.Philox(key=seed & (2**64 - 1), counter=position)
    return float(np.random.Generator(generator).random())
