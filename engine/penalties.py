"""Penalties: logits lowered for tokens that a request has had already.

What came before is read from the request's own tokens, so it is the same on prefill, on decode and
after a fail-over; the counts are kept from step to step, so that a long prompt is read once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sluice.engine.request import Request
from sluice.protocol.messages import SamplingParams


class TokenCounts:
    """A request's tokens so far. Owned by the node's loop thread.

    in_prompt: [vocab] bool. in_output: [vocab] fp32, how often each token came.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.in_output = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        self._num_counted = 0

    def follow(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Count what has been added to `token_ids` since the last call."""
        if self._num_counted < num_prompt_tokens:
            self.in_prompt[self._indices(token_ids[:num_prompt_tokens])] = True
            self._num_counted = num_prompt_tokens
        new = self._indices(token_ids[self._num_counted :])
        self.in_output.index_add_(0, new, torch.ones_like(new, dtype=torch.float32))
        self._num_counted = len(token_ids)

    def _indices(self, token_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(token_ids, dtype=torch.int64, device=self.in_prompt.device)


def has_penalties(params: SamplingParams) -> bool:
    """Whether `penalise` would change the logits."""
    return bool(
        params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    )


def penalise(logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """The logits with each request's penalties, repetition first: [num_requests, vocab], fp32."""
    counts = [_counts(request, logits) for request in requests]
    in_output = torch.stack([c.in_output for c in counts])  # [num_requests, vocab]
    came = in_output > 0
    seen = came | torch.stack([c.in_prompt for c in counts])

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits.device)[:, None]

    params = [request.sampling for request in requests]
    factor = torch.where(seen, column([p.repetition_penalty for p in params]), 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    logits = logits - column([p.frequency_penalty for p in params]) * in_output
    return logits - column([p.presence_penalty for p in params]) * came


def _counts(request: Request, logits: torch.Tensor) -> TokenCounts:
    if request.counts is None:
        request.counts = TokenCounts(logits.shape[-1], logits.device)
    request.counts.follow(request.token_ids, request.num_prompt_tokens)
    return request.counts
