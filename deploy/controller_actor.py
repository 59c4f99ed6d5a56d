"""ControllerActor: the controller in a Ray process of its own, called by the router and `up`."""

from __future__ import annotations

from sluice.deploy.controller import Controller
from sluice.deploy.logs import log_to_stderr
from sluice.deploy.ray_launcher import RayLauncher
from sluice.engine.config import SluiceConfig
from sluice.engine.protocol import ClusterState, Role, RouterStatus

CONTROLLER = "controller"  # the actor's name in the deployment's namespace


class ControllerActor:
    """Every process of a deployment is started by, and ends with, this actor."""

    def __init__(self, config: SluiceConfig) -> None:
        log_to_stderr(config.log_format)
        self._config = config

    async def start(self) -> str:
        """Start the router and begin to start nodes. Returns the URL. Raises ConfigError."""
        self._controller = Controller(self._config, RayLauncher(self._config))
        return await self._controller.start()

    async def until_ready(self) -> None:
        await self._controller.until_ready()

    async def state(self) -> ClusterState:
        return await self._controller.state()

    async def routers(self) -> list[RouterStatus]:
        return await self._controller.routers()

    async def scale(self, role: Role, replicas: int) -> None:
        await self._controller.scale(role, replicas)

    async def drain(self, node_id: str) -> None:
        await self._controller.drain(node_id)

    async def stop(self) -> None:
        await self._controller.stop()
