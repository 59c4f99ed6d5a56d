"""Controller: keeps as many nodes of each role as the target says, and tells the routers of them.

The life of a node:

    starting   its process starts and loads the model; then it meets every node of the other role
    ready      the router sends it requests
    draining   the router sends nothing new; the node leaves when no request holds it
    dead       lost or refused; shown for a while, and replaced (with back-off) to meet the target

Ids are counted up and never used again. The controller lives on one event loop and knows neither
Ray nor HTTP: it starts processes through a Launcher and is the router's Cluster.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import cast

from sluice.deploy.backoff import Backoff
from sluice.deploy.introductions import farewell, introduce
from sluice.deploy.launcher import Launcher
from sluice.deploy.node_record import NodeRecord
from sluice.deploy.race import first_of
from sluice.deploy.router_keeper import RouterKeeper, ServingNodes
from sluice.engine.config import SluiceConfig
from sluice.engine.protocol import (
    ClusterState,
    ConfigError,
    DecodeClient,
    InvalidRequest,
    NodeError,
    NodeState,
    PrefillClient,
    Role,
    RouterStatus,
    SluiceError,
)
from sluice.router.background import Background

log = logging.getLogger(__name__)

DEAD_SHOWN_S = 60.0  # how long the state tells of a dead node
STABLE_S = 5.0  # a node that was ready for so long died of something new
MAX_START_FAILURES = 3  # of one role, in a row, until `until_ready` gives up


class Controller:
    """Starts, introduces, watches, scales and drains nodes. Use it on one event loop."""

    def __init__(self, config: SluiceConfig, launcher: Launcher) -> None:
        self._roles = {Role.PREFILL: config.prefill, Role.DECODE: config.decode}
        self._targets = {role: limits.replicas for role, limits in self._roles.items()}
        self._launcher = launcher
        self._num_routers = config.router.replicas
        self._routers: list[RouterKeeper] = []
        self._nodes: dict[str, NodeRecord] = {}
        self._num_launched: Counter[Role] = Counter()
        self._backoff = {role: Backoff() for role in Role}
        self._refusal: ConfigError | None = None
        self._changed = asyncio.Event()
        self._introducing = asyncio.Lock()
        self._background = Background()

    async def start(self) -> str:
        """Start the routers, then begin to start nodes. Returns the URL. Raises ConfigError."""
        urls = []
        for _ in range(self._num_routers):  # one by one: the first may find the port for all
            self._routers.append(router := RouterKeeper(self._launcher, self._serving_nodes))
            urls.append(await router.start())
            self._background.spawn(router.keep())
        self._reconcile()
        return urls[0]

    async def until_ready(self) -> None:
        """Return when every role has its target of ready nodes.

        Raises ConfigError if a node can never run with this config, NodeError if the nodes of a
        role keep dying.
        """
        while not self._all_ready():
            if self._refusal is not None:
                raise self._refusal
            for role, backoff in self._backoff.items():
                if backoff.failures >= MAX_START_FAILURES:
                    raise NodeError(f"{role} nodes do not start; {self._last_words(role)}")
            self._changed.clear()
            await self._changed.wait()

    async def state(self) -> ClusterState:
        entries = tuple(node.entry() for node in self._nodes.values())
        return ClusterState(targets=dict(self._targets), nodes=entries)

    async def routers(self) -> list[RouterStatus]:
        """What the router processes say of themselves, as far as they answer."""
        asked = await asyncio.gather(*(router.status() for router in self._routers))
        return [status for status in asked if status is not None]

    async def scale(self, role: Role, replicas: int) -> None:
        """Set a role's target. Raises InvalidRequest outside the configured limits."""
        limits = self._roles[role]
        if not limits.min_replicas <= replicas <= limits.max_replicas:
            raise InvalidRequest(
                f"replicas is {replicas}, expected {limits.min_replicas} to {limits.max_replicas} "
                f"({role}.min_replicas and {role}.max_replicas in the config)",
                param="replicas",
            )
        log.info("event=scale role=%s replicas=%d", role, replicas)
        self._targets[role] = replicas
        self._backoff[role].reset()
        self._reconcile()

    async def drain(self, node_id: str) -> None:
        """Let a node finish what runs and take it away; its role's target falls by one.

        At min_replicas the target stays, so that another node takes its place. Raises
        InvalidRequest if there is no such node.
        """
        node = self._nodes.get(node_id)
        if node is None or node.state is NodeState.DEAD:
            known = ", ".join(n.node_id for n in self._nodes.values() if n.counts)
            raise InvalidRequest(
                f"node is {node_id!r}, expected one of: {known or '(no node is running)'}",
                param="node",
            )
        if node.state is NodeState.DRAINING:
            return
        floor = self._roles[node.role].min_replicas
        self._targets[node.role] = max(floor, self._targets[node.role] - 1)
        self._let_go(node)
        self._reconcile()

    async def stop(self) -> None:
        """Let the routers finish their streams, then end every process."""
        await asyncio.gather(*(router.stop() for router in self._routers))
        await self._background.drain(limit_s=0)
        await asyncio.gather(*(node.handle.stop() for node in self._nodes.values()))

    def _all_ready(self) -> bool:
        ready = Counter(n.role for n in self._nodes.values() if n.state is NodeState.READY)
        return all(ready[role] >= target for role, target in self._targets.items())

    def _last_words(self, role: Role) -> str:
        dead = [n for n in self._nodes.values() if n.role is role and n.death is not None]
        return f"{dead[-1].node_id}: {dead[-1].death}" if dead else "none was started"

    def _serving_nodes(self) -> ServingNodes:
        serving = [node for node in self._nodes.values() if node.serving]
        prefill = [n.handle.client() for n in serving if n.role is Role.PREFILL]
        decode = [n.handle.client() for n in serving if n.role is Role.DECODE]
        return ServingNodes(
            cast(list[PrefillClient], prefill),
            cast(list[DecodeClient], decode),
            frozenset(n.node_id for n in serving if n.leaving.is_set()),
        )

    def _reconcile(self) -> None:
        """Start the nodes that are missing and let go of those that are too many."""
        for role, target in self._targets.items():
            counting = [n for n in self._nodes.values() if n.role is role and n.counts]
            for node in _expendable(counting)[: max(0, len(counting) - target)]:
                self._let_go(node)
            if not self._backoff[role].pausing:
                for _ in range(target - len(counting)):
                    self._launch(role)
        self._changed.set()

    def _launch(self, role: Role) -> None:
        node_id = f"{role}-{self._num_launched[role]}"
        self._num_launched[role] += 1
        log.info("event=node_starting node=%s", node_id)
        node = NodeRecord(node_id, role, self._launcher.node(role, node_id))
        self._nodes[node_id] = node
        self._background.spawn(self._live(node))

    def _let_go(self, node: NodeRecord) -> None:
        log.info("event=node_draining node=%s", node.node_id)
        node.leaving.set()

    async def _live(self, node: NodeRecord) -> None:
        """A node's life from start to end, whatever the end is."""
        try:
            await first_of(self._serve(node), node.watch())
        except SluiceError as error:
            log.warning("event=node_dead node=%s reason=%s", node.node_id, error)
            node.death = str(error)
            self._refusal = error if isinstance(error, ConfigError) else self._refusal
        else:
            log.info("event=node_left node=%s", node.node_id)
            del self._nodes[node.node_id]
        self._changed.set()
        await self._publish()
        if node.role is Role.DECODE:
            self._background.spawn(farewell(node, list(self._nodes.values())))
        await node.handle.stop()
        if node.death is not None:
            await self._mourn(node)

    async def _serve(self, node: NodeRecord) -> None:
        """Start, serve until told to leave, finish what runs."""
        if await first_of(self._prepare(node), node.leaving.wait()) == 1:
            return  # told to leave while it was starting
        log.info("event=node_ready node=%s", node.node_id)
        self._changed.set()
        await self._publish()
        await node.leaving.wait()
        await self._publish()
        await asyncio.gather(*(router.wait_idle(node.node_id) for router in self._routers))

    async def _publish(self) -> None:
        await asyncio.gather(*(router.publish() for router in self._routers))

    async def _prepare(self, node: NodeRecord) -> None:
        info = await node.handle.start()
        async with self._introducing:  # of two nodes that start together, one must meet the other
            await introduce(node, info, list(self._nodes.values()))
            node.welcome(info)

    async def _mourn(self, node: NodeRecord) -> None:
        """Have a dead node replaced after a pause, and forget it after a while."""
        backoff = self._backoff[node.role]
        if node.ready_for_s() > STABLE_S:
            backoff.reset()
        if not node.leaving.is_set():
            await backoff.pause()
        self._reconcile()
        await asyncio.sleep(DEAD_SHOWN_S)
        del self._nodes[node.node_id]


def _expendable(nodes: list[NodeRecord]) -> list[NodeRecord]:
    """The nodes, those to let go first in front: the ones still starting, then the newest."""
    newest_first = nodes[::-1]
    return sorted(newest_first, key=lambda node: node.state is not NodeState.STARTING)
