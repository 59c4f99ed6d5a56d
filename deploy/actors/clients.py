"""Nodes, router and cluster behind Ray actor handles, as the protocol's clients.

The clients travel to the router's process, so nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import ray

from sluice.deploy.cluster.errors import call, mapped
from sluice.deploy.common.waiting import within
from sluice.protocol.messages import (
    ClusterState,
    GenerateRequest,
    NodeInfo,
    NodeStatus,
    PageGrant,
    PrefillResult,
    Role,
    RouterStatus,
    TokenChunk,
)

CONTROLLER = "the controller"
CONTROLLER_LIMIT_S = 10.0  # it does each of these at once


class RayPrefillClient:
    """A PrefillClient over a PrefillActor's handle."""

    def __init__(self, actor: Any, info: NodeInfo) -> None:
        self.info = info
        self._actor = actor

    async def run(self, request: GenerateRequest, grant: PageGrant) -> PrefillResult:
        return await call(self.info.node_id, self._actor.run.remote(request, grant))

    async def abort(self, request_id: str) -> None:
        await call(self.info.node_id, self._actor.abort.remote(request_id))

    async def status(
        self, router_id: str, cache_version: int | None = None, *, with_metrics: bool = True
    ) -> NodeStatus:
        status = self._actor.status.remote(router_id, cache_version, with_metrics=with_metrics)
        return await call(self.info.node_id, status)


class RayDecodeClient:
    """A DecodeClient over a DecodeActor's handle."""

    def __init__(self, actor: Any, info: NodeInfo) -> None:
        self.info = info
        self._actor = actor

    async def reserve(self, request: GenerateRequest) -> PageGrant:
        return await call(self.info.node_id, self._actor.reserve.remote(request))

    async def release(self, request_id: str, *, in_flight: bool) -> None:
        released = self._actor.release.remote(request_id, in_flight=in_flight)
        await call(self.info.node_id, released)

    async def tokens(self, router_id: str, number: int = 0) -> AsyncIterator[list[TokenChunk]]:
        stream = self._actor.tokens.options(num_returns="streaming").remote(router_id, number)
        ended = False
        try:
            with mapped(self.info.node_id):
                async for step in stream:
                    yield await step
                ended = True
        finally:
            if not ended:  # the router lost interest, or the node died: end the call there too
                ray.cancel(stream)

    async def status(
        self, router_id: str, cache_version: int | None = None, *, with_metrics: bool = True
    ) -> NodeStatus:
        status = self._actor.status.remote(router_id, cache_version, with_metrics=with_metrics)
        return await call(self.info.node_id, status)


class RayCluster:
    """The router's Cluster over the controller actor's handle. Raises NodeLost if it is silent."""

    def __init__(self, controller: Any) -> None:
        self._controller = controller

    async def state(self) -> ClusterState:
        return await self._ask(self._controller.state.remote())

    async def routers(self) -> Sequence[RouterStatus]:
        return await self._ask(self._controller.routers.remote())

    async def scale(self, role: Role, replicas: int) -> None:
        await self._ask(self._controller.scale.remote(role, replicas))

    async def drain(self, node_id: str) -> None:
        await self._ask(self._controller.drain.remote(node_id))

    async def _ask(self, answer: Any) -> Any:
        return await within(CONTROLLER_LIMIT_S, CONTROLLER, call(CONTROLLER, answer))
