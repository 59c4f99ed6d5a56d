"""AsyncDecode: a decode node as the router's DecodeClient, for whoever shares its process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from sluice.decode_node.node import DecodeNode
from sluice.engine.protocol import GenerateRequest, NodeInfo, NodeStatus, PageGrant, TokenChunk


class AsyncDecode:
    """The async face of a DecodeNode."""

    def __init__(self, node: DecodeNode) -> None:
        self.node = node
        self.info: NodeInfo = node.info

    async def reserve(self, request: GenerateRequest, router_id: str) -> PageGrant:
        return await asyncio.wrap_future(self.node.reserve(request, router_id))

    async def release(self, grant_id: str, *, in_flight: bool) -> None:
        await asyncio.wrap_future(self.node.release(grant_id, in_flight=in_flight))

    async def tokens(self, router_id: str) -> AsyncIterator[list[TokenChunk]]:
        """The router's token chunks, a list for each step, until the caller stops listening."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[list[TokenChunk]] = asyncio.Queue()

        def sink(chunks: list[TokenChunk]) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, chunks)

        self.node.subscribe(router_id, sink)
        try:
            while True:
                yield await arrived.get()
        finally:
            self.node.unsubscribe(router_id, sink)

    async def status(self, router_id: str, cache_version: int | None = None) -> NodeStatus:
        return await asyncio.wrap_future(self.node.status(router_id, cache_version))
