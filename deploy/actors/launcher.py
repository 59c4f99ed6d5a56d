"""RayLauncher: starts nodes and the router as Ray actors, behind the controller's handles."""

from __future__ import annotations

import asyncio
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.exceptions import RayError

from sluice.deploy.actors.clients import RayCluster, RayDecodeClient, RayPrefillClient
from sluice.deploy.actors.node_actors import DecodeActor, PrefillActor
from sluice.deploy.actors.router_actor import RouterActor
from sluice.deploy.cluster.errors import call, mapped
from sluice.deploy.cluster.pending import why_unplaced
from sluice.deploy.cluster.placement import ROUTER, demand_of, node_options, router_options
from sluice.deploy.common.waiting import within
from sluice.protocol.config import RoleConfig, SluiceConfig
from sluice.protocol.messages import (
    DecodeClient,
    NodeInfo,
    NodeLost,
    PrefillClient,
    Role,
    RouterStatus,
    SluiceError,
)

log = logging.getLogger(__name__)

PING_EVERY_S = 1.0
MIN_PATIENCE_S = 10.0  # a busy machine may starve a healthy process for seconds
STARTING_PATIENCE_S = 60.0  # reading weights may hold Python's lock for long
STOP_LIMIT_S = 5.0  # then a node's process is killed


class RayLauncher:
    """Starts processes on the Ray cluster that this process belongs to."""

    def __init__(self, config: SluiceConfig) -> None:
        self._config = config
        self._router_numbers = itertools.count()

    def node(self, role: Role, node_id: str) -> RayNode:
        patience_s = max(MIN_PATIENCE_S, self._config.transfer.lease_s)
        return RayNode(self._config, role, node_id, patience_s)

    def router(self) -> RayRouter:
        name = f"router-{next(self._router_numbers)}"
        return RayRouter(self._config, name, on_start=self._keep_port)

    def _keep_port(self, url: str) -> None:
        """Have all routers, and one that takes a dead one's place, serve under the same URL."""
        router = self._config.router.model_copy(update={"port": urlsplit(url).port})
        self._config = self._config.model_copy(update={"router": router})


class RayProcess(ABC):
    """A ProcessHandle over an actor, which is made at the first call."""

    def __init__(self, config: SluiceConfig, name: str, role: str) -> None:
        self._config = config
        self._name = name
        self._placed_role = role
        self._demand: Mapping[str, float] = {}
        self._made: Any = None
        self._exists = False  # its process has answered

    @property
    @abstractmethod
    def _patience_s(self) -> float:
        """How long a healthy process may take to answer, as it is now."""

    @abstractmethod
    def _options(self) -> dict[str, Any]:
        """Ray's options for the actor."""

    @abstractmethod
    def _make(self, options: Mapping[str, Any]) -> Any:
        """Have Ray make the actor."""

    async def unplaced(self) -> str:
        if self._exists:
            return ""
        with mapped("Ray"):
            return await asyncio.to_thread(
                why_unplaced, self._placed_role, self._actor._actor_id.hex(), self._demand
            )

    async def kill(self) -> None:
        if self._made is None:
            return
        try:
            ray.kill(self._made)
        except RayError as error:
            log.warning("event=kill_failed process=%s reason=%s", self._name, error)

    @property
    def _actor(self) -> Any:
        if self._made is None:
            options = self._options()
            self._demand = demand_of(options)
            self._made = self._make({"name": self._name, **options})
        return self._made

    async def _call(self, result: Any) -> Any:
        return await call(self._name, result)

    async def _watch(self, on_leaving: Callable[[], None]) -> None:
        """Raise NodeLost when the process ends, or when it answers no more; never return."""
        ended = asyncio.ensure_future(self._call(self._actor.alive.remote()))
        try:
            await self._until_it_exists(ended)
            while True:
                await asyncio.wait({ended}, timeout=PING_EVERY_S)
                if ended.done():
                    ended.result()
                    raise NodeLost(f"{self._name} was stopped")
                ping = self._call(self._actor.ping.remote())
                if await within(self._patience_s, self._name, ping):
                    on_leaving()
        finally:
            ended.cancel()

    async def _until_it_exists(self, ended: asyncio.Future[Any]) -> None:
        """Return once the process answers: Ray may have to wait for a place for it."""
        answer = asyncio.ensure_future(self._call(self._actor.ping.remote()))
        try:
            await asyncio.wait({ended, answer}, return_when=asyncio.FIRST_COMPLETED)
            self._exists = answer.done()
        finally:
            answer.cancel()


