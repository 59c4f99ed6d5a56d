"""Held: the attempts that a node should hold for this router, against those that it says it holds.

Whatever message is lost between the two, they agree again within a heartbeat or a few: what the
router has given up is ended on the node, what the node does not know is tried again elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass


@dataclass
class _Expected:
    """since: from when on the node should hold it. missed_at: when it was first not listed."""

    since: float
    on_missing: Callable[[], None]
    missed_at: float | None = None


class Held:
    """Times are the event loop's.

    patience_s: an attempt that the node does not list may be on its way there, or its end may be on
    its way here; after so long it is lost.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._expected: dict[str, _Expected] = {}

    def expect(self, request_id: str, now: float, on_missing: Callable[[], None]) -> None:
        """The node should list the attempt from now on, until `end`. on_missing: called once."""
        self._expected[request_id] = _Expected(now, on_missing)

    def end(self, request_id: str) -> None:
        """The node need not list it any more. Unknown ids are ignored."""
        self._expected.pop(request_id, None)

    def compare(self, listed: Collection[str], *, asked_at: float, now: float) -> None:
        """Note what the node listed when it was asked."""
        listed = set(listed)
        for request_id, expected in list(self._expected.items()):
            if request_id in listed:
                expected.missed_at = None
            elif expected.missed_at is None:
                expected.missed_at = now if expected.since < asked_at else None
            elif now - expected.missed_at >= self._patience_s:
                del self._expected[request_id]
                expected.on_missing()
