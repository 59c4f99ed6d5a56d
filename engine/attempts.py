"""Attempts: which requests a node may still take, whatever order their messages come in."""

from __future__ import annotations

from collections.abc import Callable

from sluice.protocol.messages import GenerateRequest, NodeError

# An ended attempt is remembered so many leases: its request counts for one, by the sender's clock.
REMEMBERED_LEASES = 2


class Attempts:
    """Remembers the attempts that ended here. Belongs to the node's loop thread.

    A message that follows the end of its attempt, or that took longer on its way than it counts,
    would begin work that nobody waits for, in pages that are somebody else's.
    """

    def __init__(self, lease_s: float, clock: Callable[[], float]) -> None:
        self._keep_s = REMEMBERED_LEASES * lease_s
        self._clock = clock
        self._ended: dict[str, float] = {}  # id -> when to forget it, in order of that time

    def check(self, request: GenerateRequest) -> None:
        """Raise NodeError for a request that comes too late, or after its end."""
        late_s = 0.0 if request.expires_at is None else self._clock() - request.expires_at
        if late_s > 0:
            raise NodeError(
                f"request {request.request_id}: came {late_s:.3f} s later than it counts; send it "
                "again under another id"
            )
        if request.request_id in self._ended:
            raise NodeError(
                f"request {request.request_id}: came after its end; send it again under another id"
            )

    def end(self, request_id: str) -> None:
        """The attempt is over, or will not begin."""
        now = self._clock()
        self._ended.pop(request_id, None)
        self._ended[request_id] = now + self._keep_s
        while (oldest := next(iter(self._ended))) != request_id and self._ended[oldest] <= now:
            del self._ended[oldest]
