"""Outbox: the token chunks of a step, one message for each router."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable

from sluice.engine.protocol import TokenChunk

Sink = Callable[[list[TokenChunk]], None]


class Outbox:
    """Collects chunks during a step and hands them to the routers' sinks.

    `put`, `flush` and `forget` belong to the loop thread; `subscribe` may come from any thread.
    What is flushed before a router subscribes waits for it, until `forget`.
    """

    def __init__(self) -> None:
        self._put: dict[str, list[TokenChunk]] = defaultdict(list)  # the loop thread's alone
        self._lock = threading.Lock()
        self._flushed: dict[str, list[TokenChunk]] = defaultdict(list)
        self._sinks: dict[str, Sink] = {}

    def put(self, router_id: str, chunk: TokenChunk) -> None:
        self._put[router_id].append(chunk)

    def flush(self) -> None:
        """Deliver what was put, to every router that has subscribed."""
        with self._lock:
            for router_id, chunks in self._put.items():
                self._flushed[router_id] += chunks
            self._put.clear()
            self._deliver()

    def subscribe(self, router_id: str, sink: Sink) -> None:
        """Send the router's chunks to `sink` from now on; an older sink is replaced."""
        with self._lock:
            self._sinks[router_id] = sink
            self._deliver()

    def unsubscribe(self, router_id: str, sink: Sink) -> None:
        """Stop sending to `sink`, if it is still the router's."""
        with self._lock:
            if self._sinks.get(router_id) is sink:
                del self._sinks[router_id]

    def forget(self, router_id: str) -> None:
        """Drop what waits for a router that never came to fetch it."""
        with self._lock:
            if router_id not in self._sinks:
                self._put.pop(router_id, None)
                self._flushed.pop(router_id, None)

    def _deliver(self) -> None:
        for router_id in [r for r in self._flushed if r in self._sinks]:
            self._sinks[router_id](self._flushed.pop(router_id))
