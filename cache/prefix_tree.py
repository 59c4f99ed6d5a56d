"""PrefixTree: which prefixes of earlier requests can be used again, and which to give up first.

A prefix of n tokens can be resumed if `pages(n, n)` of *every* table is at hand. Two things are
kept for that, with lives of their own:

    history   unit by unit, the pages of Full tables:        |unit|unit|unit|unit|
    resume    at chosen lengths n, the pages(n, n) of the               ▲      ▲
    points    other tables, and Full pages cut by n                     n1     n2

History without a resume point saves a transfer (the receiver gets window and state anyway). It
saves computation too, all but a fixed number of tokens at its end, which are replayed: computed
again for the window and state they leave, while the history keeps its rows.

    |unit|unit|unit|unit|              replay_tokens is the model's; nothing where all is history
                ├replay─┤──new──►

So resume points may be dropped alone, and fall with the history below them.

Both are ordered by last use. Using a prefix touches its units from the deepest to the root, so the
unit used longest ago never has children.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sluice.cache.allocator import Allocator
from sluice.cache.journal import Journal
from sluice.cache.keys import Key, PrefixKeys
from sluice.cache.spec import TableSpec

Pages = Mapping[TableSpec, Sequence[int]]
TailKey = tuple[Key, tuple[int, ...]]  # the last whole unit, and the tokens after it


@dataclass
class Unit:
    """One unit of history: `pages` of each Full table."""

    key: Key
    parent: Unit | None
    pages: Pages
    num_children: int = 0


@dataclass(frozen=True)
class Resume:
    """A length at which computation can go on: pages from `pages(n, n)`, for tables that have any.

    first: the logical page that each table's pages begin with.
    """

    num_tokens: int
    pages: Pages
    first: Mapping[TableSpec, int]


@dataclass(frozen=True)
class Hit:
    """A cached prefix. `history` has each Full table's whole pages, from logical page 0 on.

    num_tokens: where computing, or sending, goes on.
    history_tokens: where the history ends; beyond `num_tokens` where tokens are replayed.
    known_tokens: how long the cached history is; a prompt that shares it was computed before.
    """

    num_tokens: int = 0
    history: Pages = field(default_factory=dict)
    resume: Resume | None = None
    history_tokens: int = 0
    known_tokens: int = 0


class PrefixTree:
    """Cached prefixes over the allocators of a node's tables. Belongs to the loop thread."""

    def __init__(
        self,
        allocators: Mapping[TableSpec, Allocator],
        full: Sequence[TableSpec],
        unit_tokens: int,
        replay_tokens: int | None,
    ) -> None:
        """full: the tables that keep everything, whose spans divide `unit_tokens`.

        replay_tokens: how many tokens at the end of a history must be computed again; None if only
        resume points help.
        """
        self.unit_tokens = unit_tokens
        self._allocators = allocators
        self._full = tuple(full)
        self._replay_tokens = replay_tokens
        self._units: OrderedDict[Key, Unit] = OrderedDict()
        self._resumes: OrderedDict[TailKey, Resume] = OrderedDict()
        self._spares: OrderedDict[TailKey, Resume] = OrderedDict()
        self._tails: dict[Key, dict[int, set[TailKey]]] = {}  # by their last unit, and length
        self.journal = Journal()  # of the units' keys

    def __len__(self) -> int:
        return len(self._units)

    @property
    def num_resumes(self) -> int:
        return len(self._resumes) + len(self._spares)

    def history(self, keys: PrefixKeys) -> Hit:
        """The longest cached history of a prompt with these keys."""
        units = self._path(keys)
        self._touch(units[-1] if units else None)
        num_tokens = len(units) * self.unit_tokens
        return Hit(
            num_tokens,
            self._pages_of(units),
            history_tokens=num_tokens,
            known_tokens=num_tokens,
        )

    def resumable(self, keys: PrefixKeys, token_ids: Sequence[int]) -> Hit:
        """The longest cached prefix that can be resumed and leaves a token to compute."""
        units = self._path(keys)
        known_tokens, limit = len(units) * self.unit_tokens, len(token_ids) - 1
        depth, tail_key = self._longest_resume(units, keys, token_ids, limit)
        num_tokens = depth * self.unit_tokens + len(tail_key[1]) if tail_key else 0
        replayable = min(len(units), limit // self.unit_tokens)
        start = self._replayed_from(replayable)
        if start > num_tokens:
            depth, tail_key, num_tokens = replayable, None, start
        self._touch(units[depth - 1] if depth else None)
        return Hit(
            num_tokens,
            self._pages_of(units[:depth]),
            resume=self._prove(tail_key) if tail_key else None,
            history_tokens=max(num_tokens, depth * self.unit_tokens),
            known_tokens=known_tokens,
        )

    def add_history(self, keys: PrefixKeys, pages: Pages) -> None:
        """Keep whole units; pages: each Full table's, from logical page 0, at least that many."""
        known = len(keys.units)  # mostly all but what the last chunk added
        while known and keys.units[known - 1] not in self._units:
            known -= 1
        unit = self._units[keys.units[known - 1]] if known else None
        for depth in range(known, len(keys.units)):
            unit = self._new_unit(keys.units[depth], unit, depth, pages)
        self._touch(unit)

    def can_add_resume(self, keys: PrefixKeys, tail: tuple[int, ...]) -> bool:
        """Whether a resume point there would be new, and its history is cached."""
        if self._has_resume((keys.last, tail)):
            return False
        return not keys.units or keys.last in self._units  # a unit is there only with all before

    def add_resume(
        self, keys: PrefixKeys, tail: tuple[int, ...], resume: Resume, *, spare: bool
    ) -> None:
        """Keep a resume point after the units of `keys` and the tokens of `tail`.

        spare: it goes before all others, until it is used for the first time.
        """
        assert self.can_add_resume(keys, tail), "look before adding"
        (self._spares if spare else self._resumes)[keys.last, tail] = resume
        self._tails.setdefault(keys.last, {}).setdefault(len(tail), set()).add((keys.last, tail))
        for table, kept in resume.pages.items():
            self._allocators[table].keep(kept)

    def evict(self, table: TableSpec, num_pages: int) -> None:
        """Give up what was used longest ago until the table has `num_pages` free pages, if it can.

        Resume points go first for tables they alone keep pages of; history takes along what hangs
        on it.
        """
        allocator = self._allocators[table]
        while allocator.num_free < num_pages:
            if table in self._full and self._units:
                self._drop_unit(next(iter(self._units.values())))
            elif resumes := self._spares or self._resumes:
                self._drop_resume(next(iter(resumes)))
            else:
                return

    def kept_pages(self) -> dict[TableSpec, list[int]]:
        """Every page the tree keeps, as often as it keeps it, for the invariant checker."""
        kept: dict[TableSpec, list[int]] = {table: [] for table in self._allocators}
        entries: list[Unit | Resume] = [*self._units.values()]
        entries += (*self._spares.values(), *self._resumes.values())
        for entry in entries:
            for table, pages in entry.pages.items():
                kept[table] += pages
        return kept

    def check(self) -> None:
        """Assert the tree's own rules."""
        children = dict.fromkeys(self._units, 0)
        for unit in self._units.values():
            if unit.parent is not None:
                assert unit.parent.key in self._units, "history without its beginning"
                children[unit.parent.key] += 1
        assert all(self._units[key].num_children == count for key, count in children.items())
        assert set(self.journal.since(0).added) == self._units.keys(), "the journal tells otherwise"
        if self._units:
            assert next(iter(self._units.values())).num_children == 0, "the oldest unit is a leaf"
        hanging = {
            tail_key
            for last, by_length in self._tails.items()
            for length, tails in by_length.items()
            for tail_key in tails
            if tail_key[0] == last and len(tail_key[1]) == length
        }
        assert hanging == self._resumes.keys() | self._spares.keys()
        assert all(all(by_length.values()) for by_length in self._tails.values()), "nothing empty"
        for (last, _), resume in (*self._resumes.items(), *self._spares.items()):
            deep = resume.num_tokens >= self.unit_tokens
            assert not deep or last in self._units, "a resume point without its history"

    def _path(self, keys: PrefixKeys) -> list[Unit]:
        units = []
        for key in keys.units:
            unit = self._units.get(key)
            if unit is None:
                break
            units.append(unit)
        return units

    def _pages_of(self, units: Sequence[Unit]) -> Pages:
        return {table: [p for unit in units for p in unit.pages[table]] for table in self._full}

    def _replayed_from(self, num_units: int) -> int:
        """Where computing must start for the history to be of use, 0 if that is no gain."""
        if self._replay_tokens is None:
            return 0
        return max(0, num_units * self.unit_tokens - self._replay_tokens)

    def _longest_resume(
        self, units: Sequence[Unit], keys: PrefixKeys, token_ids: Sequence[int], limit: int
    ) -> tuple[int, TailKey | None]:
        """The longest resume point of at most `limit` tokens, and the units before it."""
        for depth in range(len(units), -1, -1):
            last = units[depth - 1].key if depth else keys.root
            tail_key = self._longest_tail(last, token_ids, depth * self.unit_tokens, limit)
            if tail_key is not None:
                return depth, tail_key
        return 0, None

    def _longest_tail(
        self, last: Key, token_ids: Sequence[int], start: int, limit: int
    ) -> TailKey | None:
        """The longest resume point behind the unit `last` that the tokens from `start` reach.

        Looked for by length: there are fewer of these than tokens in a unit, however many points.
        """
        by_length = self._tails.get(last, {})
        for length in sorted(by_length, reverse=True):
            tail_key = last, tuple(token_ids[start : start + length])
            if start + length <= limit and tail_key in by_length[length]:
                return tail_key
        return None

    def _new_unit(self, key: Key, parent: Unit | None, depth: int, pages: Pages) -> Unit:
        own = {table: self._cut(table, depth, pages[table]) for table in self._full}
        for table, kept in own.items():
            self._allocators[table].keep(kept)
        if parent is not None:
            parent.num_children += 1
        unit = self._units[key] = Unit(key, parent, own)
        self.journal.add(key)
        return unit

    def _cut(self, table: TableSpec, depth: int, pages: Sequence[int]) -> Sequence[int]:
        count = self.unit_tokens // table.tokens_per_page
        own = pages[depth * count : (depth + 1) * count]
        assert len(own) == count, "history is added by whole units"
        return own

    def _touch(self, unit: Unit | None) -> None:
        """Mark the unit and all before it as used last, the first of them latest."""
        while unit is not None:
            self._units.move_to_end(unit.key)
            unit = unit.parent

    def _prove(self, tail_key: TailKey) -> Resume:
        """The resume point, which is used now: it is no spare one any more."""
        resume = self._resumes[tail_key] = self._take(tail_key)
        return resume

    def _has_resume(self, tail_key: TailKey) -> bool:
        return tail_key in self._resumes or tail_key in self._spares

    def _take(self, tail_key: TailKey) -> Resume:
        return (self._spares if tail_key in self._spares else self._resumes).pop(tail_key)

    def _drop_resume(self, tail_key: TailKey) -> None:
        resume = self._take(tail_key)
        last, tail = tail_key
        by_length = self._tails[last]
        by_length[len(tail)].discard(tail_key)
        if not by_length[len(tail)]:
            del by_length[len(tail)]
        if not by_length:
            del self._tails[last]
        for table, pages in resume.pages.items():
            self._allocators[table].unkeep(pages)

    def _drop_unit(self, unit: Unit) -> None:
        assert unit.num_children == 0, "history is given up from its end"
        hanging = self._tails.get(unit.key, {}).values()
        for tail_key in [tail_key for tails in hanging for tail_key in tails]:
            self._drop_resume(tail_key)
        del self._units[unit.key]
        self.journal.remove(unit.key)
        if unit.parent is not None:
            unit.parent.num_children -= 1
        for table, pages in unit.pages.items():
            self._allocators[table].unkeep(pages)
