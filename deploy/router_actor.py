"""RouterActor: the router with its HTTP server, in a Ray process that never loads torch."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Collection, Sequence

import ray

from sluice.deploy.collector import spare_streams
from sluice.deploy.logs import log_to_stderr
from sluice.engine import tracing
from sluice.engine.config import SluiceConfig
from sluice.engine.protocol import Cluster, DecodeClient, PrefillClient, RouterStatus
from sluice.router.server import RunningServer, serve
from sluice.router.service import RouterService

ANY_ADDRESS = ("0.0.0.0", "::", "")


class RouterActor:
    """Serves HTTP from `start` to `stop`; the controller tells it of the nodes in between."""

    _service: RouterService
    _server: RunningServer

    def __init__(self, config: SluiceConfig, cluster: Cluster, router_id: str) -> None:
        log_to_stderr(config.log_format)
        self._router_id = router_id
        self._config = config
        self._cluster = cluster
        self._stopped = asyncio.Event()

    async def start(self) -> str:
        """Serve; returns the URL under which this host is reached. Raises ConfigError."""
        router = self._config.router
        tracing.export_to(router.otlp_endpoint, self._router_id)
        self._service = RouterService(self._config, self._cluster, self._router_id)
        self._server = await serve(self._service, router.host, router.port)
        spare_streams()
        if router.host in ANY_ADDRESS:
            return self._server.url_at(ray.util.get_node_ip_address())
        return self._server.url

    async def set_nodes(
        self,
        prefill: Sequence[PrefillClient],
        decode: Sequence[DecodeClient],
        draining: Collection[str],
    ) -> None:
        self._service.set_nodes(prefill, decode, draining)

    async def wait_idle(self, node_id: str) -> None:
        await self._service.wait_idle(node_id)

    async def status(self) -> RouterStatus:
        return self._service.status()

    async def alive(self) -> None:
        """Return when the router was stopped; the call fails when the process dies."""
        await self._stopped.wait()

    async def stop(self) -> None:
        """Refuse new requests, let running ones finish within the router's limit, end."""
        await self._server.stop()
        await asyncio.to_thread(tracing.stop)
        self._stopped.set()

    async def has_torch(self) -> bool:
        """Whether this process has loaded torch, which it never should."""
        return "torch" in sys.modules
