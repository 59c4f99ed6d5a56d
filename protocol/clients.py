"""A node's verbs as calls that somebody else carries out, in the process or through Ray.

A new verb is declared in `messages`, passed on here, and done by the node.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from sluice.protocol.messages import (
    GenerateRequest,
    NodeInfo,
    NodeStatus,
    PageGrant,
    PrefillResult,
    SluiceError,
)


class NodeCalls(ABC):
    """What nodes of both roles do."""

    info: NodeInfo

    @abstractmethod
    async def call(self, verb: str, *arguments: Any, **named: Any) -> Any:
        """What the node's method of that name comes to."""

    async def status(
        self, router_id: str, cache_version: int | None = None, *, with_metrics: bool = True
    ) -> NodeStatus:
        status: NodeStatus = await self.call(
            "status", router_id, cache_version, with_metrics=with_metrics
        )
        return status


class PrefillCalls(NodeCalls):
    """A PrefillClient, and what the controller asks of a prefill node."""

    async def meet(self, version: int, peers: Sequence[NodeInfo]) -> Mapping[str, SluiceError]:
        failed: Mapping[str, SluiceError] = await self.call("meet", version, list(peers))
        return failed

    async def run(self, request: GenerateRequest, grant: PageGrant) -> PrefillResult:
        result: PrefillResult = await self.call("run", request, grant)
        return result

    async def abort(self, request_id: str) -> None:
        await self.call("abort", request_id)


class DecodeCalls(NodeCalls):
    """A DecodeClient but for its stream of tokens."""

    async def reserve(self, request: GenerateRequest) -> PageGrant:
        grant: PageGrant = await self.call("reserve", request)
        return grant

    async def release(self, request_id: str, *, in_flight: bool) -> None:
        await self.call("release", request_id, in_flight=in_flight)
