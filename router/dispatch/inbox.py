"""Inbox: one request's chunks, between its node's stream and the answer to its client.

Every token comes out once and in order, or an error in its place: a chunk that comes again is
dropped, and behind a gap nothing more is taken.

A reader who falls behind gets all that has come as one chunk, so that a busy router spends less on
each token and catches up.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from sluice.protocol.messages import NodeError, TokenChunk


class Inbox:
    """Keeps chunks in order until they are read. One reader.

    on_unread: whom to tell, once, that the reader does not come. position: of the first token that
    is to come, among the request's output tokens.
    """

    def __init__(self, on_unread: Callable[[], None], position: int = 0) -> None:
        self.on_unread = on_unread
        self._position = position
        self._broken = False
        self._waiting: deque[TokenChunk | NodeError] = deque()
        self._filled = asyncio.Event()
        # Times are of time.monotonic().
        self._oldest = 0.0  # when the first of those that wait came
        self._away_since: float | None = None  # the reader; None before it can come, or while here
        self._missed_at: float | None = None  # when it was found to be away too long

    def put(self, arrived: TokenChunk | NodeError) -> None:
        """Keep it for the reader, unless it came before; an error is the last that is kept."""
        if self._broken:
            return
        checked = self._in_order(arrived) if isinstance(arrived, TokenChunk) else arrived
        if checked is not None:
            self._broken = isinstance(checked, NodeError)
            self._keep(checked)

    def _in_order(self, chunk: TokenChunk) -> TokenChunk | NodeError | None:
        """The chunk; None if its tokens came before, and an error if some before them did not."""
        if chunk.error is not None:
            return chunk  # it ends the request wherever it stands
        gap = chunk.position - self._position
        if gap > 0:
            return NodeError(f"{gap} tokens before output position {chunk.position} were lost")
        if gap < 0:
            return None
        self._position += len(chunk.token_ids)
        return chunk

    def _keep(self, arrived: TokenChunk | NodeError) -> None:
        if not self._waiting:
            self._oldest = time.monotonic()
        self._waiting.append(arrived)
        self._filled.set()

    def expect_reader(self) -> None:
        """The reader can come from now on."""
        self._away_since = time.monotonic()

    def is_unread(self, limit_s: float) -> bool:
        """Whether the reader has left what waits here for so long; to be asked with every chunk.

        Found twice, some time apart: once is after a pause of our own, when it had no turn yet.
        """
        if not self._waiting or self._away_since is None:
            return False
        now = time.monotonic()
        if now - max(self._oldest, self._away_since) <= limit_s:
            return False
        if self._missed_at is None:
            self._missed_at = now
        return now - self._missed_at > limit_s / 8

    async def get(self) -> TokenChunk:
        """The tokens that have come, waiting for the first; what failed comes after them.

        Raises the NodeError that was put in, or that a gap made.
        """
        self._away_since = self._missed_at = None
        await self._filled.wait()
        self._away_since = time.monotonic()
        first = self._waiting.popleft()
        if isinstance(first, NodeError):
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
        if isinstance(chunk, NodeError) or chunk.error is not None or chunk.preempted:
            return None
        self._waiting.popleft()
        return chunk


def _goes_on(chunk: TokenChunk) -> bool:
    return chunk.error is None and not chunk.preempted and chunk.finish_reason is None


def _joined(chunks: list[TokenChunk]) -> TokenChunk:
    return chunks[-1]._replace(
        position=chunks[0].position,
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        logprobs=tuple(entry for chunk in chunks for entry in chunk.logprobs),
    )
