"""Allocator: the pages of one table, each free, used by requests, kept by the cache, or both."""

from __future__ import annotations

from collections.abc import Iterable


class Allocator:
    """Counts for each page how many requests use it and how many cache entries keep it.

    A page with neither is free. Pages are numbered from 1: 0 is the null page.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages, 0, -1))
        self._users = [0] * (num_pages + 1)
        self._keepers = [0] * (num_pages + 1)
        self.num_used = 0  # pages with a user

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages that only the cache keeps: eviction can free them."""
        return self.num_pages - self.num_used - self.num_free

    def take(self, count: int) -> list[int]:
        """`count` free pages, each with one user; there must be as many."""
        assert count <= self.num_free, "the caller looks before it takes"
        pages = [self._free.pop() for _ in range(count)]
        self.use(pages)
        return pages

    def use(self, pages: Iterable[int]) -> None:
        """One more user for each page."""
        for page in pages:
            self.num_used += self._users[page] == 0
            self._users[page] += 1

    def unuse(self, pages: Iterable[int]) -> None:
        """One user less; a page that the cache does not keep either becomes free."""
        for page in pages:
            assert self._users[page] > 0, f"page {page} has no user"
            self._users[page] -= 1
            self.num_used -= self._users[page] == 0
            self._free_if_idle(page)

    def keep(self, pages: Iterable[int]) -> None:
        """One more cache entry for each page, which must not be free."""
        for page in pages:
            assert self._users[page] or self._keepers[page], f"page {page} is free"
            self._keepers[page] += 1

    def unkeep(self, pages: Iterable[int]) -> None:
        """One cache entry less; a page without users then becomes free."""
        for page in pages:
            assert self._keepers[page] > 0, f"page {page} is not cached"
            self._keepers[page] -= 1
            self._free_if_idle(page)

    def counts(self) -> list[tuple[int, int]]:
        """(users, keepers) of every page from 1 on, for the invariant checker."""
        return list(zip(self._users[1:], self._keepers[1:], strict=True))

    def free_pages(self) -> list[int]:
        return list(self._free)

    def _free_if_idle(self, page: int) -> None:
        if not self._users[page] and not self._keepers[page]:
            self._free.append(page)