class RayNode(RayProcess):
    """A NodeHandle over a PrefillActor or a DecodeActor."""

    def __init__(self, config: SluiceConfig, role: Role, node_id: str, patience_s: float) -> None:
        super().__init__(config, node_id, role)
        self._role = role
        self._ready_patience_s = patience_s
        self._info: NodeInfo | None = None

    async def start(self) -> NodeInfo:
        self._info = await self._call(self._actor.start.remote())
        return self._info

    def client(self) -> PrefillClient | DecodeClient:
        assert self._info is not None, "a node is published after it has started"
        if self._role is Role.PREFILL:
            return RayPrefillClient(self._actor, self._info)
        return RayDecodeClient(self._actor, self._info)

    async def meet(self, version: int, peers: Sequence[NodeInfo]) -> Mapping[str, SluiceError]:
        assert self._info is not None, "nodes meet when they have started"
        return await RayPrefillClient(self._actor, self._info).meet(version, peers)

    async def watch(self, on_leaving: Callable[[], None]) -> None:
        await self._watch(on_leaving)

    async def stop(self) -> None:
        try:
            await within(STOP_LIMIT_S, self._name, self._call(self._actor.stop.remote()))
        except SluiceError as error:  # it may be dead already
            log.info("event=killed_without_goodbye process=%s reason=%s", self._name, error)
        finally:
            await self.kill()

    @property
    def _patience_s(self) -> float:
        return STARTING_PATIENCE_S if self._info is None else self._ready_patience_s

    @property
    def _role_config(self) -> RoleConfig:
        return {Role.PREFILL: self._config.prefill, Role.DECODE: self._config.decode}[self._role]

    def _options(self) -> dict[str, Any]:
        return node_options(self._role, self._role_config, ray.cluster_resources())

    def _make(self, options: Mapping[str, Any]) -> Any:
        cls = {Role.PREFILL: PrefillActor, Role.DECODE: DecodeActor}[self._role]
        made = ray.remote(cls).options(**options)
        return made.remote(self._config, self._name, self._role_config.num_cpus)


class RayRouter(RayProcess):
    """A RouterHandle over a RouterActor."""

    def __init__(self, config: SluiceConfig, name: str, on_start: Callable[[str], None]) -> None:
        super().__init__(config, name, ROUTER)
        self._on_start = on_start
        self._started = False

    async def start(self) -> str:
        url = str(await self._call(self._actor.start.remote()))
        self._started = True
        self._on_start(url)
        return url

    async def set_nodes(
        self,
        version: int,
        prefill: Sequence[PrefillClient],
        decode: Sequence[DecodeClient],
        draining: frozenset[str],
    ) -> None:
        nodes = list(prefill), list(decode), set(draining)
        await self._call(self._actor.set_nodes.remote(version, *nodes))

    async def wait_idle(self, node_id: str, limit_s: float) -> bool:
        return await self._call(self._actor.wait_idle.remote(node_id, limit_s))

    async def status(self) -> RouterStatus:
        status: RouterStatus = await self._call(self._actor.status.remote())
        return status

    async def watch(self) -> None:
        await self._watch(lambda: None)  # asked to end, it finishes its streams, and then ends

    async def stop(self) -> None:
        try:
            await self._call(self._actor.stop.remote())
        finally:
            await self.kill()

    @property
    def _patience_s(self) -> float:
        return MIN_PATIENCE_S if self._started else STARTING_PATIENCE_S

    def _options(self) -> dict[str, Any]:
        return router_options(ray.cluster_resources())

    def _make(self, options: Mapping[str, Any]) -> Any:
        controller = RayCluster(ray.get_runtime_context().current_actor)
        made = ray.remote(RouterActor).options(**options)
        return made.remote(self._config, controller, self._name)
