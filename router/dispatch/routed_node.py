"""The router's view of one node: is it alive, what was promised of it, what does it say.

Life of a view:
 1. made when the cluster names the node; usable at once
 2. every HEARTBEAT_S it asks for the node's status, which also tells the node that we live
 3. no answer for `lease_s`, or a dead connection: the node is lost, and everything that waits
    for it gets NodeLost at that moment
 4. an answer after that makes it usable again; what was in flight before stays lost
 5. closed when the cluster no longer names this incarnation

Calls, answers and chunks may be lost all the same. The node's status lists what it holds for us:
what we do not know of is ended there, what is missing in it fails here.

Everything here runs in the router's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Generic, TypeVar

from sluice.cache.spec import unit_tokens
from sluice.protocol.messages import (
    ChoiceFailed,
    DecodeClient,
    MetricFamily,
    NodeError,
    NodeInfo,
    NodeLost,
    NodeStatus,
    Preempted,
    PrefillClient,
    Refused,
    TokenChunk,
)
from sluice.router.common.background import Background
from sluice.router.common.events import log_event
from sluice.router.dispatch.breaker import Breaker
from sluice.router.dispatch.cached import CachedPrefixes
from sluice.router.dispatch.held import Held
from sluice.router.dispatch.inbox import Inbox
from sluice.router.dispatch.ledger import Ledger
from sluice.router.dispatch.prompt import Need, Prompt

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
REFUSED_PAUSE_S = 0.1  # a node that refused is not asked again before this
TIMER_GRAIN_S = 0.002  # event loops may call a timer so much too early
STRAY_LIMIT_S = 5.0  # for ending what the node holds and we do not know
UNREAD_LIMIT_S = 2.0  # a client behind by more gets no further tokens computed until it reads

Client = TypeVar("Client", bound=PrefillClient | DecodeClient)
T = TypeVar("T")


def _timers_time() -> float:
    """The event loop's time as its timers have it: what they end has ended when they call."""
    return asyncio.get_running_loop().time() + TIMER_GRAIN_S


