"""Policies choose by what they are told of nodes: load, what is queued, what is cached."""

from __future__ import annotations

from collections import Counter

import pytest

from sluice.cache.journal import CacheReport
from sluice.cache.spec import Full, PoolSpec, unit_tokens
from sluice.protocol.messages import GenerateRequest, NodeInfo, Role, SamplingParams
from sluice.router.dispatch.cached import CachedPrefixes
from sluice.router.dispatch.ledger import Ledger
from sluice.router.dispatch.policy import MAX_CLAIMS, Policy, Turn
from sluice.router.dispatch.prompt import Prompt


class Node:
    """Books of a node with a unit of `unit` tokens and room for 1,000."""

    last_picked = 0
    trusted = True

    def __init__(self, node_id: str, unit: int = 4, max_outstanding_tokens: int = 100) -> None:
        spec = PoolSpec("kv", (0,), (1,), "float32", 1, unit, Full())
        pages = {spec.table: 1000 // unit}
        info = NodeInfo(node_id, "", Role.PREFILL, "", "model", (spec,), 1000, 10, 50, pages)
        self.node_id = node_id
        self.ledger = Ledger(
            info, max_outstanding_tokens=max_outstanding_tokens, on_return=lambda: None
        )
        self.cached = CachedPrefixes("model", unit_tokens(info.specs))

    @property
    def max_tokens(self) -> int:
        return self.ledger.max_tokens

    def room_tokens(self, beside: int = 0) -> int:
        return self.ledger.room_tokens(beside)

    def holding(self, prompt: Prompt, unit: int = 4) -> Node:
        """The node, which has told that it has the prompt cached."""
        self.cached.take(CacheReport(1, added=prompt.keys("model", unit)))
        return self


def prompt_of(*token_ids: int, salt: str = "", local: bool = False) -> Prompt:
    sampling = SamplingParams(max_tokens=10)
    return Prompt(GenerateRequest("r", token_ids, sampling, cache_salt=salt, local=local))


def turn_over(prefill, decode=None, policy="cache_aware", decode_policy="cache_aware"):
    return Turn(Policy(policy, decode_policy, seed=1), prefill, decode or [Node("decode")])


PROMPT = prompt_of(*range(40))


def test_a_prompt_goes_where_its_prefix_is_whatever_the_node_counts_in():
    nodes = [Node("a"), Node("b", unit=8).holding(prompt_of(*range(16)), unit=8), Node("c")]
    assert turn_over(nodes).pick(PROMPT)[0].node_id == "b"


def test_another_tenants_prefix_is_no_reason():
    nodes = [Node("a"), Node("b").holding(prompt_of(*range(40), salt="other"))]
    assert turn_over(nodes).pick(PROMPT)[0].node_id == "a"


def test_the_deeper_of_two_prefixes_wins():
    nodes = [Node("a").holding(prompt_of(*range(8))), Node("b").holding(prompt_of(*range(32)))]
    assert turn_over(nodes).pick(PROMPT)[0].node_id == "b"


def test_a_prefix_is_left_where_waiting_for_it_costs_more():
    nodes = [Node("a", max_outstanding_tokens=10_000).holding(prompt_of(*range(16))), Node("b")]
    nodes[0].ledger.take("other", 500)
    assert turn_over(nodes).pick(PROMPT)[0].node_id == "b"


def test_who_waits_for_a_busy_node_keeps_it_but_lets_others_pass_to_the_rest():
    busy, idle = Node("busy").holding(prompt_of(*range(40))), Node("idle")
    busy.ledger.take("other", 100)
    turn = turn_over([busy, idle])
    assert turn.pick(PROMPT) is None and not turn.over
    assert turn.pick(prompt_of(7, 7, 7))[0] is idle
    busy.ledger.give_back("other")
    assert turn.pick(PROMPT) is None and not turn.over  # somebody waits for it already
    assert turn_over([busy, idle]).pick(PROMPT)[0] is busy


def test_a_look_at_a_long_queue_for_one_node_comes_to_an_end():
    busy, idle = Node("busy").holding(prompt_of(*range(90))), Node("idle")
    busy.ledger.take("other", 100)
    turn = turn_over([busy, idle])
    num_looked_at = 0
    while not turn.over:
        assert turn.pick(prompt_of(*range(90))) is None
        num_looked_at += 1
    assert num_looked_at == MAX_CLAIMS


def test_nobody_passes_a_request_that_decode_has_no_room_for():
    decode = Node("decode")
    decode.ledger.take("other", 999)
    turn = turn_over([Node("a")], [decode])
    assert turn.pick(PROMPT) is None and turn.over


def test_the_first_in_line_keeps_its_room_on_decode_while_it_waits_for_prefill():
    busy, decode = Node("busy"), Node("decode", max_outstanding_tokens=10_000)
    busy.ledger.take("other", 100)
    turn = turn_over([busy], [decode])
    assert turn.pick(prompt_of(*range(600))) is None  # 610 of 1,000 are its own
    assert turn.pick(prompt_of(*range(300), local=True)) == (None, decode)
    decode.ledger.take("local", 310)
    assert turn.pick(prompt_of(*range(90), local=True)) is None
    assert turn.pick(prompt_of(*range(60), local=True)) is None  # behind the one before


def test_a_busy_node_is_not_waited_for_where_nothing_is_saved():
    full, idle = Node("full"), Node("idle")
    full.ledger.take("other", 980, work_tokens=1)  # has pages for 20 tokens more
    idle.ledger.take("other", 90)
    assert turn_over([full, idle]).pick(PROMPT)[0] is idle


def test_decode_is_chosen_by_the_share_that_the_request_adds():
    holding, idle = Node("holding").holding(prompt_of(*range(400))), Node("idle")
    holding.ledger.take("other", 4)
    for long, expected in ((prompt_of(*range(400)), holding), (prompt_of(*range(4)), idle)):
        assert turn_over([Node("a")], [holding, idle]).pick(long)[1] is expected


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "power_of_two", "cache_aware"])
def test_every_policy_spreads_prompts_that_have_nothing_in_common(policy):
    nodes = [Node(str(number), max_outstanding_tokens=10_000) for number in range(4)]
    counts = Counter()
    chooser = Policy(policy, "round_robin", seed=1)
    for number in range(40):
        prompt = prompt_of(*range(number * 100, number * 100 + 20))
        node, _ = Turn(chooser, nodes, [Node("decode")]).pick(prompt)
        if node.ledger.running < 9:
            node.ledger.take(str(number), 20)
        counts[node.node_id] += 1
    assert min(counts.values()) >= 6


def test_power_of_two_takes_the_emptier_of_the_two_it_draws():
    nodes = [Node("full"), Node("empty")]
    nodes[0].ledger.take("other", 90)
    turn = turn_over(nodes, policy="power_of_two")
    assert {turn.pick(PROMPT)[0].node_id for _ in range(10)} == {"empty"}


def test_what_was_sent_counts_as_cached_until_reports_can_tell():
    cached = CachedPrefixes("model", 4)
    cached.expect("r", PROMPT)
    for _ in range(3):
        cached.take(CacheReport())
    assert cached.num_tokens(PROMPT) == 40
    cached.end("r")
    cached.end("r")
    cached.take(CacheReport())  # may have been on its way when the request ended
    assert cached.num_tokens(PROMPT) == 40
    cached.take(CacheReport())
    assert cached.num_tokens(PROMPT) == 0


def test_a_report_that_another_has_overtaken_changes_nothing():
    cached = CachedPrefixes("model", 4)
    keys = PROMPT.keys("model", 4)
    cached.take(CacheReport(10, added=keys))
    cached.take(CacheReport(4, since=0, added=()))
    cached.take(CacheReport(6, since=3, removed=keys))
    assert cached.num_tokens(PROMPT) == 40 and cached.version == 10
