"""InProcess: nodes and router service in one process, for benchmarks and tests.

The same nodes, transfers and dispatch as in a deployment, without Ray, HTTP and NIXL: pages move
by the in-process transport, and nodes share one copy of the weights.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable

from sluice.decode_node.client import AsyncDecode
from sluice.decode_node.node import DecodeNode
from sluice.engine.runner import Runner
from sluice.model.registry import Model, load_model
from sluice.prefill_node.client import AsyncPrefill
from sluice.prefill_node.node import PrefillNode
from sluice.protocol.config import SluiceConfig
from sluice.protocol.messages import ClusterState, InvalidRequest, Role, RouterStatus
from sluice.router.service import RouterService
from sluice.transfer.local_transport import LocalTransport

RunnerOf = Callable[[Model, SluiceConfig, Role], Runner]


class InProcess:
    """A fixed cluster: `prefill.replicas` and `decode.replicas` nodes of a config.

    Use as an async context manager. runner_of: how to make a role's runner, if not the usual way.
    """

    def __init__(self, config: SluiceConfig, runner_of: RunnerOf = Runner.around) -> None:
        self._config = config
        model = load_model(
            config.model.path,
            cache_path=config.model.cache_path,
            dtype=config.model.dtype,
            weights=config.model.weights,
        )
        tag = uuid.uuid4().hex[:8]

        def transport(node_id: str) -> LocalTransport:
            return LocalTransport(f"{node_id}.{tag}")

        self.prefill = [
            PrefillNode(runner_of(model, config, Role.PREFILL), transport(name), config, name, "")
            for name in _names(Role.PREFILL, config.prefill.replicas)
        ]
        self.decode = [
            DecodeNode(runner_of(model, config, Role.DECODE), transport(name), config, name, "")
            for name in _names(Role.DECODE, config.decode.replicas)
        ]
        self.service: RouterService

    async def __aenter__(self) -> InProcess:
        for node in self._nodes():
            node.start()
        for prefill in self.prefill:
            for decode in self.decode:
                await asyncio.wrap_future(prefill.connect(decode.info))
        self.service = RouterService(self._config, self)
        await self.service.start()
        self.service.set_nodes(
            [AsyncPrefill(node) for node in self.prefill],
            [AsyncDecode(node) for node in self.decode],
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.service.stop(limit_s=5.0)
        for node in self._nodes():
            await asyncio.to_thread(node.stop)

    def _nodes(self) -> list[PrefillNode | DecodeNode]:
        return [*self.prefill, *self.decode]

    async def state(self) -> ClusterState:
        return ClusterState(
            {Role.PREFILL: len(self.prefill), Role.DECODE: len(self.decode)},
        )

    async def routers(self) -> list[RouterStatus]:
        return [self.service.status()]

    async def scale(self, role: Role, replicas: int) -> None:
        raise InvalidRequest(f"{role}: the nodes of an in-process cluster are fixed")

    async def drain(self, node_id: str) -> None:
        raise InvalidRequest(f"{node_id}: the nodes of an in-process cluster are fixed")


def _names(role: Role, count: int) -> list[str]:
    return [f"{role}-{number}" for number in range(count)]
