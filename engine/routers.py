"""Routers: for whom a node works, and which of them have fallen silent."""

from __future__ import annotations

from collections.abc import Callable


class Routers:
    """Signs of life of the routers that have asked for something. Belongs to the loop thread."""

    def __init__(self, lease_s: float, clock: Callable[[], float]) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._seen: dict[str, float] = {}  # router id -> when it gave its last sign
        self._last_look = clock()

    def sign(self, router_id: str) -> None:
        self._seen[router_id] = self._clock()

    def take_silent(self) -> list[str]:
        """Routers without a sign for a lease, each once; call it every turn.

        A node that was frozen for a lease finds its own clock jumped: everybody has given it up,
        so all its routers count as silent, whatever has arrived meanwhile.
        """
        now = self._clock()
        frozen = now - self._last_look > self._lease_s
        self._last_look = now
        silent = [r for r, seen in self._seen.items() if frozen or now - seen > self._lease_s]
        for router_id in silent:
            del self._seen[router_id]
        return silent
