"""The queue: the one place where requests wait, by priority, then first come first served.

    enter ──► waiting ──pair with credit──► dispatched
                 │  └──no node could ever take it──► Unavailable
                 └──client gone, deadline──► forgotten

A request leaves only with credit on both nodes of a pair, so nothing waits inside a node and a
cancel here costs nothing. A request that comes back after a failure keeps its place.

Whoever cannot start claims a node, on which nobody overtakes it; those behind may have the others
(see policy.py). A lower priority can be overtaken for as long as more urgent requests fill the
nodes: at most until its deadline, as whoever sets priorities decides how long that may be.

A look at those who wait follows every change of credit or nodes: one look for all changes of a
turn of the event loop, and none before the loop has had its time for other things.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import logging
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sluice.protocol.messages import GenerateRequest, QueueFull, SluiceError, Unavailable
from sluice.router.common.events import log_event
from sluice.router.dispatch.nodes import MaxTokens, Nodes
from sluice.router.dispatch.policy import Policy, Turn
from sluice.router.dispatch.prompt import Prompt
from sluice.router.dispatch.routed_node import RoutedDecode, RoutedNode, RoutedPrefill

logger = logging.getLogger(__name__)

LONG_PROMPT_TOKENS = 50_000  # their keys take milliseconds: the loop does other things meanwhile

# A look that takes this long goes on later where it can, and after one of more than LONG_LOOK_S the
# rest of the router has its turn: looks take a third of its time, however many nodes and requests
# there are. Shorter looks come with a change each, which costs more than they do.
MAX_LOOK_S, LONG_LOOK_S, MAX_REST_S = 0.005, 0.001, 0.02
LOOKS_SHARE = 1 / 3


class Pair(NamedTuple):
    """Nodes for one request; no prefill node where decode computes the prompt itself."""

    prefill: RoutedPrefill | None
    decode: RoutedDecode

    @property
    def names(self) -> tuple[str, str]:
        """Ids of both nodes, "-" for none."""
        return "-" if self.prefill is None else self.prefill.node_id, self.decode.node_id

    @property
    def nodes(self) -> tuple[RoutedNode[Any], ...]:
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)


@dataclass
class Ticket:
    """A request's place among those that wait, kept over its attempts: (priority, arrival).

    returning: an attempt has failed, so it may wait for a node to come back.
    avoid: ids of the nodes on which the last attempt failed. num_lost: nodes that were lost while
    they computed it, one after the other.
    """

    place: tuple[int, int]
    returning: bool = False
    avoid: set[str] = field(default_factory=set)
    num_lost: int = 0


@dataclass(eq=False)
class _Waiter:
    """stranded: no ready node could ever take it. patience: while it runs, that is put up with."""

    prompt: Prompt
    ticket: Ticket
    pair: asyncio.Future[Pair]
    stranded: bool = False
    patience: asyncio.TimerHandle | None = None


class WaitingQueue:
    """Matches waiting requests with pairs. `wake` it after every change of credit or nodes.

    max_waiting: newcomers beyond this are refused. patience_s: how long a request whose attempt
    failed waits while there is no node; a lost one is mostly back with its next heartbeat.
    """

    def __init__(
        self, nodes: Nodes, policy: Policy, *, max_waiting: int, patience_s: float
    ) -> None:
        self._nodes = nodes
        self._policy = policy
        self._max_waiting = max_waiting
        self._patience_s = patience_s
        self._waiting: list[_Waiter] = []  # by place
        self._newcomers: dict[_Waiter, None] = {}  # of them, those not looked at yet, by arrival
        self._stranded: list[_Waiter] = []
        self._max_tokens: MaxTokens | None = None  # of the nodes, at the last look
        self._next_look: asyncio.Handle | None = None
        self._rested_at = 0.0  # time.monotonic() before which there is no look
        self._arrivals = itertools.count()
        self._closed: SluiceError | None = None

    def __len__(self) -> int:
        """Requests that could not start when they came."""
        return len(self._waiting) - len(self._newcomers)

    @property
    def settled(self) -> bool:
        """Whether nothing has changed since the last look at those who wait."""
        return self._next_look is None

    def ticket(self, priority: int = 0) -> Ticket:
        return Ticket((priority, next(self._arrivals)))

    async def pair_for(self, request: GenerateRequest, ticket: Ticket) -> Pair:
        """Wait for a pair that can start the request; the credit on both nodes is then taken.

        Raises QueueFull, or Unavailable if no ready node could take the request at all.
        """
        prompt = Prompt(request)
        if prompt.num_tokens > LONG_PROMPT_TOKENS:
            await asyncio.to_thread(prompt.make_keys, self._nodes.key_units)
        waiter = self._enter(prompt, ticket)
        try:
            return await waiter.pair
        except asyncio.CancelledError:
            self._return_credit(waiter)
            self.wake()  # those behind may have what it waited for
            raise
        finally:
            self._leave(waiter)

    def wake(self) -> None:
        """Have a look at those who wait, soon: start all that can start, in order, and turn away
        those nobody can take."""
        if self._waiting and self._next_look is None:
            rest_s = max(0.0, self._rested_at - time.monotonic())
            self._next_look = asyncio.get_running_loop().call_later(rest_s, self._look)

    def _look(self) -> None:
        began_s = time.thread_time()
        self._next_look = None
        self._sort_out_stranded()
        complete = self._start_those_who_can(began_s + MAX_LOOK_S)
        if complete:
            self._take_in_newcomers()
        taken_s = time.thread_time() - began_s
        if taken_s > LONG_LOOK_S:
            rest_s = min(MAX_REST_S, taken_s * (1 / LOOKS_SHARE - 1))
            self._rested_at = time.monotonic() + rest_s
        if not complete:
            self.wake()

    def _sort_out_stranded(self) -> None:
        """Find those whom no ready node could ever hold; they wait for one to return, or leave."""
        changed = self._nodes.max_tokens is not self._max_tokens
        self._max_tokens = self._nodes.max_tokens
        unsure = self._waiting if changed else [*self._stranded, *self._newcomers]
        self._stranded = []
        for waiter in list(unsure):
            waiter.stranded = not self._has_nodes(waiter, self._max_tokens)
            if not waiter.stranded:
                continue
            if waiter.patience is None:
                self._reject(waiter, Unavailable(self._why_stranded()))
            else:
                self._stranded.append(waiter)

    @staticmethod
    def _has_nodes(waiter: _Waiter, max_tokens: MaxTokens) -> bool:
        """Whether ready nodes could hold the request, were it alone; decides who computes it."""
        prompt = waiter.prompt
        outgrown = prompt.num_tokens > max_tokens.prefill
        # It was admitted by its prompt; the output that it has by now is computed where it fits.
        prompt.local = prompt.request.local or (
            waiter.ticket.returning
            and outgrown
            and max_tokens.prefill > 0
            and not prompt.request.wants_scores
        )
        if outgrown and not prompt.local:
            return False
        return prompt.on_decode.max_tokens <= max_tokens.decode

    def _start_those_who_can(self, until_s: float) -> bool:
        """Whether all were looked at; those who started by then need not be looked at again."""
        waiting = [waiter for waiter in self._waiting if not waiter.stranded]
        any_local = any(waiter.prompt.local for waiter in waiting)
        if not any_local and not any(node.room_tokens() for node in self._nodes.prefill):
            return True
        turn = Turn(self._policy, self._nodes.prefill, self._nodes.decode)
        for waiter in waiting:
            if turn.over or (turn.only_local and not any_local):
                break
            if waiter.pair.done() or (turn.only_local and not waiter.prompt.local):
                continue  # one that is done was cancelled just now: its own task takes it out
            if picked := turn.pick(waiter.prompt, waiter.ticket.avoid):
                self._start(waiter, Pair(*picked))
                if time.thread_time() >= until_s:
                    return False
        return True

    def _take_in_newcomers(self) -> None:
        """Those who did not start at once wait; beyond the limit the last to come are refused."""
        newcomers = list(self._newcomers)
        self._newcomers.clear()
        for waiter in reversed(newcomers):
            if len(self) > self._max_waiting and not waiter.ticket.returning:
                self._reject(waiter, QueueFull(self._why_full()))
        for waiter in newcomers:
            if not waiter.pair.done():
                request_id = waiter.prompt.request.request_id
                log_event(logger, "queued", request_id=request_id, waiting=len(self))

    def close(self, reason: SluiceError) -> None:
        """Turn away all that wait, and everybody who comes later."""
        self._closed = reason
        for waiter in list(self._waiting):
            self._reject(waiter, reason)

    def _start(self, waiter: _Waiter, pair: Pair) -> None:
        self._leave(waiter)
        for node in pair.nodes:
            node.take(waiter.prompt)
        waiter.pair.set_result(pair)

    def _enter(self, prompt: Prompt, ticket: Ticket) -> _Waiter:
        if self._closed is not None:
            raise self._closed
        loop = asyncio.get_running_loop()
        waiter = _Waiter(prompt, ticket, loop.create_future())
        if ticket.returning:
            waiter.patience = loop.call_later(self._patience_s, self._lose_patience, waiter)
        bisect.insort(self._waiting, waiter, key=_place)
        self._newcomers[waiter] = None
        self.wake()
        return waiter

    def _lose_patience(self, waiter: _Waiter) -> None:
        waiter.patience = None
        self.wake()

    def _why_full(self) -> str:
        return f"{self._max_waiting} requests wait already (router.max_queue); try again later"

    def _why_stranded(self) -> str:
        for role, nodes in (("prefill", self._nodes.prefill), ("decode", self._nodes.decode)):
            if not any(node.ready for node in nodes):
                return f"no {role} node is ready; try again in a moment"
        return "the nodes that are ready are too small for this request; try again later"

    def _reject(self, waiter: _Waiter, error: SluiceError) -> None:
        self._leave(waiter)
        if not waiter.pair.done():
            waiter.pair.set_exception(error)

    def _leave(self, waiter: _Waiter) -> None:
        """Twice is harmless."""
        if waiter.patience is not None:
            waiter.patience.cancel()
        self._newcomers.pop(waiter, None)
        index = bisect.bisect_left(self._waiting, waiter.ticket.place, key=_place)
        if index < len(self._waiting) and self._waiting[index] is waiter:
            del self._waiting[index]

    @staticmethod
    def _return_credit(waiter: _Waiter) -> None:
        """A cancel that met a pair just found: nobody will use it."""
        future = waiter.pair
        if future.done() and not future.cancelled() and future.exception() is None:
            for node in future.result().nodes:
                node.give_back(waiter.prompt.request.request_id)


def _place(waiter: _Waiter) -> tuple[int, int]:
    return waiter.ticket.place
