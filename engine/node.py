"""Node: what a prefill node and a decode node have in common; each adds its loop and its verbs."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Protocol, Self

from torch import Tensor

from sluice.cache.clock import lease_clock
from sluice.cache.spec import PoolSpec
from sluice.engine.attempts import Attempts
from sluice.engine.batch import Chunk
from sluice.engine.intake import Intake
from sluice.engine.loop import LoopThread
from sluice.engine.metrics import NodeMetrics
from sluice.engine.routers import Routers
from sluice.engine.runner import Runner
from sluice.protocol.clients import NodeCalls
from sluice.protocol.config import SluiceConfig, TransferConfig
from sluice.protocol.messages import NodeInfo, NodeStatus, Role

log = logging.getLogger(__name__)


class Reachable(Protocol):
    """What a node tells others of its transport."""

    def address(self) -> bytes: ...


class Node(ABC):
    """A node of a role. Public methods may be called from any thread.

    Everything but the public methods belongs to the loop's thread.
    """

    role: ClassVar[Role]

    def __init__(
        self,
        runner: Runner,
        transport: Reachable,
        config: SluiceConfig,
        node_id: str,
        host: str,
        *,
        clock: Callable[[], float] = lease_clock,
    ) -> None:
        """What is registered for others has to be by now: it goes into the transport's address."""
        self.runner = runner
        self.metrics = NodeMetrics()
        self._clock = clock
        self._attempts = Attempts(config.transfer.lease_s, clock)
        self._routers = Routers(config.transfer.lease_s, clock)
        self._loop = LoopThread(node_id, self._turn)
        self._intake = Intake(runner, self._loop, node_id)
        self.info: NodeInfo = runner.describe(
            node_id=node_id,
            role=self.role,
            host=host,
            agent=transport.address(),
            max_batch_tokens=self._tokens_of_a_step(config),
        )

    @classmethod
    def load(cls, config: SluiceConfig, node_id: str, host: str) -> Self:
        """Load the model and open the transport. Raises ConfigError."""
        runner = Runner.load(config, cls.role)
        return cls(runner, cls.open_transport(config.transfer, node_id), config, node_id, host)

    @staticmethod
    @abstractmethod
    def open_transport(choice: TransferConfig, node_id: str) -> Any:
        """The transport that the role's constructor takes. Raises ConfigError."""

    def start(self) -> None:
        self._loop.start()

    def stop(self) -> None:
        """End the loop; what is unfinished is lost to this node."""
        self._intake.close()
        self._loop.stop()
        self._close()

    def status(
        self, router_id: str, cache_version: int | None = None, *, with_metrics: bool = True
    ) -> Future[NodeStatus]:
        """Gauges, what is cached since that version of a report, and the router's sign of life."""
        return self._loop.call(lambda: self._status(router_id, cache_version, with_metrics))

    def turn_here(self) -> float:
        """One turn of a node that was not started, in the caller's thread: for tests."""
        return self._loop.turn_here()

    @staticmethod
    @abstractmethod
    def _tokens_of_a_step(config: SluiceConfig) -> int:
        """How many tokens of requests the router may take a step to compute."""

    @abstractmethod
    def _turn(self) -> float:
        """One turn of the loop; how long the next may wait for work, in seconds."""

    @abstractmethod
    def _close(self) -> None:
        """Give back what is the role's own, once the loop has ended."""

    @abstractmethod
    def _load_now(self) -> tuple[int, int]:
        """Requests that run, and that wait."""

    @abstractmethod
    def _held_for(self, router_id: str) -> Sequence[str]:
        """Ids of the attempts that the node holds for the router."""

    def _compute(
        self,
        chunks: Sequence[Chunk],
        on_failure: Callable[[str], None],
        *,
        all_logits: bool = False,
    ) -> Tensor | None:
        """A step of the model: its logits. None if it failed, once everybody in it was told."""
        try:
            return self.runner.step(chunks, all_logits=all_logits)
        except Exception as error:
            log.exception("event=step_failed node=%s", self.info.node_id)
            on_failure(f"{self.role} step failed: {error}")
            return None

    def _count_lookup(self, pools: Iterable[PoolSpec], num_tokens: int, hit_tokens: int) -> None:
        """Count a prompt of which so many tokens were cached in these pools."""
        if self.runner.manager.prefix_cache:
            self.metrics.count_lookup(pools, num_tokens, hit_tokens)

    def _status(self, router_id: str, cache_version: int | None, with_metrics: bool) -> NodeStatus:
        self._routers.sign(router_id)
        running, waiting = self._load_now()
        return NodeStatus(
            node_id=self.info.node_id,
            running=running,
            waiting=waiting,
            pools=self.runner.manager.usage(),
            metrics=self.metrics.families() if with_metrics else (),
            cached=self.runner.manager.report(cache_version),
            clock_s=self._clock(),
            requests=tuple(self._held_for(router_id)),
        )


class InProcess(NodeCalls):
    """A node's calls for whoever shares its process: awaits its futures, which nobody cancels."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.info = node.info

    async def call(self, verb: str, *arguments: Any, **named: Any) -> Any:
        return await asyncio.wrap_future(getattr(self.node, verb)(*arguments, **named))
