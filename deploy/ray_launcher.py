"""RayLauncher: starts nodes and the router as Ray actors, behind the controller's handles."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import ray

from sluice.deploy.clients import RayCluster, RayDecodeClient, RayPrefillClient
from sluice.deploy.node_actors import DecodeActor, PrefillActor
from sluice.deploy.placement import node_options, router_options
from sluice.deploy.ray_errors import call
from sluice.deploy.router_actor import RouterActor
from sluice.engine.config import SluiceConfig
from sluice.engine.protocol import (
    DecodeClient,
    NodeInfo,
    NodeLost,
    NodeStatus,
    PrefillClient,
    Role,
    RouterStatus,
    SluiceError,
)

log = logging.getLogger(__name__)

PING_EVERY_S = 1.0
MIN_PATIENCE_S = 10.0  # a busy machine may starve a healthy process for seconds
STOP_TIMEOUT_S = 5.0  # then the process is killed
CONTROLLER_ID = "controller"  # as whom the controller asks for a node's status


class RayLauncher:
    """Starts processes on the Ray cluster that this process belongs to."""

    def __init__(self, config: SluiceConfig) -> None:
        self._config = config
        self._router_numbers = itertools.count()

    def node(self, role: Role, node_id: str) -> RayNode:
        config = {Role.PREFILL: self._config.prefill, Role.DECODE: self._config.decode}[role]
        cls = {Role.PREFILL: PrefillActor, Role.DECODE: DecodeActor}[role]
        options = node_options(role, config, ray.cluster_resources())
        actor = (
            ray.remote(cls)
            .options(name=node_id, **options)
            .remote(self._config, node_id, config.num_cpus)
        )
        patience_s = max(MIN_PATIENCE_S, self._config.transfer.lease_s)
        return RayNode(actor, role, node_id, patience_s)

    def router(self) -> RayRouter:
        controller = RayCluster(ray.get_runtime_context().current_actor)
        options = router_options(ray.cluster_resources())
        name = f"router-{next(self._router_numbers)}"
        actor = (
            ray.remote(RouterActor)
            .options(name=name, **options)
            .remote(self._config, controller, name)
        )
        return RayRouter(actor, on_start=self._keep_port)

    def _keep_port(self, url: str) -> None:
        """Have all routers, and one that takes a dead one's place, serve under the same URL."""
        router = self._config.router.model_copy(update={"port": urlsplit(url).port})
        self._config = self._config.model_copy(update={"router": router})


class RayNode:
    """A NodeHandle over a PrefillActor or a DecodeActor."""

    def __init__(self, actor: Any, role: Role, node_id: str, patience_s: float) -> None:
        self._actor = actor
        self._role = role
        self._node_id = node_id
        self._patience_s = patience_s
        self._info: NodeInfo | None = None

    async def start(self) -> NodeInfo:
        self._info = await self._call(self._actor.start.remote())
        return self._info

    def client(self) -> PrefillClient | DecodeClient:
        assert self._info is not None, "a node is published after it has started"
        if self._role is Role.PREFILL:
            return RayPrefillClient(self._actor, self._info)
        return RayDecodeClient(self._actor, self._info)

    async def connect(self, peer: NodeInfo) -> None:
        await self._call(self._actor.connect.remote(peer))

    async def disconnect(self, node_id: str) -> None:
        await self._call(self._actor.disconnect.remote(node_id))

    async def watch(self) -> None:
        """Raise NodeLost when the process ends, or when a started node answers no more."""
        ended = asyncio.ensure_future(self._call(self._actor.alive.remote()))
        try:
            while True:
                await asyncio.wait({ended}, timeout=PING_EVERY_S)
                if ended.done():
                    ended.result()
                    raise NodeLost(f"{self._node_id} was stopped")
                if self._info is not None:
                    await self._ping()
        finally:
            ended.cancel()

    async def stop(self) -> None:
        await _stop(self._actor)

    async def _ping(self) -> NodeStatus:
        try:
            status = self._call(self._actor.status.remote(CONTROLLER_ID, with_metrics=False))
            return await asyncio.wait_for(status, self._patience_s)
        except TimeoutError:
            raise NodeLost(
                f"{self._node_id} has not answered for {self._patience_s:g} s; it was given up"
            ) from None

    async def _call(self, result: Any) -> Any:
        return await call(self._node_id, result)


class RayRouter:
    """A RouterHandle over a RouterActor."""

    def __init__(self, actor: Any, on_start: Callable[[str], None]) -> None:
        self._actor = actor
        self._on_start = on_start

    async def start(self) -> str:
        url = str(await call("the router", self._actor.start.remote()))
        self._on_start(url)
        return url

    async def set_nodes(
        self,
        prefill: Sequence[PrefillClient],
        decode: Sequence[DecodeClient],
        draining: frozenset[str],
    ) -> None:
        told = self._actor.set_nodes.remote(list(prefill), list(decode), set(draining))
        await call("the router", told)

    async def wait_idle(self, node_id: str) -> None:
        await call("the router", self._actor.wait_idle.remote(node_id))

    async def status(self) -> RouterStatus:
        status: RouterStatus = await call("the router", self._actor.status.remote())
        return status

    async def watch(self) -> None:
        await call("the router", self._actor.alive.remote())
        raise NodeLost("the router was stopped")

    async def stop(self) -> None:
        await _stop(self._actor, timeout_s=None)


async def _stop(actor: Any, timeout_s: float | None = STOP_TIMEOUT_S) -> None:
    """Ask the actor to stop, then end its process; it may be dead already."""
    try:
        await asyncio.wait_for(call("the process", actor.stop.remote()), timeout_s)
    except (SluiceError, TimeoutError) as error:
        log.info("event=killed_without_goodbye reason=%r", error)
    finally:
        ray.kill(actor)
