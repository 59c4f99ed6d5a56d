"""Outbox: the token chunks of a step, one message for each router."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from sluice.protocol.messages import TokenChunk

Sink = Callable[[list[TokenChunk] | None], None]  # None: nothing more comes to it


class _Subscription(NamedTuple):
    number: int
    sink: Sink


class Outbox:
    """Collects chunks during a step and hands them to the routers' sinks.

    `put`, `flush` and `forget` belong to the loop thread; `subscribe` may come from any thread.
    What is flushed before a router subscribes waits for it, until `forget`. Of a router's
    subscriptions the one with the highest number counts, in whatever order they come.
    """

    def __init__(self) -> None:
        self._put: dict[str, list[TokenChunk]] = defaultdict(list)  # the loop thread's alone
        self._lock = threading.Lock()
        self._flushed: dict[str, list[TokenChunk]] = defaultdict(list)
        self._sinks: dict[str, _Subscription] = {}

    def put(self, router_id: str, chunk: TokenChunk) -> None:
        self._put[router_id].append(chunk)

    def flush(self) -> None:
        """Deliver what was put, to every router that has subscribed."""
        with self._lock:
            for router_id, chunks in self._put.items():
                self._flushed[router_id] += chunks
            self._put.clear()
            self._deliver()

    def subscribe(self, router_id: str, sink: Sink, number: int = 0) -> None:
        """Send the router's chunks to `sink` from now on; one with a lower number ends."""
        with self._lock:
            known = self._sinks.get(router_id)
            if known is not None and known.number > number:
                sink(None)
                return
            if known is not None:
                known.sink(None)
            self._sinks[router_id] = _Subscription(number, sink)
            self._deliver()

    def unsubscribe(self, router_id: str, sink: Sink) -> None:
        """Stop sending to `sink`, if it is still the router's."""
        with self._lock:
            known = self._sinks.get(router_id)
            if known is not None and known.sink is sink:
                del self._sinks[router_id]

    def forget(self, router_id: str) -> None:
        """The router is gone: its sink gets what was put last, and ends; nothing waits for it."""
        with self._lock:
            chunks = self._flushed.pop(router_id, []) + self._put.pop(router_id, [])
            if (known := self._sinks.pop(router_id, None)) is not None:
                known.sink(chunks)
                known.sink(None)

    def _deliver(self) -> None:
        for router_id in [r for r in self._flushed if r in self._sinks]:
            self._sinks[router_id].sink(self._flushed.pop(router_id))