class RoutedNode(Generic[Client]):
    """What prefill and decode nodes have in common.

    shared: other routers have requests there too. on_change: called when it comes or goes;
    on_credit: when it may have room that it had not.
    """

    def __init__(
        self,
        client: Client,
        *,
        router_id: str,
        lease_s: float,
        shared: bool,
        background: Background,
        on_change: Callable[[], None],
        on_credit: Callable[[], None],
    ) -> None:
        self._shared = shared
        self.client = client
        self.info: NodeInfo = client.info
        self.draining = False
        self.closed = False  # the cluster no longer names it
        self.status: NodeStatus | None = None
        self.metrics: tuple[MetricFamily, ...] = ()  # as they were asked for last
        self.lost_because: str | None = None
        self.last_picked = 0  # order of picks, for the policy
        self.ledger = Ledger(
            self.info,
            max_outstanding_tokens=self._max_outstanding_tokens(),
            on_return=on_credit,
        )
        self.cached = CachedPrefixes(self.info.fingerprint, unit_tokens(self.info.specs))
        self.breaker = Breaker()
        self._router_id = router_id
        self.lease_s = lease_s
        self.held = Held(lease_s / 4)
        self._node_clock: tuple[float, float] | None = None  # its clock, and ours when that came
        self._background = background
        self._on_change = on_change
        self._on_credit = on_credit
        self._refused_until = 0.0
        self._calls: set[asyncio.Timeout] = set()
        self._watcher = background.spawn(self._watch())
        self._watcher.add_done_callback(lambda _: self.lose("its watcher ended"))

    def _max_outstanding_tokens(self) -> int | None:
        return None

    def need(self, prompt: Prompt) -> Need:
        """Tokens that the request needs pages for on this node."""
        raise NotImplementedError

    @property
    def node_id(self) -> str:
        return self.info.node_id

    @property
    def ready(self) -> bool:
        """Whether new requests may go here."""
        return self.lost_because is None and not self.draining

    @property
    def max_tokens(self) -> int:
        """Longest request that fits, were it alone here; 0 if new ones may not go here."""
        return self.ledger.max_tokens if self.ready else 0

    def room_tokens(self, beside: int = 0) -> int:
        """Longest request that can start here now, beside one of so many tokens; 0 for none."""
        now = _timers_time()
        if not self.ready or now < self._refused_until or not self.breaker.allows(now):
            return 0
        return self.ledger.room_tokens(beside)

    @property
    def trusted(self) -> bool:
        """Whether requests that went here came to an end, or it is time to see if they do."""
        return self.breaker.allows(_timers_time())

    def take(self, prompt: Prompt) -> None:
        """Promise the request its pages; its prefix counts as cached from now on."""
        request_id, num_tokens = prompt.request.request_id, self.need(prompt).start_tokens
        work_tokens = max(1, num_tokens - self.cached.num_tokens(prompt))
        self.ledger.take(request_id, num_tokens, work_tokens)
        self.cached.expect(request_id, prompt)
        self.breaker.begin(request_id)

    def give_back(self, request_id: str) -> None:
        """The request has left the node. Twice is harmless."""
        self.held.end(request_id)
        self.cached.end(request_id)
        self.breaker.end(request_id)
        self.ledger.give_back(request_id)

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """The block is a part of an attempt on this node: if it fails, that counts against it.

        A refusal, a preemption, a request's own fault or a cancel say nothing of the node, and one
        that is lost is left alone for that.
        """
        try:
            yield
        except (Refused, Preempted, ChoiceFailed, NodeLost):
            raise
        except NodeError as error:
            self.fail(error)
            raise

    def praise(self, request_id: str, *, ended: bool) -> None:
        """The attempt has got tokens from this node. ended: and there is nothing left to do here,
        which is what counts; whoever reads them need not come back for more."""
        if ended:
            self.breaker.succeed(request_id)
        else:
            self.breaker.get_on(request_id)

    def fail(self, error: NodeError) -> None:
        """A request has failed because of this node."""
        loop = asyncio.get_running_loop()
        self.breaker.fail(loop.time())
        if self.breaker.is_open:
            log_event(
                logger, "circuit_open", node=self.node_id, reason=error, level=logging.WARNING
            )
            loop.call_later(self.breaker.cool_down_s, self._on_credit)

    def pause_after_refusal(self) -> None:
        """Leave the node alone for a moment, then look at the queue again."""
        loop = asyncio.get_running_loop()
        self._refused_until = loop.time() + REFUSED_PAUSE_S
        loop.call_later(REFUSED_PAUSE_S, self._on_credit)

    async def expires_at(self, limit_s: float) -> float | None:
        """So many seconds from now on the node's own clock, or a little less; None: not known.

        Raises NodeLost if the node has to be asked and does not answer.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        if self._node_clock is None:
            self._note(await self.call(self._ask()), started)
        if self._node_clock is None:
            return None
        told, heard_at = self._node_clock
        return told + (started - heard_at) + limit_s

    async def call(self, coroutine: Coroutine[Any, Any, T], attempt: str | None = None) -> T:
        """Await a call to the node. Raises NodeLost as soon as the node counts as lost.

        attempt: what the node lists while it is at work on this call; NodeError if it does not.
        """
        if self.lost_because is not None:
            coroutine.close()
            raise NodeLost(f"node {self.node_id}: {self.lost_because}")
        try:
            async with asyncio.timeout(None) as timeout:  # `lose` ends it: no task, no timer
                self._calls.add(timeout)
                if attempt is not None:
                    self._expect(attempt, lambda: timeout.reschedule(0.0))
                try:
                    return await coroutine
                finally:
                    self._calls.discard(timeout)
                    if attempt is not None:
                        self.held.end(attempt)
        except TimeoutError as error:
            if timeout.expired():
                raise self._why_ended(attempt) from error
            raise
        except NodeLost as error:
            self.lose(str(error))
            raise

    def _why_ended(self, attempt: str | None) -> NodeError:
        """Why a call to the node was ended from here."""
        if self.lost_because is not None or attempt is None:
            return NodeLost(f"node {self.node_id}: {self.lost_because or 'was lost'}")
        return NodeError(f"node {self.node_id}: it does not know of {attempt}: a message was lost")

    def _expect(self, attempt: str, on_missing: Callable[[], None]) -> None:
        self.held.expect(attempt, asyncio.get_running_loop().time(), on_missing)

    async def refresh(self, limit_s: float) -> None:
        """Ask for the node's gauges now; the last known ones stay if it takes too long."""
        try:
            asked_at = asyncio.get_running_loop().time()
            async with asyncio.timeout(limit_s):
                self._note(await self.call(self._ask(with_metrics=True)), asked_at)
        except (NodeError, TimeoutError) as error:
            log_event(logger, "no_status", node=self.node_id, reason=error, level=logging.DEBUG)

    def _ask(self, *, with_metrics: bool = False) -> Coroutine[Any, Any, NodeStatus]:
        return self.client.status(self._router_id, self.cached.version, with_metrics=with_metrics)

    def _note(self, status: NodeStatus, asked_at: float) -> None:
        now = asyncio.get_running_loop().time()
        self.status = status
        if status.clock_s is not None:
            self._node_clock = status.clock_s, now
        if status.requests is not None:
            self.held.compare(status.requests, asked_at=asked_at, now=now)
            for stray in status.requests:
                if not self.ledger.holds(stray):
                    self._background.spawn(self._end_stray(stray))
        self.metrics = status.metrics or self.metrics
        self.cached.take(status.cached)
        if self._shared:
            before, ledger = self.ledger.num_others, self.ledger
            ledger.num_others = max(0, status.running + status.waiting - ledger.running)
            if ledger.num_others < before:
                self._on_credit()

    async def _end_stray(self, request_id: str) -> None:
        """End what the node holds for us and we have given up; the next status tells if it did."""
        log_event(logger, "stray", request_id=request_id, node=self.node_id, level=logging.WARNING)
        try:
            async with asyncio.timeout(STRAY_LIMIT_S):
                await self._end_on_node(request_id)
        except (NodeError, TimeoutError) as error:
            log_event(
                logger,
                "stray_not_ended",
                request_id=request_id,
                node=self.node_id,
                reason=error,
                level=logging.WARNING,
            )

    def _end_on_node(self, request_id: str) -> Coroutine[Any, Any, None]:
        raise NotImplementedError

    def lose(self, reason: str, *, level: int = logging.WARNING) -> None:
        """Treat the node as gone: whoever waits for it gets NodeLost."""
        if self.lost_because is not None:
            return
        log_event(logger, "node_lost", node=self.node_id, reason=reason, level=level)
        self.lost_because = reason
        self.status = None
        for call in self._calls:
            call.reschedule(0.0)
        self._calls.clear()
        self._on_change()

    def close(self, reason: str) -> None:
        """End the view for good."""
        self.closed = True
        self._watcher.cancel()
        self.lose(reason, level=logging.INFO)

    def _recover(self) -> None:
        log_event(logger, "node_back", node=self.node_id)
        self.lost_because = None
        self._on_change()

    async def _watch(self) -> None:
        period_s = min(HEARTBEAT_S, self.lease_s / 4)
        pause_s = random.uniform(0, period_s)  # the first: not all nodes at one moment
        while True:
            asked_at = asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(self.lease_s):
                    self._note(await self._ask(), asked_at)
            except TimeoutError:
                self.lose(f"no answer for {self.lease_s:g} s")
            except NodeError as error:
                self.lose(str(error))
            else:
                if self.lost_because is not None:
                    self._recover()
            await asyncio.sleep(pause_s)
            pause_s = period_s


