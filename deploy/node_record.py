"""NodeRecord: one node as the controller knows it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from sluice.deploy.launcher import NodeHandle
from sluice.deploy.race import first_of
from sluice.engine.protocol import NodeEntry, NodeInfo, NodeLost, NodeState, Role


@dataclass(eq=False)
class NodeRecord:
    """A node's handle and where it stands in its life; its state follows from the fields."""

    node_id: str
    role: Role
    handle: NodeHandle
    info: NodeInfo | None = None  # set once it has met its peers
    death: str | None = None  # why it is dead
    ready_at_s: float | None = None  # monotonic clock
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    _lost: asyncio.Event = field(default_factory=asyncio.Event)
    _lost_reason: str = ""

    @property
    def state(self) -> NodeState:
        if self.death is not None:
            return NodeState.DEAD
        if self.leaving.is_set():
            return NodeState.DRAINING
        return NodeState.STARTING if self.info is None else NodeState.READY

    @property
    def counts(self) -> bool:
        """Whether the node counts towards its role's target."""
        return self.state in (NodeState.STARTING, NodeState.READY)

    @property
    def serving(self) -> bool:
        """Whether requests may be on the node."""
        return self.info is not None and self.death is None

    def welcome(self, info: NodeInfo) -> None:
        """The node has met its peers and is ready."""
        self.info = info
        self.ready_at_s = time.monotonic()

    def ready_for_s(self) -> float:
        return 0.0 if self.ready_at_s is None else time.monotonic() - self.ready_at_s

    def declare_lost(self, reason: str) -> None:
        """Have `watch` raise: somebody found the node unreachable before its handle did."""
        self._lost_reason = reason
        self._lost.set()

    async def watch(self) -> None:
        """Raise NodeLost when the node is gone; never return."""
        await first_of(self.handle.watch(), self._lost.wait())
        raise NodeLost(self._lost_reason)

    def entry(self) -> NodeEntry:
        host = "" if self.info is None else self.info.host
        return NodeEntry(self.node_id, self.role, self.state, host, self.death or "")
