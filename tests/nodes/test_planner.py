"""What a decode step computes: a token of each request, and prompts as far as a budget reaches."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sluice.decode_node.planner import StepPlanner


class Prompt(SimpleNamespace):
    """A request whose prompt of so many tokens is computed here."""

    unchosen = None

    def next_chunk(self, budget):
        end = min(self.num_tokens, self.start + budget)
        return SimpleNamespace(start=self.start, end=end, num_tokens=end - self.start)


def prompt(num_tokens, start=0):
    return Prompt(
        num_tokens=num_tokens,
        start=start,
        grant=SimpleNamespace(num_tokens=num_tokens),
        request=SimpleNamespace(grant_id="g"),
    )


@pytest.mark.parametrize(
    ("lengths", "taken"),
    [([100, 100], [64]), ([40, 100], [40, 24]), ([10, 10, 100], [10, 10, 44]), ([64, 1], [64])],
)
def test_prompts_share_the_budget_of_a_step(lengths, taken):
    planner = StepPlanner(SimpleNamespace(extend=lambda holder, end: None), 64)
    work = planner.next([prompt(length) for length in lengths], preempt=None)
    assert [item.chunk.num_tokens for item in work] == taken
    assert all(item.in_prompt for item in work)