class RoutedPrefill(RoutedNode[PrefillClient]):
    """A prefill node: pages for the prompt, and about two chunks of work at a time.

    More would only wait inside the node, where order, deadlines and cancels are out of reach.
    """

    def _max_outstanding_tokens(self) -> int:
        return 2 * self.info.max_batch_tokens

    def need(self, prompt: Prompt) -> Need:
        return prompt.on_prefill

    def _end_on_node(self, request_id: str) -> Coroutine[Any, Any, None]:
        return self.client.abort(request_id)


class RoutedDecode(RoutedNode[DecodeClient]):
    """A decode node: pages for prompt and output, and one stream with everybody's tokens."""

    def __init__(self, client: DecodeClient, **common: Any) -> None:
        """common: as RoutedNode takes them."""
        self._inboxes: dict[str, Inbox] = {}
        self._streams = itertools.count(1)
        super().__init__(client, **common)
        self._receiver = self._background.spawn(self._receive())
        self._receiver.add_done_callback(self._receiver_ended)

    def need(self, prompt: Prompt) -> Need:
        return prompt.on_decode

    def _end_on_node(self, request_id: str) -> Coroutine[Any, Any, None]:
        # Whether prefill still writes we cannot know any more: the pages wait for leases.
        return self.client.release(request_id, in_flight=True)

    def open_inbox(
        self, request_id: str, on_unread: Callable[[], None], position: int = 0
    ) -> Inbox:
        """Keep this request's chunks from now on, before the node can send the first.

        position: of the first token that is to come. on_unread: called when they have not been read
        for UNREAD_LIMIT_S; what is in the inbox then ends with Preempted, and nothing more comes.
        """
        inbox = self._inboxes[request_id] = Inbox(on_unread, position)
        return inbox

    def expect(self, request_id: str) -> None:
        """The node has granted the request: its inbox gets a NodeError if it forgets it."""
        lost = NodeError(
            f"decode node {self.node_id}: it does not know of {request_id}: a message was lost"
        )
        inbox = self._inboxes[request_id]
        self._expect(request_id, lambda: inbox.put(lost))

    def close_inbox(self, request_id: str) -> None:
        self._inboxes.pop(request_id, None)

    async def stream(self, inbox: Inbox) -> AsyncIterator[TokenChunk]:
        """A request's chunks up to the one with a finish reason.

        Raises NodeError, or InvalidRequest if the node finds the request itself at fault.
        """
        while True:
            chunk = await inbox.get()
            if chunk.cause is not None:
                raise chunk.cause
            if chunk.preempted:
                raise Preempted(f"decode node {self.node_id}: {chunk.error}")
            if chunk.error is not None:
                raise NodeError(f"decode node {self.node_id}: {chunk.error}")
            yield chunk
            if chunk.finish_reason is not None:
                return

    def lose(self, reason: str, *, level: int = logging.WARNING) -> None:
        if self.lost_because is None:
            # Behind the chunks that did arrive: those tokens are good and save work on a retry.
            for inbox in self._inboxes.values():
                inbox.put(NodeLost(f"node {self.node_id}: {reason}"))
            self._receiver.cancel()
        super().lose(reason, level=level)

    def _recover(self) -> None:
        self._receiver = self._background.spawn(self._receive())
        self._receiver.add_done_callback(self._receiver_ended)
        super()._recover()

    async def _receive(self) -> None:
        try:
            async for step in self.client.tokens(self._router_id, next(self._streams)):
                for chunk in step:
                    if (inbox := self._inboxes.get(chunk.request_id)) is not None:
                        inbox.put(chunk)
                        if chunk.finish_reason is None and inbox.is_unread(UNREAD_LIMIT_S):
                            self._stop_unread(chunk.request_id, inbox)
        except NodeError as error:
            self.lose(str(error))

    def _stop_unread(self, request_id: str, inbox: Inbox) -> None:
        why = f"its client has not read for {UNREAD_LIMIT_S:g} s"
        inbox.put(TokenChunk(request_id, (), error=why, preempted=True))
        self.close_inbox(request_id)
        inbox.on_unread()

    def _receiver_ended(self, receiver: asyncio.Task[Any]) -> None:
        if receiver is self._receiver:  # not one that a recovery has replaced
            self.lose("its token stream ended")
