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
from sluice.kernels.sampling import draw_tokens


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
    """What each request's draw falls on, [num_requests]."""

    def column(values: Sequence[float], dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)

    return draw_tokens(
        logits,
        column([uniform(p.seed, at) for p, at in zip(params, positions, strict=True)]),
        temperature=column([p.temperature for p in params]),
        top_k=column([p.top_k or logits.shape[-1] for p in params], torch.int64),
        top_p=column([p.top_p for p in params]),
        min_p=column([p.min_p for p in params]),
    )


def uniform(seed: int, position: int) -> float:
    """The draw in [0, 1) for one output position."""
    generator = np.random.Philox(key=seed & (2**64 - 1), counter=position)
    return float(np.random.Generator(generator).random())
