"""CacheManager: all tables or none, nothing lost, nothing held twice."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sluice.cache.budget import plan_pages
from sluice.cache.manager import CacheManager, NoRoom
from sluice.cache.spec import Block, Full, PoolSpec, Window

SPECS = (
    PoolSpec("rows", (0, 1), (2,), "float32", 4, 16, Full()),
    PoolSpec("window", (0, 1), (2,), "float32", 1, 4, Window(10)),
    PoolSpec("state", (1,), (2,), "float32", 1, 4, Block(4, overlap=1)),
)
STEP_TOKENS, MAX_REQUESTS, MAX_LEN = 24, 4, 200


def plan(cache_bytes=40_000):
    return plan_pages(
        SPECS,
        cache_bytes=cache_bytes,
        max_requests=MAX_REQUESTS,
        max_step_tokens=STEP_TOKENS,
        max_model_len=MAX_LEN,
    )


def test_a_grant_takes_pages_in_all_tables_or_in_none():
    manager = CacheManager(SPECS, {spec.table: 3 for spec in SPECS}, max_requests=4)
    before = manager.usage()
    with pytest.raises(NoRoom, match="pools rows: 4 pages needed, 3 of 3 free"):
        manager.grant("a", num_tokens=9, max_tokens=64)
    assert manager.usage() == before


def test_expired_pages_return_to_the_free_list():
    manager = CacheManager(SPECS, plan(), max_requests=4)
    manager.grant("a", num_tokens=0, max_tokens=100)
    manager.extend("a", 24)
    held = manager.usage()["window"]["used"]
    manager.expire("a", 24)
    assert held == 6
    assert manager.usage()["window"]["used"] == len(SPECS[1].pages(24, 24)) == 3


def test_more_requests_than_configured_are_refused():
    manager = CacheManager(SPECS, plan(), max_requests=1)
    manager.grant("a", num_tokens=0, max_tokens=8)
    with pytest.raises(NoRoom, match="max_running_requests"):
        manager.grant("b", num_tokens=0, max_tokens=8)


def test_too_little_memory_is_refused_with_the_least_that_works():
    with pytest.raises(ValueError, match=r"cache_bytes is 10, expected at least (\d+)") as error:
        plan(cache_bytes=10)
    needed = int(str(error.value).split("at least ")[1].split()[0])
    assert min(plan(cache_bytes=needed).values()) >= 1


def test_the_plan_fits_into_the_memory():
    pages = plan(cache_bytes=20_000)
    assert sum((pages[spec.table] + 1) * spec.page_bytes for spec in SPECS) <= 20_000


class ManagerMachine(RuleBasedStateMachine):
    """Requests come, are computed in chunks, and go; admitted ones never run dry."""

    def __init__(self):
        super().__init__()
        self.manager = CacheManager(SPECS, plan(), MAX_REQUESTS)
        self.lengths: dict[str, tuple[int, int]] = {}
        self.count = 0

    @rule(num_tokens=st.integers(0, 60), more=st.integers(1, 100))
    def grant(self, num_tokens, more):
        self.count += 1
        holder = f"g{self.count}"
        try:
            self.manager.grant(holder, num_tokens=num_tokens, max_tokens=num_tokens + more)
        except NoRoom:
            return
        self.lengths[holder] = (num_tokens, num_tokens + more)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data(), budget=st.integers(1, STEP_TOKENS))
    def step(self, data, budget):
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.lengths)), unique=True))
        ends = {}
        for holder in chosen:
            start, limit = self.lengths[holder]
            end = min(limit, start + budget)
            budget -= end - start
            self.manager.extend(holder, end)
            ends[holder] = end
        self.manager.check()
        for holder, end in ends.items():
            self.manager.expire(holder, end)
            self.lengths[holder] = (end, self.lengths[holder][1])

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def release(self, data):
        holder = data.draw(st.sampled_from(sorted(self.lengths)))
        self.manager.release(holder)
        del self.lengths[holder]

    @invariant()
    def every_page_is_free_or_held_once(self):
        self.manager.check()

    def teardown(self):
        for holder in self.lengths:
            self.manager.release(holder)
        assert all(pool["used"] == 0 for pool in self.manager.usage().values())


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
