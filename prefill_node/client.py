"""AsyncPrefill: a prefill node as the router's PrefillClient, for whoever shares its process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sluice.prefill_node.node import PrefillNode
from sluice.protocol.messages import (
    GenerateRequest,
    NodeInfo,
    NodeStatus,
    PageGrant,
    PrefillResult,
    SluiceError,
)


class AsyncPrefill:
    """The async face of a PrefillNode: awaits its futures, which cannot be cancelled."""

    def __init__(self, node: PrefillNode) -> None:
        self.node = node
        self.info: NodeInfo = node.info

    async def meet(self, version: int, peers: Sequence[NodeInfo]) -> dict[str, SluiceError]:
        return await asyncio.wrap_future(self.node.meet(version, peers))

    async def run(self, request: GenerateRequest, grant: PageGrant) -> PrefillResult:
        return await asyncio.wrap_future(self.node.run(request, grant))

    async def abort(self, request_id: str) -> None:
        await asyncio.wrap_future(self.node.abort(request_id))

    async def status(
        self, router_id: str, cache_version: int | None = None, *, with_metrics: bool = True
    ) -> NodeStatus:
        return await asyncio.wrap_future(
            self.node.status(router_id, cache_version, with_metrics=with_metrics)
        )
