"""RouterKeeper: keeps one router running and tells it of the nodes there are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sluice.deploy.backoff import Backoff
from sluice.deploy.launcher import Launcher
from sluice.engine.protocol import (
    DecodeClient,
    NodeLost,
    PrefillClient,
    RouterStatus,
    SluiceError,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServingNodes:
    """The nodes that requests may be on; those in `draining` take nothing new."""

    prefill: Sequence[PrefillClient]
    decode: Sequence[DecodeClient]
    draining: frozenset[str]


class RouterKeeper:
    """Starts the router, restarts it when its process dies, and publishes nodes to it."""

    def __init__(self, launcher: Launcher, serving_nodes: Callable[[], ServingNodes]) -> None:
        self._launcher = launcher
        self._serving_nodes = serving_nodes
        self._router = launcher.router()
        self._publishing = asyncio.Lock()

    async def start(self) -> str:
        """Serve; returns the URL. Raises ConfigError."""
        return await self._router.start()

    async def stop(self) -> None:
        await self._router.stop()

    async def keep(self) -> None:
        """Start the router again whenever its process dies; never return."""
        backoff = Backoff()
        while True:
            try:
                await self._router.watch()
            except NodeLost as error:
                log.warning("event=router_dead reason=%s", error)
            await backoff.pause()
            self._router = self._launcher.router()
            try:
                url = await self._router.start()
            except SluiceError as error:
                log.warning("event=router_start_failed reason=%s", error)
                await self._router.stop()
                continue
            log.info("event=router_restarted url=%s", url)
            backoff.reset()
            await self.publish()

    async def publish(self) -> None:
        """Tell the router of the nodes as they are now; the last call to enter wins."""
        async with self._publishing:
            nodes = self._serving_nodes()
            try:
                await self._router.set_nodes(nodes.prefill, nodes.decode, nodes.draining)
            except NodeLost as error:  # `keep` starts another one and publishes again
                log.warning("event=publish_failed reason=%s", error)

    async def status(self) -> RouterStatus | None:
        """None while the router does not answer."""
        try:
            return await self._router.status()
        except NodeLost:
            return None

    async def wait_idle(self, node_id: str) -> None:
        """Return when no request holds the node; a router that died holds nothing."""
        try:
            await self._router.wait_idle(node_id)
        except NodeLost as error:
            log.warning("event=wait_idle_failed node=%s reason=%s", node_id, error)
