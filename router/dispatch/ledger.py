"""Ledger: what this router has promised of one node.

A router that is the only one hands out all of a node's pages, so it can tell, without asking,
whether a request fits now; beside others it knows how many requests they have there, and the node
refuses what does not fit. Tables whose retention keeps every row are counted in pages; the others
need a bounded number for each request and are covered by the node's limit on running requests.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

from sluice.cache.spec import TableSpec, tables_of
from sluice.protocol.messages import NodeInfo


class Ledger:
    """Promises by holder (one attempt of one request). Giving back twice is harmless.

    max_outstanding_tokens: a node with this many tokens to compute takes nothing more.
    on_return: called after each return of credit.
    """

    def __init__(
        self,
        info: NodeInfo,
        *,
        max_outstanding_tokens: int | None,
        on_return: Callable[[], None],
    ) -> None:
        self.num_others = 0  # requests of other routers, as the node last said
        self._info = info
        self._max_outstanding_tokens = max_outstanding_tokens
        self._on_return = on_return
        self._tokens: dict[str, int] = {}  # holder -> tokens that pages are promised for
        self._work: dict[str, int] = {}  # holder -> tokens to compute
        self.outstanding_tokens = 0  # tokens to compute of all that hold the node
        self._books = [
            _Book(table, info.num_pages[table])
            for table in tables_of(info.specs)
            if table.keeps_all
        ]
        self.idle = asyncio.Event()  # set while nobody holds the node
        self.idle.set()

    @property
    def running(self) -> int:
        return len(self._tokens)

    @property
    def _num_busy(self) -> int:
        return self.running + self.num_others

    @property
    def load(self) -> float:
        """How full the node is by its scarcest resource; 1.0 is full."""
        parts = [self._num_busy / self._info.max_running_requests]
        parts += [book.share for book in self._books]
        if self._max_outstanding_tokens is not None:
            parts.append(self.outstanding_tokens / self._max_outstanding_tokens)
        return max(parts)

    @functools.cached_property
    def max_tokens(self) -> int:
        """Longest request that fits when the node is empty."""
        spans = [book.table.tokens_per_page * book.num_pages for book in self._books]
        return min([self._info.max_model_len, *spans])

    def room_tokens(self, beside: int = 0) -> int:
        """Longest request that fits beside those that hold the node now; 0 if none does.

        beside: tokens of one more that shall keep its place.
        """
        limit = self._max_outstanding_tokens
        if limit is not None and self.outstanding_tokens >= limit:
            return 0
        if self._num_busy + (beside > 0) >= self._info.max_running_requests:
            return 0
        room = self._info.max_model_len
        for book in self._books:
            room = min(room, book.room_tokens(beside))
        return max(0, room)

    def share_with(self, num_tokens: int) -> float:
        """Part of the batch and of the scarcest table taken, with a request of so many tokens."""
        batch = (self._num_busy + 1) / self._info.max_running_requests
        return batch + max([book.share_with(num_tokens) for book in self._books], default=0.0)

    def holds(self, holder: str) -> bool:
        """Whether the holder has not given back what it took."""
        return holder in self._tokens

    def take(self, holder: str, num_tokens: int, work_tokens: int | None = None) -> None:
        """work_tokens: how many of the tokens have to be computed, if not all."""
        assert holder not in self._tokens, f"{holder} already holds {self._info.node_id}"
        self._tokens[holder] = num_tokens
        self._work[holder] = num_tokens if work_tokens is None else work_tokens
        self.outstanding_tokens += self._work[holder]
        for book in self._books:
            book.change(0, num_tokens)
        self.idle.clear()

    def grow(self, holder: str, num_tokens: int) -> None:
        """The holder's request has become longer than what was promised to it."""
        promised = self._tokens.get(holder, num_tokens)
        if num_tokens > promised:
            self._tokens[holder] = num_tokens
            for book in self._books:
                book.change(promised, num_tokens)

    def give_back(self, holder: str) -> None:
        """Return what the holder took; does nothing if that was done before."""
        num_tokens = self._tokens.pop(holder, None)
        if num_tokens is None:
            return
        self.outstanding_tokens -= self._work.pop(holder)
        for book in self._books:
            book.change(num_tokens, 0)
        if not self._tokens:
            self.idle.set()
        self._on_return()


class _Book:
    """Pages of one table. Read for every node at every look at the queue."""

    __slots__ = ("num_pages", "table", "taken")

    def __init__(self, table: TableSpec, num_pages: int) -> None:
        self.table = table
        self.num_pages = num_pages
        self.taken = 0

    @property
    def share(self) -> float:
        return self.share_with(0)

    def room_tokens(self, beside: int) -> int:
        """Longest request for which there are pages, beside one of so many tokens."""
        table = self.table
        return table.tokens_per_page * (self.num_pages - self.taken - table.page_end(beside))

    def share_with(self, num_tokens: int) -> float:
        return (self.taken + self.table.page_end(num_tokens)) / max(1, self.num_pages)

    def change(self, before: int, after: int) -> None:
        """A request of `before` tokens has become one of `after`; 0: there is none."""
        self.taken += self.table.page_end(after) - self.table.page_end(before)
