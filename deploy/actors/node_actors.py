"""PrefillActor and DecodeActor: one node each, in a Ray worker process of its own.

The life of an actor:

1. Ray starts the process and builds the actor; nothing is loaded yet.
2. `start` loads the model in a thread, so that the actor answers meanwhile, and returns NodeInfo.
3. The controller introduces prefill nodes to decode nodes; the router sends requests.
4. `stop` ends the node's loop; the controller ends the process. When the process dies on its own,
   the pending call of `alive` fails, which tells the controller at once. After a SIGTERM the
   answers to `ping` say so, and the controller lets the node finish what runs; the process ends by
   itself if that takes too long.

Node code is imported inside the process that runs it: the controller and the router import this
module for the class only and must not load torch.
"""

from __future__ import annotations

import asyncio
import functools
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import ray

from sluice.deploy.cluster.interfaces import bound
from sluice.deploy.common.collector import spare_streams
from sluice.deploy.common.logs import log_to_stderr
from sluice.deploy.common.termination import Leaving
from sluice.protocol import tracing
from sluice.protocol.config import SluiceConfig
from sluice.protocol.messages import NodeError, NodeInfo, SluiceError, TokenChunk

if TYPE_CHECKING:
    from sluice.decode_node.client import AsyncDecode
    from sluice.prefill_node.client import AsyncPrefill

CONTROLLER_ID = "controller"  # as whom the controller asks for a node's status

P = ParamSpec("P")
T = TypeVar("T")


def only_our_errors(method: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Let nothing but SluiceErrors leave: a caller unpickling another might import torch."""

    @functools.wraps(method)
    async def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await method(*args, **kwargs)
        except SluiceError:
            raise
        except Exception as error:  # noqa: BLE001 - its words go on as a NodeError
            raise NodeError(f"{type(error).__name__}: {error}") from None

    return guarded


class NodeActor(Leaving, ABC):
    """What both kinds of node have in common."""

    _face: AsyncPrefill | AsyncDecode

    def __init__(self, config: SluiceConfig, node_id: str, num_threads: int) -> None:
        super().__init__()
        # OpenMP reads it once, when torch is loaded, and applies it to every thread of the node.
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
        log_to_stderr(config.log_format)
        self._config = config
        self._node_id = node_id
        self._running = False
        self._stopped = asyncio.Event()

    @only_our_errors
    async def start(self) -> NodeInfo:
        """Load the model and start the node. Raises ConfigError."""
        tracing.export_to(self._config.otlp_endpoint, self._node_id)
        self._config = bound(self._config, self._node_id, self._host)
        self._face = await asyncio.to_thread(self._load)
        self._face.node.start()
        self._running = True
        spare_streams()
        return self._face.info

    @abstractmethod
    def _load(self) -> AsyncPrefill | AsyncDecode:
        """Import the node's code and build the node; runs in a thread."""

    @only_our_errors
    async def call(self, verb: str, *arguments: Any, **named: Any) -> Any:
        """What the node's verb comes to: see NodeCalls."""
        return await self._face.call(verb, *arguments, **named)

    @only_our_errors
    async def ping(self) -> bool:
        """Answer if the node's loop turns, too: whether somebody has asked the process to end."""
        if self._running:
            await self._face.status(CONTROLLER_ID)
        return self.leaving.is_set()

    async def alive(self) -> None:
        """Return when the node was stopped; the call fails when the process dies."""
        await self._stopped.wait()

    @only_our_errors
    async def stop(self) -> None:
        """End the node's loop; what still runs fails with NodeLost at its callers."""
        if self._running:
            self._running = False
            await asyncio.to_thread(self._face.node.stop)
            await asyncio.to_thread(tracing.stop)
        self._stopped.set()

    @property
    def _host(self) -> str:
        return str(ray.util.get_node_ip_address())


class PrefillActor(NodeActor):
    """A prefill node behind Ray calls."""

    _face: AsyncPrefill

    def _load(self) -> AsyncPrefill:
        from sluice.prefill_node.client import AsyncPrefill
        from sluice.prefill_node.node import PrefillNode

        return AsyncPrefill(PrefillNode.load(self._config, self._node_id, self._host))


class DecodeActor(NodeActor):
    """A decode node behind Ray calls."""

    _face: AsyncDecode

    def _load(self) -> AsyncDecode:
        from sluice.decode_node.client import AsyncDecode
        from sluice.decode_node.node import DecodeNode

        return AsyncDecode(DecodeNode.load(self._config, self._node_id, self._host))

    async def tokens(self, router_id: str, number: int = 0) -> AsyncIterator[list[TokenChunk]]:
        async for step in self._face.tokens(router_id, number):
            yield step
