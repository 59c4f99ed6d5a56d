"""AsyncDecode: a decode node as the router's DecodeClient, for whoever shares its process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from sluice.decode_node.node import DecodeNode
from sluice.engine.node import InProcess
from sluice.protocol.clients import DecodeCalls
from sluice.protocol.messages import TokenChunk


class AsyncDecode(InProcess, DecodeCalls):
    """The async face of a DecodeNode."""

    node: DecodeNode

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
