"""Reservation: a request's hold on one pair of nodes, from the grant to its return.

Life:
 1. the queue has taken credit on both nodes, under the request's id
 2. reserve: decode promises pages in every pool, or refuses
 3. prefill: prompt computed, pages written; from here to its answer a write may be in flight.
    Without a prefill node decode computes the prompt at the beginning of its stream
 4. stream: decode's tokens
 5. give back, always, once, whatever happened: stop prefill unless it has handed over, release
    the grant, return the credit. While prefill is alive but does not answer, it may still write
    whenever it does: the grant's pages are kept from reuse until it has, or has left the cluster
A client that does not read brings step 5 early; when it reads again, the request goes on from what
it has, as after a preemption.
Step 5 runs as a task of its own, so that a cancelled request cannot interrupt it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from sluice.engine.protocol import (
    GenerateRequest,
    NodeError,
    PageGrant,
    Preempted,
    PrefillResult,
    Refused,
    SluiceError,
    TokenChunk,
    TransferFailed,
)
from sluice.router.background import Background
from sluice.router.events import log_event
from sluice.router.queue import Pair, Ticket

logger = logging.getLogger(__name__)

CALL_LIMIT_S = 5.0  # abort and release are short; a node that takes longer does not answer
CLEANUP_PATIENCE_S = 1.0  # the request itself waits so long for the return, then goes on


class Reservation:
    """See the module. `request.request_id` is unique to the attempt."""

    def __init__(
        self, pair: Pair, request: GenerateRequest, router_id: str, background: Background
    ) -> None:
        self._background = background
        self._returning: asyncio.Task[None] | None = None
        self._prefill, self._decode = pair.prefill, pair.decode
        self._nodes = pair.nodes
        self._request = request
        self._router_id = router_id
        self._inbox = self._decode.open_inbox(request.request_id, self._park)
        self._granting: asyncio.Task[PageGrant] | None = None
        self._may_be_in_flight = False

    @property
    def local(self) -> bool:
        """Whether decode computes the prompt itself."""
        return self._prefill is None

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of a local prompt that decode need not compute."""
        assert self._granting is not None, "known once reserved"
        return self._granting.result().skip_tokens

    async def reserve(self) -> None:
        """Raises Refused or NodeLost."""
        # A task of its own: if we are cancelled meanwhile, the grant still has to be given back.
        self._granting = asyncio.create_task(
            self._decode.call(self._decode.client.reserve(self._request, self._router_id))
        )
        with self._decode.judged():
            await asyncio.shield(self._granting)

    async def prefill(self) -> PrefillResult:
        """Compute the prompt and move its pages. Raises TransferFailed or NodeLost."""
        assert self._granting is not None, "prefill before reserve"
        assert self._prefill is not None, "a local prompt is not prefilled elsewhere"
        self._may_be_in_flight = True
        with self._prefill.judged():
            try:
                result = await self._prefill.call(
                    self._prefill.client.run(self._request, self._granting.result())
                )
            except TransferFailed as error:
                self._decode.fail(error)  # either end may be the broken one
                raise
        if result.finish_reason is None:  # all pages have landed; earlier ends leave them behind
            self._may_be_in_flight = False
            self._prefill.give_back(self._request.request_id)
        return result

    async def stream(self) -> AsyncIterator[TokenChunk]:
        """Decode's tokens. Raises NodeError."""
        num_tokens = len(self._request.token_ids)
        num_tokens += not self.local  # the first came from prefill
        with self._decode.judged():
            async for chunk in self._decode.stream(self._inbox):
                num_tokens += len(chunk.token_ids)
                self._decode.ledger.grow(self._request.request_id, num_tokens)
                yield chunk

    def give_back(self) -> asyncio.Task[None]:
        """End the request on both nodes, then return the credit; the second call does nothing."""
        if self._returning is None:
            self._returning = self._background.spawn(self._give_back())
        return self._returning

    def _park(self) -> None:
        """The client does not read: the nodes are for others until it does."""
        log_event(logger, "parked", request_id=self._request.request_id, node=self._decode.node_id)
        self.give_back()

    async def _give_back(self) -> None:
        request_id = self._request.request_id
        try:
            grant = await self._grant_if_any()
            if grant is not None:
                await self._end(grant)
        finally:
            self._decode.close_inbox(request_id)
            for node in self._nodes:
                node.give_back(request_id)

    async def _end(self, grant: PageGrant) -> None:
        """Release the grant; again and again while a write may land and prefill cannot be asked."""
        stopped = await self._stop_prefill(grant)
        prefill = self._prefill
        if prefill is not None:
            prefill.give_back(self._request.request_id)
        await self._release(grant, in_flight=not stopped)
        while not stopped and prefill is not None and not prefill.closed:
            await asyncio.sleep(grant.lease_s / 2)
            stopped = await self._stop_prefill(grant)
            await self._release(grant, in_flight=not stopped)

    async def _grant_if_any(self) -> PageGrant | None:
        if self._granting is None:
            return None
        with contextlib.suppress(SluiceError):  # the caller of reserve has seen it
            return await self._granting
        return None

    async def _stop_prefill(self, grant: PageGrant) -> bool:
        """Whether nothing of the request is in flight, which the node may have to confirm."""
        if not self._may_be_in_flight:
            return True
        assert self._prefill is not None, "nothing is in flight from nowhere"
        try:
            async with asyncio.timeout(min(CALL_LIMIT_S, grant.lease_s)):
                await self._prefill.client.abort(self._request.request_id)
        except (NodeError, TimeoutError) as error:
            self._log_failure("abort_failed", self._prefill.node_id, error)
            return False
        return True

    async def _release(self, grant: PageGrant, *, in_flight: bool) -> None:
        try:
            async with asyncio.timeout(CALL_LIMIT_S):
                await self._decode.client.release(grant.grant_id, in_flight=in_flight)
        except (NodeError, TimeoutError) as error:
            # The node frees the grant itself when its lease runs out or this router goes silent.
            self._log_failure("release_failed", self._decode.node_id, error)

    def _log_failure(self, event: str, node_id: str, error: Exception) -> None:
        log_event(
            logger,
            event,
            request_id=self._request.request_id,
            node=node_id,
            reason=str(error) or "no answer in time",
            level=logging.WARNING,
        )


@contextlib.asynccontextmanager
async def hold(
    pair: Pair,
    request: GenerateRequest,
    ticket: Ticket,
    *,
    router_id: str,
    background: Background,
) -> AsyncIterator[Reservation]:
    """Reserve on entry, give back on exit; what failed is noted for the next attempt.

    Only where there may be one is the return waited for: an answer is not held up by it.
    """
    reservation = Reservation(pair, request, router_id, background)
    try:
        await reservation.reserve()
        yield reservation
    except NodeError as error:
        if isinstance(error, Refused):
            pair.decode.pause_after_refusal()
        elif not isinstance(error, Preempted):
            ticket.avoid = {node.node_id for node in pair.nodes}
        await asyncio.wait({reservation.give_back()}, timeout=CLEANUP_PATIENCE_S)
        raise
    finally:
        reservation.give_back()
