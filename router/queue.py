"""The queue: the one place where requests wait, by priority, then first come first served.

    enter ──► waiting ──pair with credit──► dispatched
                 │  └──no node could ever take it──► Unavailable
                 └──client gone, deadline──► forgotten

A request leaves only with credit on both nodes of a pair, so nothing waits inside a node and a
cancel here costs nothing. A request that comes back after a failure keeps its place.

Nobody is overtaken on the node that it waits for, and nobody at all where decode has no room for
it. A lower priority can be overtaken for as long as more urgent requests fill the nodes: at most
until its deadline, as whoever sets priorities decides how long that may be.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import logging
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sluice.engine.protocol import GenerateRequest, QueueFull, SluiceError, Unavailable
from sluice.router.events import log_event
from sluice.router.nodes import RoutedDecode, RoutedNode, RoutedPrefill
from sluice.router.policy import Policy, Turn
from sluice.router.prompt import Prompt
from sluice.router.registry import Nodes

logger = logging.getLogger(__name__)


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
    prompt: Prompt
    ticket: Ticket
    hopeless_until: float | None  # loop time until which having no node at all is put up with
    pair: asyncio.Future[Pair]


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
        self._arrivals = itertools.count()
        self._closed: SluiceError | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def ticket(self, priority: int = 0) -> Ticket:
        return Ticket((priority, next(self._arrivals)))

    async def pair_for(self, request: GenerateRequest, ticket: Ticket) -> Pair:
        """Wait for a pair that can start the request; the credit on both nodes is then taken.

        Raises QueueFull, or Unavailable if no ready node could take the request at all.
        """
        waiter = self._enter(request, ticket)
        try:
            self.wake()
            if not waiter.pair.done() and not ticket.returning:
                self._check_length(waiter)
            if not waiter.pair.done():
                log_event(logger, "queued", request_id=request.request_id, waiting=len(self))
            return await waiter.pair
        except asyncio.CancelledError:
            self._return_credit(waiter)
            raise
        finally:
            self._leave(waiter)

    def wake(self) -> None:
        """Start every request that can start, in order, and turn away those nobody can take."""
        if not self._waiting:
            return
        turn = Turn(self._policy, self._nodes.prefill, self._nodes.decode)
        for waiter in list(self._waiting):
            if waiter.pair.done():
                continue  # cancelled just now: its own task takes it out
            if not self._nodes.could_hold(waiter.prompt.request):
                self._turn_away(waiter)
            elif picked := turn.pick(waiter.prompt, waiter.ticket.avoid):
                self._start(waiter, Pair(*picked))
            elif turn.over:
                break

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

    def _enter(self, request: GenerateRequest, ticket: Ticket) -> _Waiter:
        if self._closed is not None:
            raise self._closed
        loop = asyncio.get_running_loop()
        until = loop.time() + self._patience_s if ticket.returning else None
        waiter = _Waiter(Prompt(request), ticket, until, loop.create_future())
        bisect.insort(self._waiting, waiter, key=lambda other: other.ticket.place)
        if until is not None:
            loop.call_at(until, self.wake)
        return waiter

    def _check_length(self, newcomer: _Waiter) -> None:
        if len(self._waiting) > self._max_waiting:
            self._leave(newcomer)
            raise QueueFull(
                f"{self._max_waiting} requests wait already (router.max_queue); try again later"
            )

    def _turn_away(self, waiter: _Waiter) -> None:
        until = waiter.hopeless_until
        if until is None or asyncio.get_running_loop().time() >= until:
            self._reject(waiter, Unavailable(self._why_hopeless()))

    def _why_hopeless(self) -> str:
        for role, nodes in (("prefill", self._nodes.prefill), ("decode", self._nodes.decode)):
            if not any(node.ready for node in nodes):
                return f"no {role} node is ready; try again in a moment"
        return "the nodes that are ready are too small for this request; try again later"

    def _reject(self, waiter: _Waiter, error: SluiceError) -> None:
        self._leave(waiter)
        if not waiter.pair.done():
            waiter.pair.set_exception(error)

    def _leave(self, waiter: _Waiter) -> None:
        if waiter in self._waiting:
            self._waiting.remove(waiter)

    @staticmethod
    def _return_credit(waiter: _Waiter) -> None:
        """A cancel that met a pair just found: nobody will use it."""
        future = waiter.pair
        if future.done() and not future.cancelled() and future.exception() is None:
            for node in future.result().nodes:
                node.give_back(waiter.prompt.request.request_id)
