"""Dispatch: one request's way through the nodes.

`_attempt` is the whole story of a request; `generate` tells it again, from where the client's
answer stands, when a node fails.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace

from sluice.protocol.messages import (
    FinishReason,
    GenerateRequest,
    Logprobs,
    NodeError,
    NodeLost,
    Preempted,
    PrefillResult,
    Refused,
    TransferFailed,
)
from sluice.router.common.background import Background
from sluice.router.common.events import log_event
from sluice.router.dispatch.queue import Pair, Ticket, WaitingQueue
from sluice.router.dispatch.reservation import Reservation, hold

logger = logging.getLogger(__name__)

MAX_FAILURES = 3  # attempts in a row that may fail before the request does
MAX_LOST = 2  # nodes in a row that may be lost under a request: it may be what they die of


@dataclass(frozen=True)
class Tokens:
    """Output tokens in order. `num_cached_tokens`: prompt tokens prefill did not compute.

    logprobs: one for each token if the request asks for them, else none. nodes: ids of the prefill
    and the decode node of this attempt. prompt_logprobs: with the first token, if asked for.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    logprobs: tuple[Logprobs, ...] = ()
    nodes: tuple[str, str] = ("-", "-")
    prompt_logprobs: tuple[Logprobs, ...] = ()


class Dispatcher:
    """Runs requests on pairs from the queue. `on_retry` is told the reason of each retry."""

    def __init__(
        self,
        queue: WaitingQueue,
        *,
        router_id: str,
        background: Background,
        on_retry: Callable[[str], None],
        local_below_tokens: int = 0,
    ) -> None:
        """local_below_tokens: shorter prompts are computed by the decode node itself."""
        self._queue = queue
        self._local_below_tokens = local_below_tokens
        self._router_id = router_id
        self._background = background
        self._on_retry = on_retry

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Tokens, None]:
        """Every output token once, in order, whichever nodes fail on the way.

        Close the iterator to end the request early. Raises QueueFull, Unavailable, or the last
        NodeError after MAX_FAILURES failed attempts or MAX_LOST lost nodes; an attempt that brought
        the answer on begins the count anew.
        """
        ticket = self._queue.ticket(request.priority)
        emitted = list(request.emitted_token_ids)
        num_failures = 0
        for number in itertools.count(1):
            num_emitted = len(emitted)
            attempt = replace(
                request,
                request_id=f"{request.request_id}.{number}",
                router_id=self._router_id,
                emitted_token_ids=tuple(emitted),
            )
            short = len(attempt.token_ids) < self._local_below_tokens
            attempt = replace(attempt, local=short and not attempt.wants_scores)
            try:
                async with contextlib.aclosing(self._attempt(attempt, ticket)) as stream:
                    async for tokens in stream:
                        emitted.extend(tokens.token_ids)
                        yield tokens
                        if tokens.finish_reason is not None:
                            return
            except (Refused, Preempted) as error:  # nothing failed: back to its place in the queue
                self._retry(attempt, error)
            except NodeError as error:
                num_failures = 1 if len(emitted) > num_emitted + 1 else num_failures + 1
                if ticket.num_lost >= MAX_LOST:
                    raise NodeError(_suspicious(ticket, error)) from error
                if num_failures == MAX_FAILURES:
                    raise
                self._retry(attempt, error)
            ticket.returning = True

    async def _attempt(
        self, request: GenerateRequest, ticket: Ticket
    ) -> AsyncGenerator[Tokens, None]:
        pair = await self._queue.pair_for(request, ticket)  # with credit on both nodes
        request = replace(request, local=pair.prefill is None)
        self._log_dispatched(request, pair)
        async with self._hold(pair, request, ticket) as reservation:  # pages in every pool
            num_cached_tokens = 0
            if reservation.local:
                num_cached_tokens = _cached(request, reservation.num_cached_tokens)
            else:
                first = await reservation.prefill()  # pages are written as chunks finish
                yield _first_tokens(request, first, pair)
                if first.finish_reason is not None:
                    return
            async for chunk in reservation.stream():
                yield Tokens(
                    chunk.token_ids,
                    chunk.finish_reason,
                    num_cached_tokens,
                    chunk.logprobs,
                    pair.names,
                )

    def _hold(
        self, pair: Pair, request: GenerateRequest, ticket: Ticket
    ) -> contextlib.AbstractAsyncContextManager[Reservation]:
        return hold(pair, request, ticket, self._background)

    def _log_dispatched(self, request: GenerateRequest, pair: Pair) -> None:
        prefill, decode = pair.names
        log_event(
            logger,
            "dispatched",
            request_id=request.request_id,
            prefill=prefill,
            decode=decode,
            tokens=len(request.token_ids),
        )

    def _retry(self, request: GenerateRequest, error: NodeError) -> None:
        reason = _reason(error)
        self._on_retry(reason)
        log_event(
            logger,
            "retry",
            request_id=request.request_id,
            reason=reason,
            detail=error,
            # With several routers refusals are how a full node says so.
            level=logging.INFO if isinstance(error, Refused) else logging.WARNING,
        )


def _first_tokens(request: GenerateRequest, first: PrefillResult, pair: Pair) -> Tokens:
    logprobs = () if first.logprobs is None else (first.logprobs,)
    num_cached_tokens = _cached(request, first.num_cached_tokens)
    return Tokens(
        (first.token_id,),
        first.finish_reason,
        num_cached_tokens,
        logprobs,
        pair.names,
        first.prompt_logprobs,
    )


def _cached(request: GenerateRequest, num_tokens: int) -> int:
    """Cached prompt tokens: after a fail-over the hit may cover output, which is never told."""
    return 0 if request.emitted_token_ids else num_tokens


def _suspicious(ticket: Ticket, error: NodeError) -> str:
    return (
        f"{ticket.num_lost} nodes were lost while they computed this request, one after the other; "
        f"it is not tried on another one ({error})"
    )


def _reason(error: NodeError) -> str:
    """The label of sluice:retries_total."""
    if isinstance(error, Refused):
        return "refused"
    if isinstance(error, Preempted):
        return "preempted"
    if isinstance(error, TransferFailed):
        return "transfer_failed"
    return "node_lost" if isinstance(error, NodeLost) else "node_error"
