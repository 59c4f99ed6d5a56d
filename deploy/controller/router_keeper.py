"""RouterKeeper: keeps one router running and tells it of the nodes there are."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sluice.deploy.common.backoff import Backoff
from sluice.deploy.common.race import first_of
from sluice.deploy.common.waiting import News, until, within
from sluice.deploy.controller.launcher import Launcher
from sluice.deploy.controller.unplaced import explain
from sluice.protocol.messages import DecodeClient, PrefillClient, RouterStatus, SluiceError

log = logging.getLogger(__name__)

ANSWER_LIMIT_S = 5.0  # of a call that only notes something; then it is made again
STATUS_LIMIT_S = 0.5  # whoever asks for all routers' numbers waits for a second
IDLE_WAIT_S = 10.0  # how long the router is let wait before it is asked again
RETRY_S = 0.5
START_LIMIT_S = 600.0  # a large tokenizer takes seconds
STOP_LIMIT_S = 60.0  # over the router's own limit for running streams, and what follows it


@dataclass(frozen=True)
class ServingNodes:
    """The nodes that requests may be on; those in `draining` take nothing new."""

    prefill: Sequence[PrefillClient]
    decode: Sequence[DecodeClient]
    draining: frozenset[str]

    def names(self, node_id: str) -> bool:
        """Whether the node is one of them."""
        infos = [*(n.info for n in self.prefill), *(n.info for n in self.decode)]
        return any(info.node_id == node_id for info in infos)


class RouterKeeper:
    """Starts a router, restarts it when its process ends, and tells it of the nodes.

    number: tells it from other routers of the deployment. serving: spread when there are other
    nodes to tell of.
    """

    def __init__(
        self,
        launcher: Launcher,
        number: int,
        serving_nodes: Callable[[], ServingNodes],
        serving: News,
    ) -> None:
        self.name = f"router {number}"
        self.waits_for = ""  # what keeps its process from being started
        self._launcher = launcher
        self._serving_nodes = serving_nodes
        self._serving = serving
        self._router = launcher.router()
        self._known: ServingNodes | None = None  # what the process has been told
        self._told = News()
        self._gone = asyncio.Event()  # the process, or it was given up
        self._stopping = False
        self._url = ""

    async def start(self) -> str:
        """Serve; returns the URL. Raises ConfigError."""
        try:
            await first_of(
                self._start(),
                self._router.watch(),
                explain(self._router, self.name, self._note_what_is_missing),
            )
        finally:
            self.waits_for = ""
        return self._url

    async def stop(self) -> None:
        """Let it finish its streams up to its own limit, then end it."""
        self._stopping = True
        try:
            await within(STOP_LIMIT_S, self.name, self._router.stop())
        except SluiceError as error:
            log.warning("event=router_stop_failed router=%s reason=%s", self.name, error)
        await self._router.kill()

    async def keep(self) -> None:
        """Tell it of the nodes, and start it again whenever its process ends, until `stop`."""
        backoff = Backoff()
        while not self._stopping:
            try:
                await first_of(self._router.watch(), self._keep_told())
            except Exception as error:  # noqa: BLE001 - whatever it is, another one must serve
                log.warning("event=router_dead router=%s reason=%s", self.name, error)
            self._known = None
            self._gone.set()
            await self._restart(backoff)

    async def status(self) -> RouterStatus | None:
        """None while the router does not answer."""
        try:
            return await within(STATUS_LIMIT_S, self.name, self._router.status())
        except SluiceError as error:
            log.info("event=no_status router=%s reason=%s", self.name, error)
            return None

    async def wait_idle(self, node_id: str) -> None:
        """Return when the router knows that the node takes nothing new, and has nothing there.

        A process that died, or was killed since it did not answer, has nothing anywhere.
        """
        await first_of(self._until_idle(node_id), self._gone.wait())

    async def wait_dropped(self, node_id: str) -> None:
        """Return when the router knows that the node is gone, or after ANSWER_LIMIT_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_LIMIT_S):
                while self._known is not None and self._known.names(node_id):
                    await until(self._told.next, RETRY_S)

    async def _start(self) -> None:
        self._url = await within(START_LIMIT_S, self.name, self._router.start())

    async def _restart(self, backoff: Backoff) -> None:
        """End what is left of the process and start another, until one serves."""
        while not self._stopping:
            await self._router.kill()
            await backoff.pause()
            self._router, self._gone = self._launcher.router(), asyncio.Event()
            try:
                url = await self.start()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is tried again
                log.warning("event=router_start_failed router=%s reason=%s", self.name, error)
                continue
            log.info("event=router_restarted router=%s url=%s", self.name, url)
            backoff.reset()
            return

    async def _keep_told(self) -> None:
        """Tell the router of the nodes whenever they change, until it answers; never return."""
        failing = False
        for version in itertools.count(1):
            news, nodes = self._serving.next, self._serving_nodes()
            try:
                told = self._router.set_nodes(version, nodes.prefill, nodes.decode, nodes.draining)
                await within(ANSWER_LIMIT_S, self.name, told)
            except SluiceError as error:
                if not failing:
                    log.warning("event=publish_failed router=%s reason=%s", self.name, error)
                failing = True
                await asyncio.sleep(RETRY_S)
                continue
            failing = False
            self._known = nodes
            self._told.spread()
            await news.wait()

    async def _until_idle(self, node_id: str) -> None:
        while self._known is None or node_id not in self._known.draining:
            await until(self._told.next, RETRY_S)
        while not await self._is_idle(node_id):
            pass

    async def _is_idle(self, node_id: str) -> bool:
        """Whether no request holds the node, after waiting for that for a while."""
        idle = self._router.wait_idle(node_id, IDLE_WAIT_S)
        try:
            return await within(IDLE_WAIT_S + ANSWER_LIMIT_S, self.name, idle)
        except SluiceError as error:
            log.warning("event=wait_idle_failed node=%s reason=%s", node_id, error)
            await asyncio.sleep(RETRY_S)
            return False

    def _note_what_is_missing(self, why: str) -> None:
        self.waits_for = f"{self.name}: {why}" if why else ""
