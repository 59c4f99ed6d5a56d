"""A node that answers but fails is left alone, but for one request at a time that tries it."""

from __future__ import annotations

import asyncio

import pytest

from sluice.protocol.messages import InvalidRequest, NodeError, NodeLost, Refused, TransferFailed
from sluice.router.dispatch.breaker import OPEN_AFTER, Breaker


def test_failures_in_a_row_open_it_and_a_success_closes_it():
    breaker = Breaker(cool_down_s=5)
    for now in range(OPEN_AFTER):
        assert breaker.allows(now)
        breaker.fail(now)
    opened_at = OPEN_AFTER - 1
    assert not breaker.allows(opened_at + 4.9) and breaker.allows(opened_at + 5)
    breaker.begin("probe")
    assert not breaker.allows(opened_at + 100)  # one at a time
    breaker.succeed("probe")
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
        breaker.succeed("r")
    assert breaker.allows(20) and not breaker.is_open


def test_a_probe_that_gets_tokens_lets_others_come_until_the_next_failure():
    breaker = Breaker(cool_down_s=5)
    for _ in range(OPEN_AFTER):
        breaker.fail(0)
    breaker.begin("probe")
    breaker.get_on("another")  # began before
    assert not breaker.allows(6)
    breaker.get_on("probe")
    assert breaker.allows(6)
    breaker.fail(7)
    assert not breaker.allows(11)


def test_an_answer_that_began_before_says_nothing_of_an_open_node():
    breaker = Breaker(cool_down_s=5)
    for _ in range(OPEN_AFTER):
        breaker.fail(0)
    breaker.succeed("long ago")
    assert not breaker.allows(4)


async def test_streams_that_fail_open_decodes_breaker_however_many_grants_it_gave(make_world):
    world = await make_world(router={"decode_policy": "round_robin"})
    world.add_prefill()
    bad = world.add_decode("bad")
    world.add_decode("good")
    view = world.service.nodes.find("bad")
    while not view.breaker.is_open:
        bad.error_after = 1
        assert (await world.complete()).status_code == 200
    assert bad.calls.count("reserve") == OPEN_AFTER
    bad.error_after = None
    view.breaker.cool_down_s = 0
    while view.breaker.num_failures:
        await world.complete()
    await world.until(world.quiescent)


async def test_an_answer_that_ends_well_speaks_for_both_nodes(world):
    views = list(world.service.nodes)
    for view in views:
        view.fail(NodeError("once"))
    await world.complete()
    assert [view.breaker.num_failures for view in views] == [0, 0]


async def test_failed_transfers_open_the_breakers_of_both_ends(make_world):
    world = await make_world()
    world.add_prefill()
    world.add_decode()
    world.prefills["prefill-0"].faults = [TransferFailed("lost bytes")] * OPEN_AFTER
    views = list(world.service.nodes)
    for view in views:
        view.breaker = Breaker(cool_down_s=0.05)
    assert (await world.complete()).status_code == 500
    assert [view.breaker.num_failures for view in views] == [3, 3]
    answer = asyncio.create_task(world.complete())
    await world.until(lambda: all(view.breaker.is_open for view in views))
    assert (await answer).status_code == 200


async def test_a_transfer_to_a_decode_node_that_died_is_not_prefills_fault(world):
    prefill, decode = world.prefills["prefill-0"], world.decodes["decode-0"]
    prefill.gate.clear()
    prefill.faults = [TransferFailed("nobody there")]
    answer = asyncio.create_task(world.complete())
    await world.until(lambda: bool(prefill.at_work))
    decode.die()
    await world.until(lambda: world.service.nodes.find("decode-0").lost_because)
    world.add_decode("decode-1")
    prefill.gate.set()
    assert (await answer).status_code == 200
    assert not any(view.breaker.num_failures for view in world.service.nodes)


@pytest.mark.parametrize(
    "error", [Refused("full"), NodeLost("reset"), InvalidRequest("top_k: too large")]
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_what_is_not_a_nodes_fault_does_not_count_against_it(world, error, role):
    nodes = {"prefill": world.prefills["prefill-0"], "decode": world.decodes["decode-0"]}
    nodes[role].faults = [error]
    await world.complete()
    await world.until(world.quiescent)
    assert not any(view.breaker.num_failures for view in world.service.nodes)


async def test_preempted_and_cancelled_streams_do_not_count_against_the_node(world):
    decode, view = world.decodes["decode-0"], world.service.nodes.find("decode-0")
    view.fail(NodeError("once"))
    decode.preempt_after = 3
    stream = world.raw(stream=True, max_tokens=100, ignore_eos=True)
    await world.until(lambda: decode.calls.count("reserve") == 2)
    await stream.leave()
    await world.until(world.quiescent)
    assert view.breaker.num_failures == 1 and view.trusted


async def test_the_next_attempt_goes_where_the_last_one_did_not_fail(make_world):
    world = await make_world(
        router={"prefill_policy": "round_robin", "decode_policy": "round_robin"}
    )
    bad, good = world.add_prefill("prefill-bad"), world.add_prefill("prefill-good")
    world.add_decode("decode-0")
    world.add_decode("decode-1")
    for _ in range(4):
        bad.faults = [NodeError("out of luck")]
        world.service.nodes.find("prefill-good").last_picked = 10**6  # bad is next, again and again
        num_runs = bad.calls.count("run")
        assert (await world.complete()).status_code == 200
        assert bad.calls.count("run") == num_runs + 1
    assert good.calls.count("run") == 4


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


@pytest.mark.parametrize("pause", ["cool-down", "refusal"])
async def test_a_timer_that_comes_a_moment_too_early_ends_its_pause_all_the_same(
    world, monkeypatch, pause
):
    """Nobody would look at the queue again."""
    node = world.service.nodes.find("decode-0")
    loop, called = asyncio.get_running_loop(), []
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)
    monkeypatch.setattr(loop, "call_later", lambda delay, *_: called.append(now + delay))
    if pause == "refusal":
        node.pause_after_refusal()
    else:
        for _ in range(OPEN_AFTER):
            node.fail(NodeError("broken"))
    assert not node.room_tokens()
    monkeypatch.setattr(loop, "time", lambda: called[-1] - 1e-4)
    assert node.room_tokens() and node.trusted


async def test_when_a_message_expires_is_told_on_the_nodes_own_clock(world):
    """What has passed since the node told its time is added, whatever its clock says."""
    node, loop = world.service.nodes.find("decode-0"), asyncio.get_running_loop()
    node._node_clock = (1000.0, loop.time() - 5.0)
    assert await node.expires_at(30.0) == pytest.approx(1035.0, abs=1.0)
