"""Inbox: one request's chunks, between its node's stream and the answer to its client.

A reader who falls behind gets all that has come as one chunk, so that a busy router spends less on
each token and catches up.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from sluice.engine.protocol import NodeLost, TokenChunk


class Inbox:
    """Keeps chunks in order until they are read. One reader.

    on_unread: whom to tell, once, that the reader does not come.
    """

    def __init__(self, on_unread: Callable[[], None]) -> None:
        self.on_unread = on_unread
        self._oldest = 0.0  # when the first of those that wait came, time.monotonic()
        self._waiting: deque[TokenChunk | NodeLost] = deque()
        self._filled = asyncio.Event()

    def put(self, arrived: TokenChunk | NodeLost) -> None:
        if not self._waiting:
            self._oldest = time.monotonic()
        self._waiting.append(arrived)
        self._filled.set()

    @property
    def unread_s(self) -> float:
        """How long what came first has waited for its reader."""
        return time.monotonic() - self._oldest if self._waiting else 0.0

    async def get(self) -> TokenChunk:
        """The tokens that have come, waiting for the first; what failed comes after them.

        Raises NodeLost where that is what was put in.
        """
        await self._filled.wait()
        first = self._waiting.popleft()
        if isinstance(first, NodeLost):
            raise first
        chunks = [first]
        while _goes_on(chunks[-1]) and (chunk := self._next_tokens()) is not None:
            chunks.append(chunk)
        if not self._waiting:
            self._filled.clear()
        return chunks[0] if len(chunks) == 1 else _joined(chunks)

    def _next_tokens(self) -> TokenChunk | None:
        """Take the next chunk out if it has tokens to join to those before."""
        if not self._waiting:
            return None
        chunk = self._waiting[0]
        if isinstance(chunk, NodeLost) or chunk.error is not None or chunk.preempted:
            return None
        self._waiting.popleft()
        return chunk


def _goes_on(chunk: TokenChunk) -> bool:
    return chunk.error is None and not chunk.preempted and chunk.finish_reason is None


def _joined(chunks: list[TokenChunk]) -> TokenChunk:
    return chunks[-1]._replace(
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        logprobs=tuple(entry for chunk in chunks for entry in chunk.logprobs),
    )
