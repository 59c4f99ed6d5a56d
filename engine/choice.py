"""The next token of each request: its logits adjusted as the request asks, then sampled.

Everything is read from the request's own tokens and parameters, row by row, so the choice is the
same on prefill's first token and on decode, in a batch and alone, and after a fail-over. And so is
a failure: what goes wrong with one request's choice is that request's error, while the others of
the batch get the tokens they would get without it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sluice.engine.penalties import has_penalties, penalise
from sluice.engine.request import Request
from sluice.engine.sampler import sample
from sluice.protocol.messages import ChoiceFailed, InvalidRequest, Logprobs, SluiceError

log = logging.getLogger(__name__)

NO_TOKEN = -1

Biases = tuple[Tensor, Tensor]  # token ids, [n] int64, and what to add to their logits, [n] fp32


class NextToken(NamedTuple):
    """A request's next token, or the error that says why there is none."""

    token_id: int
    logprobs: Logprobs | None = None
    error: SluiceError | None = None


def choose(logits: Tensor, requests: Sequence[Request]) -> list[NextToken]:
    """Next token of each request. logits: [num_requests, vocab], fp32, left unchanged.

    All at once; one by one if that raises, to find out whose fault it is. Raises nothing itself.
    """
    try:
        return _choose(logits, requests)
    except Exception as error:
        if len(requests) > 1:
            return [choose(logits[row : row + 1], [r])[0] for row, r in enumerate(requests)]
        log.exception("event=choice_failed request_id=%s", requests[0].request_id)
        failure = ChoiceFailed(f"the next token could not be chosen: {error}")
        return [NextToken(NO_TOKEN, error=failure)]


def _choose(logits: Tensor, requests: Sequence[Request]) -> list[NextToken]:
    tokens = sample(
        _adjusted(logits, requests),
        [request.sampling for request in requests],
        [request.num_output_tokens for request in requests],
    )
    vocab = logits.shape[-1]
    found: list[int] = [NO_TOKEN if token is None else token for token in tokens]
    errors = [
        None if 0 <= token < vocab and r.matcher is None else _error(logits, row, r, token)
        for row, (r, token) in enumerate(zip(requests, found, strict=True))
    ]
    reports = _logprobs(logits, requests, found)
    return [NextToken(*choice) for choice in zip(found, reports, errors, strict=True)]


def _error(logits: Tensor, row: int, request: Request, token: int) -> SluiceError | None:
    """Why the request has no next token, if it has none. logits: as the model gave them."""
    if request.matcher is not None and request.matcher.error is not None:
        return request.matcher.failure()
    if 0 <= token < logits.shape[-1]:
        return None
    if math.isfinite(logits[row].max().item()):
        return InvalidRequest(
            "no token may come next: schema, stop_token_ids and min_tokens exclude every one; "
            "leave one of them out"
        )
    return ChoiceFailed("the model's logits for the next token are not finite")


def _adjusted(logits: Tensor, requests: Sequence[Request]) -> Tensor:
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
    if biased:
        _add(logits, biased, [_biases(requests[row], logits.device) for row in biased])
    if too_short:
        _add(logits, too_short, [_stops(requests[row], logits.device) for row in too_short])
    for row in constrained:
        allowed = _allowed(requests[row], logits.device)
        # What is no finite number stays, so that `sample` sees that the row is of no use.
        logits[row].masked_fill_(~allowed & logits[row].isfinite(), -torch.inf)
    return logits


def _may_not_stop(request: Request) -> bool:
    sampling = request.sampling
    return bool(sampling.stop_token_ids) and request.num_output_tokens < sampling.min_tokens


def _add(logits: Tensor, rows: Sequence[int], biases: Sequence[Biases]) -> None:
    """Add each row's biases to it, in place."""
    device = logits.device
    counts = torch.tensor([len(ids) for ids, _ in biases], device=device)
    where = torch.tensor(rows, device=device).repeat_interleave(counts)
    token_ids, values = (torch.cat(column) for column in zip(*biases, strict=True))
    logits.index_put_((where, token_ids), values.to(logits.dtype), accumulate=True)


def _biases(request: Request, device: torch.device) -> Biases:
    if request.biases is None:
        request.biases = _on(device, *zip(*request.sampling.logit_bias, strict=True))
    return request.biases


def _stops(request: Request, device: torch.device) -> Biases:
    """What bars the tokens that end the request."""
    if request.stops is None:
        stops = request.sampling.stop_token_ids
        request.stops = _on(device, stops, [-torch.inf] * len(stops))
    return request.stops


def _on(device: torch.device, token_ids: Sequence[int], values: Sequence[float]) -> Biases:
    return (
        torch.tensor(token_ids, device=device),
        torch.tensor(values, dtype=torch.float32, device=device),
    )


def _allowed(request: Request, device: torch.device) -> Tensor:
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
    logits: Tensor, requests: Sequence[Request], tokens: Sequence[int]
) -> list[Logprobs | None]:
    """Log-probabilities for the requests that ask and have a token, from the model's own logits."""
    reports: list[Logprobs | None] = [None] * len(requests)
    asking = {
        row: r.sampling.num_top_logprobs
        for row, r in enumerate(requests)
        if r.sampling.num_top_logprobs is not None and tokens[row] != NO_TOKEN
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


def score(logits: Tensor, tokens: Sequence[int], num_top: int) -> list[Logprobs]:
    """Log-probabilities of the tokens that did come next. logits: [num_tokens, vocab], fp32.

    Raises ChoiceFailed where the model's numbers are none.
    """
    values = logits.log_softmax(dim=-1)
    came = values.gather(1, torch.tensor(tokens, device=values.device)[:, None])  # [num_tokens, 1]
    if not came.isfinite().all():
        raise ChoiceFailed("the model's numbers for the prompt are not finite")
    ranks = ((values > came).sum(dim=-1) + 1).tolist()
    best, best_ids = values.topk(min(num_top, values.shape[-1]), dim=-1)
    likeliest = zip(best_ids.tolist(), best.tolist(), strict=True)
    tops = [tuple(zip(ids, found, strict=True)) for ids, found in likeliest]
    return [Logprobs(*each) for each in zip(came[:, 0].tolist(), tops, ranks, strict=True)]
