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
from sluice.engine.protocol import NodeInfo


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
        self._pages: dict[TableSpec, int] = {
            table: 0 for table in tables_of(info.specs) if table.keeps_all
        }
        self.idle = asyncio.Event()  # set while nobody holds the node
        self.idle.set()

    @property
    def running(self) -> int:
        return len(self._tokens)

    @property
    def _num_busy(self) -> int:
        return self.running + self.num_others

    @property
    def outstanding_tokens(self) -> int:
        """Tokens to compute of all that hold the node."""
        return sum(self._work.values())

    @property
    def reserved_pages(self) -> dict[TableSpec, int]:
        return dict(self._pages)

    @property
    def load(self) -> float:
        """How full the node is by its scarcest resource; 1.0 is full."""
        parts = [self._num_busy / self._info.max_running_requests]
        parts += [
            pages / max(1, self._info.num_pages[table]) for table, pages in self._pages.items()
        ]
        if self._max_outstanding_tokens is not None:
            parts.append(self.outstanding_tokens / self._max_outstanding_tokens)
        return max(parts)

    @functools.cached_property
    def max_tokens(self) -> int:
        """Longest request that fits when the node is empty."""
        spans = [table.tokens_per_page * self._info.num_pages[table] for table in self._pages]
        return min([self._info.max_model_len, *spans])

    def has_room(self, num_tokens: int) -> bool:
        """Whether a request of `num_tokens` fits beside those that hold the node now."""
        limit = self._max_outstanding_tokens
        return (
            self._num_busy < self._info.max_running_requests
            and (limit is None or self.outstanding_tokens < limit)
            and all(
                pages + _num_pages(table, num_tokens) <= self._info.num_pages[table]
                for table, pages in self._pages.items()
            )
        )

    def share_with(self, num_tokens: int) -> float:
        """Part of the batch and of the scarcest table taken, with a request of so many tokens."""
        pages = [
            (taken + _num_pages(table, num_tokens)) / max(1, self._info.num_pages[table])
            for table, taken in self._pages.items()
        ]
        return (self._num_busy + 1) / self._info.max_running_requests + max(pages, default=0.0)

    def holds(self, holder: str) -> bool:
        """Whether the holder has not given back what it took."""
        return holder in self._tokens

    def take(self, holder: str, num_tokens: int, work_tokens: int | None = None) -> None:
        """work_tokens: how many of the tokens have to be computed, if not all."""
        assert holder not in self._tokens, f"{holder} already holds {self._info.node_id}"
        self._tokens[holder] = num_tokens
        self._work[holder] = num_tokens if work_tokens is None else work_tokens
        for table in self._pages:
            self._pages[table] += _num_pages(table, num_tokens)
        self.idle.clear()

    def grow(self, holder: str, num_tokens: int) -> None:
        """The holder's request has become longer than what was promised to it."""
        promised = self._tokens.get(holder, num_tokens)
        if num_tokens > promised:
            self._tokens[holder] = num_tokens
            for table in self._pages:
                self._pages[table] += _num_pages(table, num_tokens) - _num_pages(table, promised)

    def give_back(self, holder: str) -> None:
        """Return what the holder took; does nothing if that was done before."""
        num_tokens = self._tokens.pop(holder, None)
        self._work.pop(holder, None)
        if num_tokens is None:
            return
        for table in self._pages:
            self._pages[table] -= _num_pages(table, num_tokens)
        if not self._tokens:
            self.idle.set()
        self._on_return()


def _num_pages(table: TableSpec, num_tokens: int) -> int:
    return len(table.pages(0, num_tokens))
