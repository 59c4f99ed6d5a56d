"""A node that answers but fails is left alone, but for one request at a time that tries it."""

from __future__ import annotations

import asyncio

from sluice.engine.protocol import NodeError, NodeLost
from sluice.router.breaker import OPEN_AFTER, Breaker


def test_failures_in_a_row_open_it_and_a_success_closes_it():
    breaker = Breaker(cool_down_s=5)
    for now in range(OPEN_AFTER):
        assert breaker.allows(now)
        breaker.fail(now)
    opened_at = OPEN_AFTER - 1
    assert not breaker.allows(opened_at + 4.9) and breaker.allows(opened_at + 5)
    breaker.begin("probe")
    assert not breaker.allows(opened_at + 100)  # one at a time
    breaker.succeed()
    breaker.end("probe")
    assert breaker.allows(opened_at)


def test_a_probe_that_fails_opens_it_again_and_one_without_a_verdict_lets_the_next_try():
    breaker = Breaker(cool_down_s=5)
    for _ in range(OPEN_AFTER):
        breaker.fail(0)
    breaker.begin("left")
    breaker.end("left")
    assert breaker.allows(5)
    breaker.begin("failed")
    breaker.fail(6)
    breaker.end("failed")
    assert not breaker.allows(10) and breaker.allows(11)


def test_a_failure_now_and_then_does_not_open_it():
    breaker = Breaker()
    for now in range(20):
        breaker.fail(now)
        breaker.succeed()
    assert breaker.allows(20) and not breaker.is_open


async def test_requests_go_round_a_failing_node_until_its_probe_succeeds(make_world):
    world = await make_world(router={"prefill_policy": "round_robin"})
    bad, good = world.add_prefill("bad"), world.add_prefill("good")
    world.add_decode()
    view = world.service.nodes.find("bad")
    view.breaker = Breaker(cool_down_s=0.05)
    bad.faults = [NodeError("out of luck")] * (OPEN_AFTER + 1)
    answers = [await world.complete() for _ in range(12)]
    assert {a.json()["choices"][0]["text"] for a in answers} == {world.expected()}
    state = (await world.http.get("/admin/status")).json()["nodes"]
    assert "failed" in {node["id"]: node["detail"] for node in state}["bad"]
    while view.breaker.is_open:
        await world.complete()
    assert not bad.faults and good.calls.count("run") >= 12
    await world.until(world.quiescent)


async def test_the_only_node_is_tried_again_after_its_cool_down(world):
    view = world.service.nodes.find("prefill-0")
    view.breaker = Breaker(cool_down_s=0.05)
    world.prefills["prefill-0"].faults = [NodeError("out of luck")] * OPEN_AFTER
    assert (await world.complete()).status_code == 500
    answers = await asyncio.gather(*(world.complete() for _ in range(5)))
    assert {a.json()["choices"][0]["text"] for a in answers} == {world.expected()}


async def test_losing_the_only_prefill_node_before_the_first_token_costs_only_time(world):
    world.prefills["prefill-0"].faults = [NodeLost("connection reset")]
    answer = await world.complete()
    assert answer.json()["choices"][0]["text"] == world.expected()
    await world.until(world.quiescent)


async def test_a_node_that_does_not_come_back_is_503_after_the_lease(make_world):
    world = await make_world(transfer={"lease_s": 0.2})
    prefill = world.add_prefill()
    world.add_decode()
    prefill.gate.clear()
    waiting = asyncio.create_task(world.complete())
    await world.until(lambda: bool(prefill.at_work))
    prefill.dead = True
    world.remove("prefill-0")
    assert (await waiting).status_code == 503
    await world.until(world.quiescent)
