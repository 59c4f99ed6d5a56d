"""The next token of each request: its logits adjusted as the request asks, then sampled.

Everything is read from the request's own tokens and parameters, row by row, so the choice is the
same on prefill's first token and on decode, in a batch and alone, and after a fail-over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sluice.engine.penalties import has_penalties, penalise
from sluice.engine.protocol import Logprobs
from sluice.engine.request import Request
from sluice.engine.sampler import sample


class Choice(NamedTuple):
    """A request's next token. `error`: its grammar failed, and the token is of no use."""

    token_id: int
    logprobs: Logprobs | None = None
    error: str | None = None


def choose(logits: torch.Tensor, requests: Sequence[Request]) -> list[Choice]:
    """Next token of each request. logits: [num_requests, vocab], fp32, left unchanged."""
    tokens = sample(
        _adjusted(logits, requests),
        [request.sampling for request in requests],
        [request.num_output_tokens for request in requests],
    )
    reports = _logprobs(logits, requests, tokens)
    errors = [r.matcher.error if r.matcher is not None else None for r in requests]
    return [Choice(*choice) for choice in zip(tokens, reports, errors, strict=True)]


def _adjusted(logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """Penalties, then biases, then masks; the input itself where nothing applies."""
    penalised = [row for row, r in enumerate(requests) if has_penalties(r.sampling)]
    biased = [row for row, r in enumerate(requests) if r.sampling.logit_bias]
    too_short = [row for row, r in enumerate(requests) if _may_not_stop(r)]
    constrained = [row for row, r in enumerate(requests) if r.matcher is not None]
    if not (penalised or biased or too_short or constrained):
        return logits
    logits = logits.clone()
    if penalised:
        logits[penalised] = penalise(logits[penalised], [requests[row] for row in penalised])
    _add(logits, [(row, *bias) for row in biased for bias in requests[row].sampling.logit_bias])
    _add(
        logits,
        [
            (row, token_id, -torch.inf)
            for row in too_short
            for token_id in requests[row].sampling.stop_token_ids
        ],
    )
    for row in constrained:
        logits[row].masked_fill_(~_allowed(requests[row], logits.device), -torch.inf)
    return logits


def _may_not_stop(request: Request) -> bool:
    return request.num_output_tokens < request.sampling.min_tokens


def _add(logits: torch.Tensor, changes: Sequence[tuple[int, int, float]]) -> None:
    """Add to single logits in place. changes: (row, token id, value)."""
    if changes:
        rows, token_ids, values = (
            torch.tensor(column, device=logits.device) for column in zip(*changes, strict=True)
        )
        logits.index_put_((rows, token_ids), values.to(logits.dtype), accumulate=True)


def _allowed(request: Request, device: torch.device) -> torch.Tensor:
    """Tokens that the request's grammar lets through, [vocab] bool.

    Where the JSON text is complete every token that ends the request may come, not only the one
    that the tokenizer calls its end.
    """
    assert request.matcher is not None, "only requests with a grammar are masked"
    request.matcher.follow(request.token_ids[request.num_prompt_tokens :])
    allowed = request.matcher.allowed()
    if request.matcher.complete:
        allowed[list(request.sampling.stop_token_ids)] = True
    return torch.from_numpy(allowed).to(device)


def _logprobs(
    logits: torch.Tensor, requests: Sequence[Request], tokens: Sequence[int]
) -> list[Logprobs | None]:
    """Log-probabilities for the requests that ask, from the model's own logits."""
    reports: list[Logprobs | None] = [None] * len(requests)
    asking = {
        row: r.sampling.num_top_logprobs
        for row, r in enumerate(requests)
        if r.sampling.num_top_logprobs is not None
    }
    if not asking:
        return reports
    rows = list(asking)
    values = logits[rows].log_softmax(dim=-1)  # [num_asking, vocab]
    drawn = torch.tensor([tokens[row] for row in rows], device=values.device)
    chosen = values.gather(1, drawn[:, None])[:, 0].tolist()
    best, best_ids = values.topk(min(max(asking.values()), values.shape[-1]), dim=-1)
    for index, (row, num_top) in enumerate(asking.items()):
        top = zip(best_ids[index].tolist(), best[index].tolist(), strict=True)
        reports[row] = Logprobs(chosen[index], tuple(top)[:num_top])
    return reports
