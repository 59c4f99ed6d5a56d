"""Controller: keeps as many nodes of each role as the target says, and tells the routers of them.

The life of a node:

    starting   its process starts and loads the model; then it meets every node of the other role
    ready      the routers send it requests
    draining   another one takes its place, then the routers send nothing new; it leaves when no
               request holds it
    dead       lost or refused; shown for a while, and replaced (with back-off) to meet the target

Nothing is told once: whoever has to know something has a task that tells it until it answers, and
tells it again when it changes (RouterKeeper, Introductions). A process that does not answer delays
nobody but itself, until its watch gives it up. Ids are counted up and never used again. The
controller lives on one event loop and knows neither Ray nor HTTP: it starts processes through a
Launcher and is the router's Cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Coroutine, Iterable
from typing import Any, cast

from sluice.deploy.common.backoff import Backoff
from sluice.deploy.common.race import first_of
from sluice.deploy.common.waiting import News, forever, until
from sluice.deploy.controller.introductions import Introductions
from sluice.deploy.controller.launcher import Launcher
from sluice.deploy.controller.node_record import NodeRecord
from sluice.deploy.controller.router_keeper import RouterKeeper, ServingNodes
from sluice.deploy.controller.unplaced import explain
from sluice.protocol.config import SluiceConfig
from sluice.protocol.messages import (
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
from sluice.router.common.background import Background

log = logging.getLogger(__name__)

DEAD_SHOWN_S = 60.0  # how long the state tells of a dead node
STABLE_S = 5.0  # a node that was ready for so long died of something new
MAX_START_FAILURES = 3  # of one role, in a row, until `until_ready` gives up
RELIEF_LIMIT_S = 10.0  # how long a node that is to leave serves until another takes its place
RELIEF_LOOK_S = 0.5


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
        self._changed = News()  # of the state of any node
        self._started = News()  # who has started or is gone: prefill nodes are told
        self._serving = News()  # who serves: routers are told
        self._introductions = Introductions(lambda: list(self._nodes.values()), self._started)
        self._background = Background()
        self._stopping = False

    async def start(self) -> str:
        """Start the routers, then begin to start nodes. Returns the URL. Raises ConfigError."""
        urls = []
        for number in range(self._num_routers):  # one by one: the first may find the port for all
            router = RouterKeeper(self._launcher, number, self._serving_nodes, self._serving)
            self._routers.append(router)
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
            news = self._changed.next
            if self._refusal is not None:
                raise self._refusal
            for role, backoff in self._backoff.items():
                if backoff.failures >= MAX_START_FAILURES:
                    raise NodeError(f"{role} nodes do not start; {self._last_words(role)}")
            await news.wait()

    async def state(self) -> ClusterState:
        entries = tuple(node.entry() for node in self._nodes.values())
        return ClusterState(targets=dict(self._targets), nodes=entries)

    async def routers_wait_for(self) -> list[str]:
        """What keeps router processes from being started; nodes tell it in their entries."""
        return [router.waits_for for router in self._routers if router.waits_for]

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
        """Let the routers finish their streams, then end every process; takes no longer than that.

        What fails at one does not keep the others from being ended.
        """
        self._stopping = True
        await _all_of(router.stop() for router in self._routers)
        await self._background.drain(limit_s=0)
        await _all_of(node.handle.stop() for node in self._nodes.values())

    def _all_ready(self) -> bool:
        return all(self._num_ready(role) >= target for role, target in self._targets.items())

    def _num_ready(self, role: Role) -> int:
        return sum(n.role is role and n.state is NodeState.READY for n in self._nodes.values())

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
            frozenset(n.node_id for n in serving if n.relieved),
        )

    def _reconcile(self) -> None:
        """Start the nodes that are missing and let go of those that are too many."""
        for role, target in ({} if self._stopping else self._targets).items():
            counting = [n for n in self._nodes.values() if n.role is role and n.counts]
            for node in _expendable(counting)[: max(0, len(counting) - target)]:
                self._let_go(node)
            if not self._backoff[role].pausing:
                for _ in range(target - len(counting)):
                    self._launch(role)
        self._changed.spread()

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
            await first_of(
                self._serve(node),
                node.watch(lambda: self._replace(node)),
                self._introduce(node),
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, the node is lost, and replaced
            log.warning("event=node_dead node=%s reason=%s", node.node_id, error)
            node.death = str(error) if isinstance(error, SluiceError) else repr(error)
            self._refusal = error if isinstance(error, ConfigError) else self._refusal
        else:
            log.info("event=node_left node=%s", node.node_id)
            del self._nodes[node.node_id]
        for news in (self._changed, self._started, self._serving):
            news.spread()
        if node.death is None:
            await asyncio.gather(*(router.wait_dropped(node.node_id) for router in self._routers))
        await node.handle.stop()
        if node.death is not None:
            await self._mourn(node)

    async def _serve(self, node: NodeRecord) -> None:
        """Start, serve until told to leave, finish what runs."""
        if await first_of(self._prepare(node), node.leaving.wait()) == 1:
            return  # told to leave while it was starting
        log.info("event=node_ready node=%s", node.node_id)
        self._changed.spread()
        self._serving.spread()
        await node.leaving.wait()
        await self._relieve(node)
        await asyncio.gather(*(router.wait_idle(node.node_id) for router in self._routers))

    async def _prepare(self, node: NodeRecord) -> None:
        """Start the node's process, and let it meet its peers."""
        await first_of(
            node.start(),
            explain(node.handle, node.node_id, lambda why: self._note_what_is_missing(node, why)),
        )
        self._note_what_is_missing(node, "")
        self._started.spread()
        await self._introductions.welcome(node)

    async def _introduce(self, node: NodeRecord) -> None:
        if node.role is Role.PREFILL:
            await self._introductions.keep(node)
        await forever()

    async def _relieve(self, node: NodeRecord) -> None:
        """Have the routers send nothing new to the node, once another can take its work.

        That may need the very resources which this node has, so it waits for so long only.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RELIEF_LIMIT_S):
                while self._targets[node.role] and not self._num_ready(node.role):
                    await until(self._changed.next, RELIEF_LOOK_S)
        node.relieved = True
        self._serving.spread()

    def _replace(self, node: NodeRecord) -> None:
        """Somebody has asked the node's process to end: drain it while another is started."""
        if not node.leaving.is_set():
            self._let_go(node)
            self._reconcile()

    def _note_what_is_missing(self, node: NodeRecord, why: str) -> None:
        node.waits_for = why
        self._changed.spread()

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


async def _all_of(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all to their ends; what one raises is logged."""
    for outcome in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(outcome, Exception):
            log.error("event=stop_failed", exc_info=outcome)


def _expendable(nodes: list[NodeRecord]) -> list[NodeRecord]:
    """The nodes, those to let go first in front: the ones still starting, then the newest."""
    newest_first = nodes[::-1]
    return sorted(newest_first, key=lambda node: node.state is not NodeState.STARTING)
