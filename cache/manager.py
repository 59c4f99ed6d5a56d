"""CacheManager: which request holds which pages, in all tables at once.

A holder is one attempt at a request, named by its grant.

The life of a page:

    free ──grant/extend──► granted ──rows written──► live ──expire/release──► free

1. `grant` admits a request with pages in every table or in none: all pages of its greatest length
   in Full tables, the live ones in the others.
2. `extend` adds the pages that computing tokens [start, end) needs.
3. `expire` gives back what retention no longer needs once n tokens are computed.
4. `release` gives back everything.

Owned by a node's loop thread; no method may be called from another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sluice.cache.spec import PoolSpec, TableSpec, tables_of


class NoRoom(Exception):
    """The request cannot be admitted or extended now; nothing was taken."""


class PageTable:
    """One request's physical pages in one table: logical pages [first, first + len(pages))."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.pages: list[int] = []

    @property
    def end(self) -> int:
        return self.first + len(self.pages)

    def drop_before(self, logical_page: int) -> list[int]:
        """Forget logical pages below `logical_page`; returns their physical pages."""
        count = max(0, min(logical_page - self.first, len(self.pages)))
        dropped, self.pages = self.pages[:count], self.pages[count:]
        self.first = max(self.first, logical_page)
        return dropped


class CacheManager:
    """Pages of every table of one node. `num_pages` counts usable pages, without the null page."""

    def __init__(
        self, specs: Sequence[PoolSpec], num_pages: Mapping[TableSpec, int], max_requests: int
    ) -> None:
        self.specs = tuple(specs)
        self.tables = tables_of(specs)
        self.num_pages = dict(num_pages)
        self.max_requests = max_requests
        self._free = {table: list(range(num_pages[table], 0, -1)) for table in self.tables}
        self._holders: dict[str, dict[TableSpec, PageTable]] = {}

    def grant(self, holder: str, *, num_tokens: int, max_tokens: int) -> None:
        """Admit a request that has `num_tokens` rows' worth of tokens and grows to `max_tokens`.

        Raises NoRoom, naming what is short.
        """
        assert holder not in self._holders, f"{holder} holds pages already"
        if len(self._holders) >= self.max_requests:
            raise NoRoom(f"{self.max_requests} requests are running (max_running_requests)")
        wanted = {table: table.pages_to_admit(num_tokens, max_tokens) for table in self.tables}
        held = {table: PageTable(pages.start) for table, pages in wanted.items()}
        self._grow(held, wanted)
        self._holders[holder] = held

    def extend(self, holder: str, start: int, end: int) -> None:
        """Add the pages needed while tokens [start, end) are computed. Raises NoRoom."""
        held = self._holders[holder]
        self._grow(held, {table: table.pages(start, end) for table in self.tables})

    def expire(self, holder: str, num_tokens: int) -> None:
        """Give back pages that no row live at `num_tokens` computed tokens lies in."""
        for table, held in self._holders[holder].items():
            self._free[table].extend(held.drop_before(table.pages(num_tokens, num_tokens).start))

    def release(self, holder: str) -> None:
        """Give back all pages of the request."""
        for table, held in self._holders.pop(holder).items():
            self._free[table].extend(held.pages)

    def page_tables(self, holder: str) -> Mapping[TableSpec, PageTable]:
        return self._holders[holder]

    def __contains__(self, holder: str) -> bool:
        return holder in self._holders

    @property
    def num_requests(self) -> int:
        return len(self._holders)

    def usage(self) -> dict[str, dict[str, int]]:
        """Pages of each pool by state: free, used, cached."""
        return {
            spec.name: {
                "free": len(self._free[spec.table]),
                "used": self.num_pages[spec.table] - len(self._free[spec.table]),
                "cached": 0,
            }
            for spec in self.specs
        }

    def check(self) -> None:
        """Assert that every page is free or held by exactly one request."""
        for table in self.tables:
            pages = list(self._free[table])
            for held in self._holders.values():
                pages += held[table].pages
            expected = list(range(1, self.num_pages[table] + 1))
            assert sorted(pages) == expected, f"{table}: pages lost or held twice"

    def _grow(self, held: Mapping[TableSpec, PageTable], wanted: Mapping[TableSpec, range]) -> None:
        """Extend `held` to the end of `wanted` in all tables, or raise NoRoom and in none."""
        missing = {table: max(0, wanted[table].stop - held[table].end) for table in wanted}
        for table, count in missing.items():
            if count > len(self._free[table]):
                pools = ", ".join(spec.name for spec in self.specs if spec.table == table)
                raise NoRoom(
                    f"pools {pools}: {count} pages needed, {len(self._free[table])} of "
                    f"{self.num_pages[table]} free"
                )
        for table, count in missing.items():
            held[table].pages += [self._free[table].pop() for _ in range(count)]
