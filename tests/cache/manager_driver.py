"""Requests over simulated pools, as prefill and decode nodes drive a manager."""

from __future__ import annotations

from simulated_pools import REPLAY_TOKENS, SPECS, SimulatedPools

from sluice.cache.budget import plan_pages
from sluice.cache.manager import CacheManager, NoRoom
from sluice.cache.prefix_tree import Hit

STEP_TOKENS, MAX_REQUESTS, MAX_LEN = 24, 3, 200


def make_manager(
    cache_bytes=30_000,
    resume_share=0.5,
    kind=CacheManager,
    specs=SPECS,
    replay_tokens=REPLAY_TOKENS,
):
    pages = plan_pages(
        specs,
        cache_bytes=cache_bytes,
        max_requests=MAX_REQUESTS,
        max_step_tokens=STEP_TOKENS,
        max_model_len=MAX_LEN,
        resume_share=resume_share,
    )
    return kind(specs, pages, MAX_REQUESTS, identity="model", replay_tokens=replay_tokens)


class Driver:
    """Requests over simulated pools, as prefill and decode nodes drive them."""

    def __init__(self, manager):
        self.manager = manager
        self.pools = SimulatedPools(manager)
        self.prompts: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.hits: dict[str, Hit] = {}
        self.count = 0

    def prefill(self, prompt):
        """Admit a prompt for computing; returns its holder and cached tokens, or None."""
        keys = self.manager.keys_of(prompt)
        hit = self.manager.find_resumable(keys, prompt)
        assert hit.num_tokens < len(prompt)
        return self._admit(prompt, hit, hit.num_tokens, len(prompt))

    def evict_all(self):
        """Give up everything that is cached and that no request uses."""
        for table, allocator in self.manager._allocators.items():
            self.manager._tree.evict(table, allocator.num_pages + 1)

    def receive(self, prompt):
        """Admit a prompt that another node computed, as decode does."""
        hit = self.manager.find_history(self.manager.keys_of(prompt))
        admitted = self._admit(prompt, hit, len(prompt), len(prompt) + 8)
        if admitted is not None:
            holder, _ = admitted
            self.pools.receive(holder, prompt, hit.num_tokens)
            self.check_live(holder)
            self.manager.cache_history(holder, self.manager.keys_of(prompt), len(prompt))
        return admitted

    def compute(self, holder, num_tokens, *, resume=True, spare=False):
        prompt, start = self.prompts[holder], self.computed[holder]
        end = min(len(prompt), start + num_tokens)
        self.manager.extend(holder, end)
        hit = self.hits[holder]
        self.pools.compute(holder, prompt, start, end, hit)
        self.computed[holder] = end
        keys = self.manager.keys_of(prompt)
        self.manager.cache_history(holder, keys, end)
        if resume and end >= hit.history_tokens:
            copies = self.manager.cache_resume(holder, keys, prompt, end, spare=spare)
            self.pools.copy(copies)
        self.manager.expire(holder, end)
        self.check_live(holder)

    def check_live(self, holder):
        """Assert that what lives is right; while tokens are replayed, nothing needs to be."""
        num_tokens = self.computed[holder]
        if num_tokens >= self.hits[holder].history_tokens:
            self.pools.check_live(holder, self.prompts[holder][:num_tokens])

    def release(self, holder):
        self.manager.release(holder)
        del self.prompts[holder], self.computed[holder], self.hits[holder]

    def run(self, prompt, *, resume=True):
        """Compute a whole prompt; returns how many tokens were cached."""
        holder, num_cached = self.prefill(prompt)
        while self.computed[holder] < len(prompt):
            self.compute(holder, STEP_TOKENS, resume=resume)
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
        self.hits[holder] = hit
        if hit.resume is not None:
            self.check_live(holder)
        return holder, hit.num_tokens
