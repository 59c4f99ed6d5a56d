"""AsyncDecode: a decode node as the router's DecodeClient, for whoever shares its process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from sluice.decode_node.node import DecodeNode
from sluice.protocol.messages import GenerateRequest, NodeInfo, NodeStatus, PageGrant, TokenChunk


class AsyncDecode:
    """The async face of a DecodeNode."""

    def __init__(self, node: DecodeNode) -> None:
        self.node = node
        self.info: NodeInfo = node.info

    async def reserve(self, request: GenerateRequest) -> PageGrant:
        return await asyncio.wrap_future(self.node.reserve(request))

    async def release(self, request_id: str, *, in_flight: bool) -> None:
        await asyncio.wrap_future(self.node.release(request_id, in_flight=in_flight))

    async def tokens(self, router_id: str, number: int = 0) -> AsyncIterator[list[TokenChunk]]:
        """The router's token chunks, a list for each step.

        Until the caller stops listening, a stream with a higher number comes, or the router has
        been silent for a lease.
        """
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[list[TokenChunk] | None] = asyncio.Queue()

        def sink(chunks: list[TokenChunk] | None) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, chunks)

        self.node.subscribe(router_id, sink, number)
        try:
            while (chunks := await arrived.get()) is not None:
                yield chunks
        finally:
            self.node.unsubscribe(router_id, sink)

    async def status(
        self, router_id: str, cache_version: int | None = None, *, with_metrics: bool = True
    ) -> NodeStatus:
        return await asyncio.wrap_future(
            self.node.status(router_id, cache_version, with_metrics=with_metrics)
        )
