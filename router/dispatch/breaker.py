"""Breaker: keeps requests from a node that answers but fails them.

    closed ──OPEN_AFTER failures in a row──► open ──cool-down──► half open: one request tries it
      ▲                                      ▲  ▲                      │        │
      │                                      │  └─────── failure ──────┘        │ it gets tokens
      │                                      └────────── failure ──────┐        ▼
      └─────────────────────── an attempt ends well ───────────────── on trial: all may come

A node that does not answer at all is lost, which its view notices by itself; this is for the ones
whose heartbeat is fine. Requests that no other node could hold wait in the queue meanwhile.
"""

from __future__ import annotations

# More than the attempts of one request: one that no node can do must not close nodes to others.
OPEN_AFTER = 5
COOL_DOWN_S = 1.0  # a node that stays broken costs one request a second an attempt


class Breaker:
    """Told of each attempt on one node. Times are the event loop's."""

    def __init__(self, cool_down_s: float = COOL_DOWN_S) -> None:
        self.cool_down_s = cool_down_s
        self.num_failures = 0  # in a row
        self._opened_at = 0.0
        self._probe: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether the last attempts failed; a probe may be let through all the same."""
        return self.num_failures >= OPEN_AFTER

    def allows(self, now: float) -> bool:
        """Whether a request may go to the node."""
        cooled = self._probe is None and now >= self._opened_at + self.cool_down_s
        return not self.is_open or cooled

    def begin(self, holder: str) -> None:
        """The holder goes to the node; to an open one, as its probe."""
        if self.is_open:
            self._probe = holder

    def get_on(self, holder: str) -> None:
        """The holder gets tokens. If it is the probe, the node is on trial: it need not be kept
        from others until a long answer has ended, and opens at its next failure."""
        if self._probe == holder:
            self.num_failures = OPEN_AFTER - 1
            self._probe = None

    def succeed(self, holder: str) -> None:
        """The holder's attempt has ended well; while the node is open, only the probe's counts, as
        the others began when it was not."""
        if not self.is_open or self._probe == holder:
            self.num_failures = 0

    def fail(self, now: float) -> None:
        self.num_failures += 1
        self._opened_at = now

    def end(self, holder: str) -> None:
        """The holder has left the node, with or without a verdict."""
        if self._probe == holder:
            self._probe = None
