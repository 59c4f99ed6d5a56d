"""What finds bugs in a cache finds them: each kind planted into a manager, and caught."""

import dataclasses
import itertools
import sys
from collections import Counter
from pathlib import Path

import pytest

from sluice.cache.manager import CacheManager
from sluice.protocol.messages import IncompatiblePeers
from sluice.transfer.plan import check_mapping

sys.path.insert(0, str(Path(__file__).parent))

from manager_driver import MAX_REQUESTS, Driver, make_manager
from simulated_pools import SPECS

WINDOW, STATE = (next(s.table for s in SPECS if s.name == name) for name in ("window", "state"))


def work(manager):
    """Prompts with common beginnings, computed and received; every page is looked at."""
    driver = Driver(manager)
    for n in range(12):
        shared = [1, 2, 3, 4] * 8
        driver.run([*shared, *[n] * 20])
        manager.check()
        driver.receive([*shared, n, n])
        driver.release(f"g{driver.count}")
        manager.check()


def talk(manager, num_turns=12):
    """A long session, each turn its last one and something new; asserts that turns are cached."""
    driver, prompt = Driver(manager), [1, 2] * 10
    driver.run(prompt)
    for n in range(num_turns):
        before = len(prompt)
        prompt = [*prompt, n, n, n, n, n]
        num_cached = driver.run(prompt)
        assert num_cached == before, f"turn {n}: {num_cached} of {before} tokens were cached"


@pytest.mark.parametrize("workload", [work, talk])
def test_a_manager_without_a_bug_passes(workload):
    workload(make_manager())


def test_two_page_sizes_under_one_name_are_caught():
    twin = dataclasses.replace(SPECS[0], tokens_per_page=8)
    with pytest.raises(IncompatiblePeers, match="more than once"):
        check_mapping([*SPECS, twin], [*SPECS, twin])
    with pytest.raises(AssertionError, match="pool fine: row"):
        work(make_manager(specs=(*SPECS, twin)))


class MappingOutlivesItsSlot(CacheManager):
    """Gives expired pages back, but goes on listing them for the request."""

    def expire(self, holder, num_tokens):
        for table, held in self.page_tables(holder).items():
            expired = held.pages[: max(0, table.first_page(num_tokens) - held.first)]
            self._allocators[table].unuse(expired)


def test_a_mapping_that_outlives_its_slot_is_caught():
    with pytest.raises(AssertionError, match=r"miscounted|has no user"):
        work(make_manager(kind=MappingOutlivesItsSlot))


class WindowFreedUnderTheTree(CacheManager):
    """Frees the window pages of resume points although the tree still lists them."""

    def cache_resume(self, *arguments, **options):
        kept_before = Counter(self._tree.kept_pages()[WINDOW])
        copies = super().cache_resume(*arguments, **options)
        added = Counter(self._tree.kept_pages()[WINDOW]) - kept_before
        self._allocators[WINDOW].unkeep(added.elements())
        return copies


def test_a_window_page_freed_while_the_tree_needs_it_is_caught_by_the_books():
    with pytest.raises(AssertionError, match="miscounted"):
        work(make_manager(kind=WindowFreedUnderTheTree))


def test_a_window_page_freed_while_the_tree_needs_it_is_caught_by_its_rows():
    manager = make_manager(kind=WindowFreedUnderTheTree)
    driver, prompt = Driver(manager), [1, 2] * 16
    driver.run(prompt)
    others = [driver.prefill([n] * 60)[0] for n in range(3, 2 + MAX_REQUESTS)]
    with pytest.raises(AssertionError, match=r"pool window: row|is free"):
        for _, holder in itertools.product(range(20), others):
            driver.compute(holder, 3, resume=False)  # takes what was freed, and writes into it
        driver.prefill([*prompt, 9])


class StateFollowsHistory(CacheManager):
    """Treats state as if the history of Full pools had it: no resume point keeps its pages."""

    def _resume(self, *arguments):
        resume, copies = super()._resume(*arguments)
        pages = {table: pages for table, pages in resume.pages.items() if table != STATE}
        return dataclasses.replace(resume, pages=pages), copies


def test_state_left_behind_because_it_followed_another_pool_is_caught():
    with pytest.raises(AssertionError, match="pool state: row"):
        work(make_manager(kind=StateFollowsHistory))


class KeysChangeEveryTurn(CacheManager):
    """Lets something that differs from turn to turn into the keys."""

    turns = itertools.count()

    def keys_of(self, token_ids, salt=""):
        return super().keys_of(token_ids, f"{salt}{next(self.turns)}")


class ResumeTooLate(CacheManager):
    """Keeps nothing to go on from, only history."""

    def cache_resume(self, *arguments, **options):
        return []


@pytest.mark.parametrize("kind", [KeysChangeEveryTurn, ResumeTooLate])
def test_a_session_with_no_cached_tokens_is_caught(kind):
    with pytest.raises(AssertionError, match=r"turn 0: 0 of 20 tokens were cached"):
        talk(make_manager(kind=kind))
