"""Nodes, router and cluster behind Ray actor handles, as the protocol's clients.

The clients travel to the router's process, so nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import ray

from sluice.deploy.cluster.errors import call, mapped
from sluice.deploy.common.waiting import within
from sluice.protocol.clients import DecodeCalls, NodeCalls, PrefillCalls
from sluice.protocol.messages import ClusterState, NodeInfo, Role, RouterStatus, TokenChunk

CONTROLLER = "the controller"
CONTROLLER_LIMIT_S = 10.0  # it does each of these at once


class OfActor(NodeCalls):
    """A node's calls over the handle of its actor."""

    def __init__(self, actor: Any, info: NodeInfo) -> None:
        self.info = info
        self._actor = actor

    async def call(self, verb: str, *arguments: Any, **named: Any) -> Any:
        return await call(self.info.node_id, self._actor.call.remote(verb, *arguments, **named))


class RayPrefillClient(OfActor, PrefillCalls):
    """A PrefillClient over a PrefillActor's handle."""


class RayDecodeClient(OfActor, DecodeCalls):
    """A DecodeClient over a DecodeActor's handle."""

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
