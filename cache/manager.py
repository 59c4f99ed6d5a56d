"""CacheManager: which request holds which pages, in all tables at once, and what outlives it.

A holder is one attempt at a request, named by its grant. The life of a page:

    free ──grant/extend──► granted ──rows written──► live ──expire/release──► free
                                                      │                        ▲
                                                      └─cache_*─► cached ─evict┘

1. `grant` admits a request with pages in every table or in none. Pages of a cached prefix are
   shared; those the request will write into are copied first.
2. `extend` adds the pages that computing on to n tokens needs.
3. `cache_history` and `cache_resume` keep pages for later requests with the same beginning.
4. `expire` gives back what retention no longer needs once n tokens are computed.
5. `release` gives back everything; what the cache keeps stays until it is evicted.

A page is free, used by requests, kept by the cache, or both; `check` asserts the books. Owned by a
node's loop thread; no method may be called from another one.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sluice.cache.allocator import Allocator
from sluice.cache.journal import CacheReport
from sluice.cache.keys import PrefixKeys, chained_keys, root_key
from sluice.cache.prefix_tree import Hit, PrefixTree, Resume
from sluice.cache.spec import PoolSpec, TableSpec, tables_of, unit_tokens


class NoRoom(Exception):
    """The request cannot be admitted or extended now; nothing was taken."""


@dataclass(frozen=True)
class PageCopy:
    """The content of page `source` is to be copied to `target`, in every pool of the table."""

    table: TableSpec
    source: int
    target: int


class PageTable:
    """One request's physical pages in one table: logical pages [first, first + len(pages)).

    An array of 8-byte integers, since every step copies the pages of its requests into a tensor.
    """

    __slots__ = ("first", "pages")

    def __init__(self, first: int, pages: Iterable[int] = ()) -> None:
        self.first = first
        self.pages = array("q", pages)

    @property
    def end(self) -> int:
        return self.first + len(self.pages)

    def page(self, logical_page: int) -> int:
        """The physical page of a logical one, which must be held."""
        return self.pages[logical_page - self.first]

    def slice(self, logical: range) -> array[int]:
        """Physical pages of these logical ones, all of which must be held."""
        assert not logical or (self.first <= logical.start and logical.stop <= self.end)
        return self.pages[logical.start - self.first : logical.stop - self.first]

    def drop_before(self, logical_page: int) -> array[int]:
        """Forget logical pages below `logical_page`; returns their physical pages."""
        count = max(0, min(logical_page - self.first, len(self.pages)))
        dropped, self.pages = self.pages[:count], self.pages[count:]
        self.first = max(self.first, logical_page)
        return dropped


@dataclass(slots=True)
class Holder:
    """A request's pages, and until when a step changes nothing about them.

    They reach for `room_tokens` tokens; from `expiry_tokens` computed tokens on, some expire.
    """

    tables: dict[TableSpec, PageTable]
    room_tokens: int = 0
    expiry_tokens: float = 0

    def __post_init__(self) -> None:
        self.pages_came()
        self.pages_went()

    def pages_came(self) -> None:
        self.room_tokens = min(
            pages.end * table.tokens_per_page for table, pages in self.tables.items()
        )

    def missing_pages(self, num_tokens: int) -> dict[TableSpec, int]:
        """How many pages to add for so many tokens, in the tables that lack any."""
        return {
            table: table.page_end(num_tokens) - pages.end
            for table, pages in self.tables.items()
            if pages.end * table.tokens_per_page < num_tokens
        }

    def pages_went(self) -> None:
        expiring = ((t, pages) for t, pages in self.tables.items() if not t.keeps_all)
        self.expiry_tokens = min(
            (table.page_expires_at(pages.first) for table, pages in expiring), default=math.inf
        )


class CacheManager:
    """Pages of every table of one node. `num_pages` counts usable pages, without the null page.

    identity: what cached rows depend on besides token ids, such as the model's fingerprint.
    prefix_cache: without it nothing outlives its request.
    replay_tokens: how far before the end of a cached history computing must start for window and
        state to come out right though none of it is at hand; None if it never does.
    """

    def __init__(
        self,
        specs: Sequence[PoolSpec],
        num_pages: Mapping[TableSpec, int],
        max_requests: int,
        *,
        identity: str = "",
        prefix_cache: bool = True,
        replay_tokens: int | None = None,
    ) -> None:
        self.specs = tuple(specs)
        self.tables = tables_of(specs)
        self.num_pages = dict(num_pages)
        self.max_requests = max_requests
        self._identity = identity
        self.prefix_cache = prefix_cache
        self._full = tuple(table for table in self.tables if table.keeps_all)
        self._allocators = {table: Allocator(num_pages[table]) for table in self.tables}
        self.unit_tokens = unit_tokens(specs)
        if len(self._full) == len(self.tables):
            replay_tokens = 0  # history is all there is
        self._tree = PrefixTree(self._allocators, self._full, self.unit_tokens, replay_tokens)
        self._holders: dict[str, Holder] = {}

    def keys_of(self, token_ids: Sequence[int], salt: str = "") -> PrefixKeys:
        """Keys of a prompt; requests with different salts never share."""
        return chained_keys(root_key(self._identity, salt), token_ids, self.unit_tokens)

    def find_resumable(self, keys: PrefixKeys, token_ids: Sequence[int]) -> Hit:
        """The longest cached prefix from which these tokens can be computed on.

        It leaves at least one token to compute. Where the hit's `history_tokens` reach further, the
        tokens up to there are computed for window and state only: their rows in Full pools must
        not be written, and nothing may be resumed before.
        """
        return self._tree.resumable(keys, token_ids)

    def find_history(self, keys: PrefixKeys) -> Hit:
        """The longest cached prefix whose rows in Full pools need not be sent again."""
        return self._tree.history(keys)

    def grant(
        self, holder: str, *, num_tokens: int, max_tokens: int, hit: Hit | None = None
    ) -> list[PageCopy]:
        """Admit a request with `num_tokens` computed tokens, with Full pages for `max_tokens`.

        hit: a cached prefix to share; one with a resume point must be as long as `num_tokens`.
        Returns copies to carry out before anything else. Raises NoRoom, naming what is short.
        """
        assert holder not in self._holders, f"{holder} holds pages already"
        if len(self._holders) >= self.max_requests:
            raise NoRoom(f"{self.max_requests} requests are running (max_running_requests)")
        wanted = {table: table.pages_to_admit(num_tokens, max_tokens) for table in self.tables}
        held = {table: self._shared(table, wanted[table], hit or Hit()) for table in self.tables}
        missing = {t: pages.stop - held[t].end for t, pages in wanted.items()}
        missing = {table: count for table, count in missing.items() if count > 0}
        # Making room must evict neither what is shared nor what is still to be copied from.
        sources = {table: self._partial_page(table, hit or Hit()) for table in self.tables}
        self._use(held)
        self._use(sources)
        try:
            self._grow(held, missing)
        except NoRoom:
            self._unuse(held)
            raise
        finally:
            self._unuse(sources)
        self._holders[holder] = Holder(held)
        return [
            PageCopy(table, page, held[table].page(partial.first))
            for table, partial in sources.items()
            for page in partial.pages
        ]

    def extend(self, holder: str, num_tokens: int) -> None:
        """Add the pages that computing up to `num_tokens` tokens needs. Raises NoRoom."""
        held = self._holders[holder]
        if num_tokens > held.room_tokens:
            self._grow(held.tables, held.missing_pages(num_tokens))
            held.pages_came()

    def cache_history(self, holder: str, keys: PrefixKeys, num_tokens: int) -> None:
        """Keep the whole units among the holder's first `num_tokens` computed tokens."""
        if not self.prefix_cache:
            return
        held = self._holders[holder].tables
        units = keys.upto(num_tokens // self.unit_tokens)
        self._tree.add_history(units, {table: held[table].pages for table in self._full})

    def cache_resume(
        self,
        holder: str,
        keys: PrefixKeys,
        token_ids: Sequence[int],
        num_tokens: int,
        *,
        spare: bool = False,
    ) -> list[PageCopy]:
        """Keep what it takes to go on from `num_tokens`, which the holder has just computed.

        spare: give it up before all others, until it is used for the first time.
        Its history must be cached. Returns copies to carry out before the holder goes on; a page
        it still writes into is not shared. Does nothing where there is no room.
        """
        units = keys.upto(num_tokens // self.unit_tokens)
        start = len(units.units) * self.unit_tokens
        tail = tuple(token_ids[start:num_tokens])
        if not self.prefix_cache or not self._tree.can_add_resume(units, tail):
            return []
        targets = self._targets_to_resume(num_tokens)
        if targets is None:
            return []
        copies: list[PageCopy] = []
        if self._tree.can_add_resume(units, tail):  # making room may have taken the history
            held = self._holders[holder].tables
            resume, copies = self._resume(held, start, num_tokens, targets)
            self._tree.add_resume(units, tail, resume, spare=spare)
        for table, page in targets.items():
            self._allocators[table].unuse([page])
        return copies

    def expire(self, holder: str, num_tokens: int) -> None:
        """Give back pages that no row live at `num_tokens` computed tokens lies in."""
        held = self._holders[holder]
        if num_tokens >= held.expiry_tokens:
            for table, pages in held.tables.items():
                if num_tokens >= table.page_expires_at(pages.first):
                    expired = pages.drop_before(table.first_page(num_tokens))
                    self._allocators[table].unuse(expired)
            held.pages_went()

    def release(self, holder: str) -> None:
        """Give back all pages of the request."""
        self._unuse(self._holders.pop(holder).tables)

    def page_tables(self, holder: str) -> Mapping[TableSpec, PageTable]:
        """The holder's pages in every table, in the order of `tables`."""
        return self._holders[holder].tables

    def __contains__(self, holder: str) -> bool:
        return holder in self._holders

    @property
    def num_requests(self) -> int:
        return len(self._holders)

    def usage(self) -> dict[str, dict[str, int]]:
        """Pages of each pool by state: free, used by requests, cached only."""
        return {spec.name: self._usage(self._allocators[spec.table]) for spec in self.specs}

    def report(self, version: int | None) -> CacheReport:
        """Keys of cached history, or what changed of them since an earlier report's version.

        None: for somebody who does not want to know.
        """
        return CacheReport() if version is None else self._tree.journal.since(version)

    def check(self) -> None:
        """Assert that the books are right: users, keepers and the free list of every page."""
        self._tree.check()
        kept = self._tree.kept_pages()
        for table, allocator in self._allocators.items():
            users = Counter(p for held in self._holders.values() for p in held.tables[table].pages)
            keepers = Counter(kept[table])
            for page, counts in enumerate(allocator.counts(), start=1):
                assert counts == (users[page], keepers[page]), f"{table}: page {page} miscounted"
            idle = set(range(1, allocator.num_pages + 1)) - users.keys() - keepers.keys()
            free = allocator.free_pages()
            assert len(free) == len(idle) and set(free) == idle, f"{table}: the free list is wrong"
            assert allocator.num_used == len(users), f"{table}: used pages are miscounted"

    @staticmethod
    def _usage(allocator: Allocator) -> dict[str, int]:
        return {
            "free": allocator.num_free,
            "used": allocator.num_used,
            "cached": allocator.num_cached,
        }

    def _shared(self, table: TableSpec, wanted: range, hit: Hit) -> PageTable:
        """The cached pages that a new request can use as they are."""
        shared = PageTable(wanted.start, hit.history.get(table, ()))
        if hit.resume is not None and table in hit.resume.pages:
            whole = hit.num_tokens // table.tokens_per_page - hit.resume.first[table]
            shared.pages.extend(hit.resume.pages[table][:whole])
        return shared

    @staticmethod
    def _partial_page(table: TableSpec, hit: Hit) -> PageTable:
        """The cached page that holds rows on both sides of the hit's end, if there is one."""
        logical = hit.num_tokens // table.tokens_per_page
        if hit.resume is None or table not in hit.resume.pages:
            return PageTable(logical)
        whole = logical - hit.resume.first[table]
        return PageTable(logical, hit.resume.pages[table][whole:])

    def _targets_to_resume(self, num_tokens: int) -> dict[TableSpec, int] | None:
        """A page to copy to for each table whose page is cut by `num_tokens`; None if no room."""
        cut = [t for t in self.tables if num_tokens % t.tokens_per_page and _live(t, num_tokens)]
        if not all(self._make_room(table, 1) for table in cut):
            return None
        return {table: self._allocators[table].take(1)[0] for table in cut}

    def _resume(
        self,
        held: Mapping[TableSpec, PageTable],
        unit_end: int,
        num_tokens: int,
        targets: Mapping[TableSpec, int],
    ) -> tuple[Resume, list[PageCopy]]:
        """The holder's pages at `num_tokens` that no unit of history has, cut pages as copies."""
        pages, first, copies = {}, {}, []
        for table in self.tables:
            live = _live(table, num_tokens)
            if table in self._full:
                live = range(unit_end // table.tokens_per_page, live.stop)
            kept = held[table].slice(live)
            if table in targets:
                copies.append(PageCopy(table, kept[-1], targets[table]))
                kept[-1] = targets[table]
            if kept:
                pages[table], first[table] = kept, live.start
        return Resume(num_tokens, pages, first), copies

    def _grow(self, held: Mapping[TableSpec, PageTable], missing: Mapping[TableSpec, int]) -> None:
        """Add so many pages in all tables, or raise NoRoom and in none."""
        for table, count in missing.items():
            if not self._make_room(table, count):
                pools = ", ".join(spec.name for spec in self.specs if spec.table == table)
                free = self._allocators[table].num_free
                raise NoRoom(
                    f"pools {pools}: {count} pages needed, {free} of {self.num_pages[table]} free"
                )
        for table, count in missing.items():
            held[table].pages.extend(self._allocators[table].take(count))

    def _make_room(self, table: TableSpec, num_pages: int) -> bool:
        """Whether the table has so many free pages, once the cache has given up what it can."""
        allocator = self._allocators[table]
        if allocator.num_free + allocator.num_cached < num_pages:
            return False  # the cache is not emptied for what cannot be
        self._tree.evict(table, num_pages)
        return allocator.num_free >= num_pages

    def _use(self, held: Mapping[TableSpec, PageTable]) -> None:
        for table, pages in held.items():
            self._allocators[table].use(pages.pages)

    def _unuse(self, held: Mapping[TableSpec, PageTable]) -> None:
        for table, pages in held.items():
            self._allocators[table].unuse(pages.pages)


def _live(table: TableSpec, num_tokens: int) -> range:
    """Logical pages held between steps at this length."""
    return table.pages(num_tokens, num_tokens)
