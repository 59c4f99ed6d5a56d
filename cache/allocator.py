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
        pages = self._free[self.num_free - count :]
        del self._free[self.num_free - count :]
        pages.reverse()
        self.use(pages)
        return pages

    # These four run for every page of every step: plain loops over local names, no calls.

    def use(self, pages: Iterable[int]) -> None:
        """One more user for each page."""
        users = self._users
        for page in pages:
            if not users[page]:
                self.num_used += 1
            users[page] += 1

    def unuse(self, pages: Iterable[int]) -> None:
        """One user less; a page that the cache does not keep either becomes free."""
        users, keepers = self._users, self._keepers
        for page in pages:
            assert users[page] > 0, f"page {page} has no user"
            users[page] -= 1
            if not users[page]:
                self.num_used -= 1
                if not keepers[page]:
                    self._free.append(page)

    def keep(self, pages: Iterable[int]) -> None:
        """One more cache entry for each page, which must not be free."""
        users, keepers = self._users, self._keepers
        for page in pages:
            assert users[page] or keepers[page], f"page {page} is free"
            keepers[page] += 1

    def unkeep(self, pages: Iterable[int]) -> None:
        """One cache entry less; a page without users then becomes free."""
        users, keepers = self._users, self._keepers
        for page in pages:
            assert keepers[page] > 0, f"page {page} is not cached"
            keepers[page] -= 1
            if not keepers[page] and not users[page]:
                self._free.append(page)

    def counts(self) -> list[tuple[int, int]]:
        """(users, keepers) of every page from 1 on, for the invariant checker."""
        return list(zip(self._users[1:], self._keepers[1:], strict=True))

    def free_pages(self) -> list[int]:
        return list(self._free)
