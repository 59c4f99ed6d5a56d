"""NodeRecord: one node as the controller knows it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sluice.deploy.common.race import first_of
from sluice.deploy.common.waiting import within
from sluice.deploy.controller.launcher import NodeHandle
from sluice.protocol.messages import NodeEntry, NodeInfo, NodeLost, NodeState, Role, SluiceError

START_LIMIT_S = 3600.0  # the largest models take many minutes; a frozen process is noticed earlier


@dataclass(eq=False)
class NodeRecord:
    """A node's handle and where it stands in its life; its state follows from the fields."""

    node_id: str
    role: Role
    handle: NodeHandle
    info: NodeInfo | None = None  # set once it has started
    ready_at_s: float | None = None  # monotonic clock; set once it has met its peers
    waits_for: str = ""  # what keeps its process from being started
    death: str | None = None  # why it is dead
    met: frozenset[str] = frozenset()  # a prefill node: the decode nodes it knows
    unmet: Mapping[str, SluiceError] = field(default_factory=dict)  # those that failed, and why
    answers: bool = True  # a prefill node: when it was last told whom to know
    relieved: bool = False  # it was told to leave, and nothing new goes there
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    _lost: asyncio.Event = field(default_factory=asyncio.Event)
    _lost_reason: str = ""

    @property
    def state(self) -> NodeState:
        if self.death is not None:
            return NodeState.DEAD
        if self.leaving.is_set():
            return NodeState.DRAINING
        return NodeState.STARTING if self.ready_at_s is None else NodeState.READY

    @property
    def counts(self) -> bool:
        """Whether the node counts towards its role's target."""
        return self.state in (NodeState.STARTING, NodeState.READY)

    @property
    def serving(self) -> bool:
        """Whether requests may be on the node."""
        return self.ready_at_s is not None and self.death is None

    @property
    def takes_requests(self) -> bool:
        """Whether new requests may go to the node."""
        return self.serving and not self.relieved

    async def start(self) -> None:
        self.info = await within(START_LIMIT_S, self.node_id, self.handle.start())

    def welcome(self) -> None:
        """The node has met its peers and is ready."""
        self.ready_at_s = time.monotonic()

    def ready_for_s(self) -> float:
        return 0.0 if self.ready_at_s is None else time.monotonic() - self.ready_at_s

    def declare_lost(self, reason: str) -> None:
        """Have `watch` raise: somebody found the node unreachable before its handle did."""
        self._lost_reason = reason
        self._lost.set()

    async def watch(self, on_leaving: Callable[[], None]) -> None:
        """Raise NodeLost when the node is gone; never return."""
        await first_of(self.handle.watch(on_leaving), self._lost.wait())
        raise NodeLost(self._lost_reason)

    def entry(self) -> NodeEntry:
        host = "" if self.info is None else self.info.host
        detail = self.waits_for if self.death is None else self.death
        return NodeEntry(self.node_id, self.role, self.state, host, detail)
