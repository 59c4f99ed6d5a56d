"""Cached prefixes: every row a request reads is the row it would have computed itself."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

sys.path.insert(0, str(Path(__file__).parent))

from manager_driver import MAX_LEN, MAX_REQUESTS, STEP_TOKENS, Driver, make_manager
from simulated_pools import REPLAY_TOKENS, SPECS

from sluice.cache.manager import NoRoom
from sluice.cache.spec import tables_of

NUM_EXAMPLES = int(os.environ.get("MANAGER_EXAMPLES", "100"))  # of 100 steps each


class PrefixMachine(RuleBasedStateMachine):
    """Requests with common beginnings come, are computed, transferred, preempted, and go."""

    def __init__(self):
        super().__init__()
        self.driver = Driver(make_manager())
        self.known: list[list[int]] = [[]]

    def draw_prompt(self, data):
        base = data.draw(st.sampled_from(self.known))
        keep = data.draw(st.integers(0, len(base)))
        more = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=40))
        prompt = (base[:keep] + more)[:MAX_LEN]
        self.known = [*self.known[-20:], prompt]
        return prompt

    @rule(data=st.data())
    def prefill(self, data):
        self.driver.prefill(self.draw_prompt(data))

    @rule(data=st.data())
    def receive(self, data):
        self.driver.receive(self.draw_prompt(data))

    @precondition(lambda self: self.driver.prompts)
    @rule(
        data=st.data(),
        num_tokens=st.integers(1, STEP_TOKENS),
        resume=st.booleans(),
        spare=st.booleans(),
    )
    def compute(self, data, num_tokens, resume, spare):
        holder = data.draw(st.sampled_from(sorted(self.driver.prompts)))
        if self.driver.computed[holder] < len(self.driver.prompts[holder]):
            self.driver.compute(holder, num_tokens, resume=resume, spare=spare)

    @precondition(lambda self: self.driver.prompts)
    @rule(data=st.data())
    def release(self, data):
        self.driver.release(data.draw(st.sampled_from(sorted(self.driver.prompts))))

    @rule()
    def clear(self):
        self.driver.evict_all()

    @invariant()
    def the_books_are_right(self):
        self.driver.manager.check()
        for holder in self.driver.prompts:
            self.driver.check_live(holder)

    def teardown(self):
        for holder in list(self.driver.prompts):
            self.driver.release(holder)
        self.driver.evict_all()
        assert all(p["free"] == sum(p.values()) for p in self.driver.manager.usage().values())


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(
    max_examples=NUM_EXAMPLES, stateful_step_count=100, deadline=None
)


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 50])
def test_a_prompt_resumes_where_an_equal_beginning_ended(num_tokens):
    driver = Driver(make_manager())
    first = [1, 2] * 50
    assert driver.run(first[:num_tokens]) == 0
    assert driver.run([*first[:num_tokens], 7, 7, 7]) == num_tokens


def test_the_same_prompt_again_computes_only_its_last_chunk():
    driver = Driver(make_manager())
    prompt = [3] * 60
    driver.run(prompt)
    assert driver.run(prompt) == 48, "the resume point before the last token"


def test_shared_pages_are_in_use_no_more_where_there_is_no_room_for_the_rest():
    driver = Driver(make_manager())
    driver.run([1] * 60)
    longer, manager = [1] * 60 + [2], driver.manager
    hit = manager.find_resumable(manager.keys_of(longer), longer)
    before = manager.usage()
    assert hit.num_tokens == 60
    with pytest.raises(NoRoom):
        manager.grant("long", num_tokens=60, max_tokens=100_000, hit=hit)
    manager.check()
    assert manager.usage() == before, "and nothing was evicted for what cannot be"


def test_another_salt_shares_nothing():
    manager = make_manager()
    driver = Driver(manager)
    prompt = [1] * 40
    driver.run(prompt)
    keys = manager.keys_of(prompt, salt="tenant")
    assert manager.find_resumable(keys, prompt).num_tokens == 0
    assert manager.find_history(keys).num_tokens == 0


def test_decode_finds_history_that_another_request_left():
    driver = Driver(make_manager())
    _, num_cached = driver.receive([1] * 40)
    assert num_cached == 0
    _, num_cached = driver.receive([1] * 40 + [2])
    assert num_cached == 32


def test_window_and_state_go_first_and_history_stays():
    driver = Driver(make_manager(resume_share=0.0))
    driver.run([1] * 40)
    others = [driver.prefill([n] * 30) for n in range(2, 2 + MAX_REQUESTS)]
    for holder, _ in others:
        driver.compute(holder, STEP_TOKENS // MAX_REQUESTS, resume=False)
    keys = driver.manager.keys_of([1] * 40)
    assert driver.manager.find_history(keys).num_tokens == 32


def test_what_is_in_use_is_not_evicted_and_what_is_cached_makes_room():
    driver = Driver(make_manager())
    for n in range(30):
        driver.run([n] * 60)
        driver.manager.check()
    used = [pool["used"] for pool in driver.manager.usage().values()]
    assert used == [0] * len(used)


def test_where_no_resume_point_is_left_the_end_of_the_history_is_replayed():
    driver = Driver(make_manager())
    driver.run([1] * 100, resume=False)
    assert driver.run([1] * 60 + [2] * 10) == 48 - REPLAY_TOKENS, "48 tokens are whole units"


def test_a_resume_point_is_better_than_a_replay_that_starts_before_it():
    driver = Driver(make_manager())
    driver.run([1] * 40)
    assert driver.run([1] * 40 + [2]) == 40
    assert driver.run([1] * 39 + [3]) == 24, "the chunk's end at 24, not 32 - 18"


def test_without_a_model_that_allows_it_nothing_is_replayed():
    driver = Driver(make_manager(replay_tokens=None))
    driver.run([1] * 100)
    assert driver.run([1] * 23 + [2] * 10) == 0


@pytest.mark.parametrize("table", tables_of(SPECS), ids=str)
def test_a_page_is_held_as_long_as_a_row_of_it_lives_and_no_token_longer(table):
    for page in range(4):
        ends = [n for n in range(1, 400) if table.first_page(n) > page]
        assert table.page_expires_at(page) == (min(ends) if ends else float("inf"))


def test_history_that_was_looked_up_outlives_what_is_older():
    driver = Driver(make_manager())
    old, new = [1] * 40, [2] * 40
    driver.run(old)
    driver.run(new)
    manager = driver.manager
    assert manager.find_history(manager.keys_of(old)).num_tokens == 32  # used now
    table = manager._full[0]
    allocator = manager._allocators[table]
    manager._tree.evict(table, allocator.num_free + 1)
    assert manager.find_history(manager.keys_of(old)).num_tokens == 32
    assert manager.find_history(manager.keys_of(new)).num_tokens < 32


def test_spare_resume_points_go_before_others_however_new():
    driver = Driver(make_manager())
    manager, prompt = driver.manager, [1] * 20
    holder, _ = driver.prefill(prompt)
    driver.compute(holder, 4)
    driver.compute(holder, 4, spare=True)
    driver.release(holder)
    [table] = [t for t in manager.tables if not t.keeps_all][:1]
    before = manager._tree.num_resumes
    while manager._tree.num_resumes == before:
        manager._tree.evict(table, manager._allocators[table].num_free + 1)
    longer = [*prompt[:8], 9, 9]
    assert manager.find_resumable(manager.keys_of(longer), longer).num_tokens == 4


def test_history_that_a_prompt_resumes_from_outlives_what_is_newer():
    driver = Driver(make_manager())
    old, new = [1] * 40, [2] * 40
    driver.run(old)
    driver.run(new)
    manager = driver.manager
    longer = [*old, 3]
    assert manager.find_resumable(manager.keys_of(longer), longer).num_tokens == 40
    table = manager._full[0]
    manager._tree.evict(table, manager._allocators[table].num_free + 1)
    assert manager.find_history(manager.keys_of(old)).num_tokens == 32


def test_of_resume_points_of_one_length_each_is_found_as_long_as_it_is_there():
    driver = Driver(make_manager())
    manager, begun = driver.manager, [1] * 4
    for last in (5, 6):
        driver.run([*begun, last])
    tree = manager._tree
    keys = [key for key in (*tree._spares, *tree._resumes) if len(key[1]) == 5]
    assert len(keys) == 2
    tree._drop_resume(keys[0])
    tree.check()
    kept = [*keys[1][1], 9]
    assert manager.find_resumable(manager.keys_of(kept), kept).num_tokens == 5
    tree._drop_resume(keys[1])
    assert manager.find_resumable(manager.keys_of(kept), kept).num_tokens == 0
