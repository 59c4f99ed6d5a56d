"""ControllerActor: the controller in a Ray process of its own, called by the router and `up`."""

from __future__ import annotations

import asyncio
import os

from sluice.deploy.actors.launcher import RayLauncher
from sluice.deploy.common.logs import log_to_stderr
from sluice.deploy.common.termination import Leaving
from sluice.deploy.controller.controller import Controller
from sluice.protocol.config import SluiceConfig
from sluice.protocol.messages import ClusterState, Role, RouterStatus

CONTROLLER = "controller"  # the actor's name in the deployment's namespace


class ControllerActor(Leaving):
    """Every process of a deployment is started by, and ends with, this actor.

    A SIGTERM ends the deployment as `sluice down` does.
    """

    limit_s = 60  # running streams finish, then the nodes end

    def __init__(self, config: SluiceConfig) -> None:
        super().__init__()
        log_to_stderr(config.log_format)
        self._controller = Controller(config, RayLauncher(config))

    async def start(self) -> str:
        """Start the router and begin to start nodes. Returns the URL. Raises ConfigError."""
        self._leaver = asyncio.create_task(self._leave())
        return await self._controller.start()

    async def until_ready(self) -> None:
        await self._controller.until_ready()

    async def state(self) -> ClusterState:
        return await self._controller.state()

    async def routers_wait_for(self) -> list[str]:
        return await self._controller.routers_wait_for()

    async def routers(self) -> list[RouterStatus]:
        return await self._controller.routers()

    async def scale(self, role: Role, replicas: int) -> None:
        await self._controller.scale(role, replicas)

    async def drain(self, node_id: str) -> None:
        await self._controller.drain(node_id)

    async def stop(self) -> None:
        await self._controller.stop()

    async def _leave(self) -> None:
        """End everything, this process too, once it is asked to end."""
        await self.leaving.wait()
        try:
            await self._controller.stop()
        finally:
            os._exit(1)  # Ray's own way out would wait for calls that never end
