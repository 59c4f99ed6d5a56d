"""Cached prefixes: every row a request reads is the row it would have computed itself."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sluice.cache.budget import plan_pages
from sluice.cache.manager import CacheManager, NoRoom

sys.path.insert(0, str(Path(__file__).parent))

from simulated_pools import SPECS, SimulatedPools

STEP_TOKENS, MAX_REQUESTS, MAX_LEN = 24, 3, 200
NUM_EXAMPLES = int(os.environ.get("MANAGER_EXAMPLES", "100"))  # of 100 steps each


def make_manager(cache_bytes=30_000, resume_share=0.5):
    pages = plan_pages(
        SPECS,
        cache_bytes=cache_bytes,
        max_requests=MAX_REQUESTS,
        max_step_tokens=STEP_TOKENS,
        max_model_len=MAX_LEN,
        resume_share=resume_share,
    )
    return CacheManager(SPECS, pages, MAX_REQUESTS, identity="model")


class Driver:
    """Requests over simulated pools, as prefill and decode nodes drive them."""

    def __init__(self, manager):
        self.manager = manager
        self.pools = SimulatedPools(manager)
        self.prompts: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.count = 0

    def prefill(self, prompt):
        """Admit a prompt for computing; returns its holder and cached tokens, or None."""
        keys = self.manager.keys_of(prompt)
        hit = self.manager.find_resumable(keys, prompt)
        assert hit.num_tokens < len(prompt)
        return self._admit(prompt, hit, hit.num_tokens, len(prompt))

    def receive(self, prompt):
        """Admit a prompt that another node computed, as decode does."""
        hit = self.manager.find_history(self.manager.keys_of(prompt))
        admitted = self._admit(prompt, hit, len(prompt), len(prompt) + 8)
        if admitted is not None:
            holder, _ = admitted
            self.pools.receive(holder, prompt, hit.num_tokens)
            self.pools.check_live(holder, prompt)
            self.manager.cache_history(holder, self.manager.keys_of(prompt), len(prompt))
        return admitted

    def compute(self, holder, num_tokens, *, resume=True):
        prompt, start = self.prompts[holder], self.computed[holder]
        end = min(len(prompt), start + num_tokens)
        self.manager.extend(holder, start, end)
        self.pools.compute(holder, prompt, start, end)
        self.computed[holder] = end
        keys = self.manager.keys_of(prompt)
        self.manager.cache_history(holder, keys, end)
        if resume:
            self.pools.copy(self.manager.cache_resume(holder, keys, prompt, end))
        self.manager.expire(holder, end)
        self.pools.check_live(holder, prompt[:end])

    def release(self, holder):
        self.manager.release(holder)
        del self.prompts[holder], self.computed[holder]

    def run(self, prompt, chunk=STEP_TOKENS):
        """Compute a whole prompt; returns how many tokens were cached."""
        holder, num_cached = self.prefill(prompt)
        while self.computed[holder] < len(prompt):
            self.compute(holder, chunk)
        self.release(holder)
        return num_cached

    def _admit(self, prompt, hit, num_tokens, max_tokens):
        self.count += 1
        holder = f"g{self.count}"
        try:
            copies = self.manager.grant(
                holder, num_tokens=num_tokens, max_tokens=max_tokens, hit=hit
            )
        except NoRoom:
            return None
        self.pools.copy(copies)
        self.prompts[holder], self.computed[holder] = list(prompt), num_tokens
        if hit.resume is not None:
            self.pools.check_live(holder, prompt[:num_tokens])
        return holder, hit.num_tokens


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
    @rule(data=st.data(), num_tokens=st.integers(1, STEP_TOKENS), resume=st.booleans())
    def compute(self, data, num_tokens, resume):
        holder = data.draw(st.sampled_from(sorted(self.driver.prompts)))
        if self.driver.computed[holder] < len(self.driver.prompts[holder]):
            self.driver.compute(holder, num_tokens, resume=resume)

    @precondition(lambda self: self.driver.prompts)
    @rule(data=st.data())
    def release(self, data):
        self.driver.release(data.draw(st.sampled_from(sorted(self.driver.prompts))))

    @rule()
    def clear(self):
        self.driver.manager.clear_cache()

    @invariant()
    def the_books_are_right(self):
        self.driver.manager.check()
        for holder, prompt in self.driver.prompts.items():
            self.driver.pools.check_live(holder, prompt[: self.driver.computed[holder]])

    def teardown(self):
        for holder in list(self.driver.prompts):
            self.driver.release(holder)
        self.driver.manager.clear_cache()
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
