"""RouterActor: the router with its HTTP server, in a Ray process that never loads torch."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

import ray

from sluice.deploy.common.collector import spare_streams
from sluice.deploy.common.logs import log_to_stderr
from sluice.deploy.common.termination import Leaving
from sluice.protocol import tracing
from sluice.protocol.config import SluiceConfig
from sluice.protocol.messages import Cluster, DecodeClient, PrefillClient, RouterStatus
from sluice.router.http.server import RunningServer, serve
from sluice.router.service import STOP_LIMIT_S, RouterService

LEAVE_LIMIT_S = 20.0  # for streams after a SIGTERM: the process has 30 s in all
ANY_ADDRESS = ("0.0.0.0", "::", "")


class RouterActor(Leaving):
    """Serves HTTP from `start` to `stop`; the controller tells it of the nodes in between.

    A SIGTERM is a `stop`, with less time for the streams: the controller starts another router.
    """

    _service: RouterService
    _server: RunningServer

    def __init__(self, config: SluiceConfig, cluster: Cluster, router_id: str) -> None:
        super().__init__()
        log_to_stderr(config.log_format)
        self._router_id = router_id
        self._config = config
        self._cluster = cluster
        self._version = 0  # of the nodes that we were told of
        self._stopped = asyncio.Event()

    async def start(self) -> str:
        """Serve; returns the URL under which this host is reached. Raises ConfigError."""
        router = self._config.router
        tracing.export_to(self._config.otlp_endpoint, self._router_id)
        self._service = RouterService(self._config, self._cluster, self._router_id)
        self._server = await serve(self._service, router.host, router.port)
        self._leaver = asyncio.create_task(self._leave())
        spare_streams()
        if router.host in ANY_ADDRESS:
            return self._server.url_at(ray.util.get_node_ip_address())
        return self._server.url

    async def set_nodes(
        self,
        version: int,
        prefill: Sequence[PrefillClient],
        decode: Sequence[DecodeClient],
        draining: Collection[str],
    ) -> None:
        """Take up the nodes, unless a higher version came before; the same twice is harmless."""
        if version >= self._version:
            self._version = version
            self._service.set_nodes(prefill, decode, draining)

    async def wait_idle(self, node_id: str, limit_s: float) -> bool:
        """Whether no request holds the node, after waiting for that up to `limit_s`."""
        try:
            async with asyncio.timeout(limit_s):
                await self._service.wait_idle(node_id)
        except TimeoutError:
            return False
        return True

    async def status(self) -> RouterStatus:
        return self._service.status()

    async def ping(self) -> bool:
        """Whether somebody has asked the process to end; an answer says that calls are taken."""
        return self.leaving.is_set()

    async def alive(self) -> None:
        """Return when the router was stopped; the call fails when the process dies."""
        await self._stopped.wait()

    async def stop(self, limit_s: float = STOP_LIMIT_S) -> None:
        """Refuse new requests, let running ones finish within the limit, end."""
        await self._server.stop(limit_s)
        await asyncio.to_thread(tracing.stop)
        self._stopped.set()

    async def _leave(self) -> None:
        """Stop once the process is asked to end."""
        await self.leaving.wait()
        if self._config.router.replicas > 1:
            self._server.stop_listening()  # connections go to the other routers
        await self.stop(LEAVE_LIMIT_S)
