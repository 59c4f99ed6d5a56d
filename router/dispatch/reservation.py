"""Reservation: a request's hold on one pair of nodes, from the grant to its return.

Every message says until when it counts, and its attempt's id is used once: what is given back
stays given back, whatever is still on its way to the nodes.

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
from dataclasses import replace

from sluice.protocol.messages import (
    GenerateRequest,
    NodeError,
    NodeLost,
    PageGrant,
    Preempted,
    PrefillResult,
    Refused,
    TokenChunk,
    TransferFailed,
)
from sluice.router.common.background import Background
from sluice.router.common.events import log_event
from sluice.router.dispatch.queue import Pair, Ticket

logger = logging.getLogger(__name__)

CALL_LIMIT_S = 5.0  # abort and release are short; a node that takes longer does not answer
CLEANUP_PATIENCE_S = 1.0  # the request itself waits so long for the return, then goes on


class Reservation:
    """See the module. `request.request_id` is unique to the attempt."""

    def __init__(self, pair: Pair, request: GenerateRequest, background: Background) -> None:
        self._background = background
        self._returning: asyncio.Task[None] | None = None
        self._prefill, self._decode = pair.prefill, pair.decode
        self._nodes = pair.nodes
        self._request = request
        position = len(request.emitted_token_ids) + (not self.local)  # the first is prefill's
        self._inbox = self._decode.open_inbox(request.request_id, self._park, position)
        self._asked = False
        self._grant: PageGrant | None = None
        self._prefill_until: float | None = None
        self._may_be_in_flight = False
        self.computing = False
        self.num_decoded_tokens = 0

    @property
    def local(self) -> bool:
        """Whether decode computes the prompt itself."""
        return self._prefill is None

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of a local prompt that decode need not compute."""
        assert self._grant is not None, "known once reserved"
        return self._grant.skip_tokens

    async def reserve(self) -> None:
        """Raises Refused or NodeLost, and NodeError if there is no answer within a lease."""
        decode, lease_s = self._decode, self._decode.lease_s
        with decode.blamed():
            try:
                async with asyncio.timeout(lease_s):
                    self._grant = await self._ask_for_grant()
            except TimeoutError as error:
                raise NodeError(
                    f"decode node {decode.node_id}: no grant within the lease of {lease_s:g} s"
                ) from error
        decode.expect(self._request.request_id)

    async def _ask_for_grant(self) -> PageGrant:
        decode = self._decode
        until = await decode.expires_at(decode.lease_s)
        # Before decode's lease can begin, so that prefill's is never the longer one.
        if self._prefill is not None:
            self._prefill_until = await self._prefill.expires_at(decode.lease_s)
        self._asked = True
        return await decode.call(decode.client.reserve(replace(self._request, expires_at=until)))

    async def prefill(self) -> PrefillResult:
        """Compute the prompt and move its pages. Raises TransferFailed or NodeLost."""
        assert self._grant is not None, "prefill before reserve"
        assert self._prefill is not None, "a local prompt is not prefilled elsewhere"
        self._may_be_in_flight = self.computing = True
        request = replace(self._request, expires_at=self._prefill_until)
        with self._prefill.blamed():
            try:
                result = await self._prefill.call(
                    self._prefill.client.run(request, self._grant), request.request_id
                )
            except TransferFailed as error:
                if self._decode.lost_because is not None:
                    raise NodeLost(f"decode node {self._decode.node_id} was lost") from error
                self._decode.fail(error)  # either end may be the broken one
                raise
        self._prefill.praise(self._request.request_id, ended=True)
        self._inbox.expect_reader()
        if result.finish_reason is None:  # all pages have landed; earlier ends leave them behind
            self._may_be_in_flight = False
            self._prefill.give_back(self._request.request_id)
        return result

    async def stream(self) -> AsyncIterator[TokenChunk]:
        """Decode's tokens. Raises NodeError."""
        self.computing = True
        num_tokens = len(self._request.token_ids)
        num_tokens += not self.local  # the first came from prefill
        with self._decode.blamed():
            async for chunk in self._decode.stream(self._inbox):
                self._decode.praise(self._request.request_id, ended=chunk.finish_reason is not None)
                num_tokens += len(chunk.token_ids)
                self.num_decoded_tokens += len(chunk.token_ids)
                self._decode.ledger.grow(self._request.request_id, num_tokens)
                yield chunk

    def give_back(self) -> asyncio.Task[None]:
        """End the request on both nodes, then return the credit; the second call does nothing."""
        if self._returning is None:
            self._returning = self._background.spawn(self._give_back())
        return self._returning

    @property
    def _lease_s(self) -> float:
        return self._decode.lease_s if self._grant is None else self._grant.lease_s

    def _park(self) -> None:
        """The client does not read: the nodes are for others until it does."""
        log_event(logger, "parked", request_id=self._request.request_id, node=self._decode.node_id)
        self.give_back()

    async def _give_back(self) -> None:
        request_id = self._request.request_id
        try:
            if self._asked:
                await self._end()
        finally:
            self._decode.close_inbox(request_id)
            for node in self._nodes:
                node.give_back(request_id)

    async def _end(self) -> None:
        """Release the grant; again and again while a write may land and prefill cannot be asked."""
        stopped = await self._stop_prefill()
        prefill = self._prefill
        if prefill is not None:
            prefill.give_back(self._request.request_id)
        await self._release(in_flight=not stopped)
        while not stopped and prefill is not None and not prefill.closed:
            await asyncio.sleep(self._lease_s / 2)
            stopped = await self._stop_prefill()
            await self._release(in_flight=not stopped)

    async def _stop_prefill(self) -> bool:
        """Whether nothing of the request is in flight, which the node may have to confirm."""
        if not self._may_be_in_flight:
            return True
        assert self._prefill is not None, "nothing is in flight from nowhere"
        try:
            async with asyncio.timeout(min(CALL_LIMIT_S, self._lease_s)):
                await self._prefill.client.abort(self._request.request_id)
        except (NodeError, TimeoutError) as error:
            self._log_failure("abort_failed", self._prefill.node_id, error)
            return False
        return True

    async def _release(self, *, in_flight: bool) -> None:
        request_id = self._request.request_id
        try:
            async with asyncio.timeout(CALL_LIMIT_S):
                await self._decode.client.release(request_id, in_flight=in_flight)
        except (NodeError, TimeoutError) as error:
            # If the node still holds it then, its status says so, and it is released again.
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
    background: Background,
) -> AsyncIterator[Reservation]:
    """Reserve on entry, give back on exit; what failed is noted for the next attempt.

    Only where there may be one is the return waited for: an answer is not held up by it.
    """
    reservation = Reservation(pair, request, background)
    try:
        await reservation.reserve()
        yield reservation
    except NodeError as error:
        if isinstance(error, Refused):
            pair.decode.pause_after_refusal()
        elif not isinstance(error, Preempted):
            ticket.avoid = {node.node_id for node in pair.nodes}
            _count_loss(ticket, reservation, error)
        await asyncio.wait({reservation.give_back()}, timeout=CLEANUP_PATIENCE_S)
        raise
    finally:
        reservation.give_back()


def _count_loss(ticket: Ticket, reservation: Reservation, error: NodeError) -> None:
    """Note whether the request may be what its nodes die of: those that computed for it did not."""
    if reservation.num_decoded_tokens:
        ticket.num_lost = 0
    if isinstance(error, NodeLost) and reservation.computing:
        ticket.num_lost += 1
