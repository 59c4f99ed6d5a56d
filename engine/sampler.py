"""Sampling: the next token of each request from its logits.

A request's draw depends on its seed and the output position alone, and how it is used on its own
parameters, so it gives the same tokens alone, in a batch, after preemption and after fail-over.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sluice.engine.draws import uniform
from sluice.kernels.sampling import draw_tokens
from sluice.protocol.limits import GREEDY_BELOW
from sluice.protocol.messages import SamplingParams


def sample(
    logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> list[int | None]:
    """Next token of each request; None where its largest logit is no finite number.

    logits: [num_requests, vocab], fp32. positions: the output position each draw is for.
    Equal logits go to the lowest token id. NaN counts as the largest, so none goes unseen.
    """
    tokens = _largest(logits)
    finite = logits.gather(1, tokens[:, None])[:, 0].isfinite().tolist()
    random = [row for row, p in enumerate(params) if p.temperature >= GREEDY_BELOW and finite[row]]
    # Ordering a vocabulary costs more than all else: only those who ask for it pay.
    vocab = logits.shape[-1]
    ordered = [row for row in random if 0 < params[row].top_k < vocab or params[row].top_p < 1]
    unordered = sorted(set(random).difference(ordered))
    for rows, draw in ((ordered, _draw_in_order), (unordered, _draw)):
        if rows:
            some = [params[row] for row in rows]
            seeds = [p.seed for p in some]
            draws = torch.from_numpy(uniform(seeds, [positions[row] for row in rows]))
            tokens[rows] = draw(logits[rows], some, draws.to(logits.device))
    return [token if ok else None for token, ok in zip(tokens.tolist(), finite, strict=True)]


def _largest(logits: Tensor) -> Tensor:
    """The lowest id of each row's largest logit, [num_requests] int64."""
    if logits.device.type == "cpu":  # numpy's takes a tenth of torch's time over a whole vocabulary
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def _draw_in_order(logits: Tensor, params: Sequence[SamplingParams], draws: Tensor) -> Tensor:
    """Draws over what temperature, min-p, top-k and top-p leave, [n]. draws: [n] float64."""
    vocab, device = logits.shape[-1], logits.device
    return draw_tokens(
        logits,
        draws,
        temperature=_numbers([p.temperature for p in params], logits),
        top_k=torch.tensor([min(p.top_k or vocab, vocab) for p in params], device=device),
        top_p=_numbers([p.top_p for p in params], logits),
        min_p=_numbers([p.min_p for p in params], logits),
    )


def _draw(logits: Tensor, params: Sequence[SamplingParams], draws: Tensor) -> Tensor:
    """Draws over what temperature and min-p leave, [n], in the order of token ids.

    In fp64, since at a tiny temperature the scaled logits of fp32 would overflow.
    """
    temperature = _numbers([p.temperature for p in params], logits)[:, None]
    weights = (logits - logits.amax(dim=-1, keepdim=True)).double().div_(temperature).exp_()
    if any(p.min_p for p in params):
        weights.masked_fill_(weights < _numbers([p.min_p for p in params], logits)[:, None], 0)
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    chosen = torch.searchsorted(cumulative, draws[:, None] * total, right=True)
    last = torch.searchsorted(cumulative, total)  # rounding must not lead beyond a weight above 0
    return torch.minimum(chosen, last)[:, 0]


def _numbers(values: Sequence[float], like: Tensor) -> Tensor:
    """[n] float64 on the device of `like`."""
    return torch.tensor(values, dtype=torch.float64, device=like.device)
