"""Waiting happens in the queue: in order, bounded, and never longer than the deadline."""

from __future__ import annotations

import asyncio
import time

import pytest
from ledgers import promised_pages

from sluice.protocol.messages import GenerateRequest, NodeLost, SamplingParams, Unavailable
from sluice.router.dispatch import queue
from sluice.router.dispatch.prompt import Prompt


async def test_no_node_is_503_at_once_and_recovers(make_world):
    world = await make_world()
    started = time.monotonic()
    for add in (world.add_prefill, world.add_decode):
        answer = await world.complete()
        assert answer.status_code == 503 and answer.headers["retry-after"]
        assert (await world.http.get("/ready")).status_code == 503
        add()
    assert time.monotonic() - started < 1
    assert (await world.http.get("/ready")).status_code == 200
    assert (await world.complete()).status_code == 200


async def test_queued_requests_get_503_when_the_last_node_goes(world):
    world.service.nodes.find("decode-0").ledger.take("everything", 64 * 16)
    waiting = asyncio.create_task(world.complete())
    await world.until(lambda: len(world.service.queue) == 1)
    world.remove("decode-0")
    assert (await waiting).status_code == 503


async def test_a_full_queue_is_429(make_world):
    world = await make_world(router={"max_queue": 2})
    world.add_prefill()
    world.add_decode()
    world.service.nodes.find("decode-0").ledger.take("everything", 64 * 16)
    waiting = [asyncio.create_task(world.complete()) for _ in range(2)]
    await world.until(lambda: len(world.service.queue) == 2)
    answer = await world.complete()
    assert answer.status_code == 429 and answer.headers["retry-after"]
    world.service.nodes.find("decode-0").ledger.give_back("everything")
    assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200, 200]


async def test_a_passed_deadline_is_504_and_frees_everything(make_world):
    world = await make_world(router={"request_timeout_s": 0.1})
    prefill, decode = world.add_prefill(), world.add_decode()
    for node in (prefill, decode):
        node.gate.clear()
        assert (await world.complete()).status_code == 504
        await world.until(world.quiescent)
        node.gate.set()
    assert (await world.complete()).status_code == 200


async def test_a_deadline_mid_stream_is_an_error_event(make_world, events):
    world = await make_world(router={"request_timeout_s": 0.2})
    world.add_prefill()
    world.add_decode().gate.clear()
    stream, done = events((await world.complete(stream=True)).text)
    assert stream[-1]["error"]["code"] == "deadline_exceeded" and not done


async def test_pages_are_never_promised_twice(make_world):
    world = await make_world()
    world.add_prefill()
    decode = world.add_decode(num_pages=8)  # two requests of 4 pages at a time
    answers = await asyncio.gather(*(world.complete([9] * 30, max_tokens=30) for _ in range(12)))
    assert {answer.json()["choices"][0]["text"] for answer in answers} == {
        world.expected([9] * 30, 30)
    }
    assert decode.max_seen == 2 and decode.calls.count("reserve") == 12  # not one refusal
    await world.until(world.quiescent)


async def test_prefill_gets_about_two_chunks_of_work_at_a_time(make_world):
    world = await make_world()
    prefill = world.add_prefill(max_batch_tokens=16, max_running_requests=100)
    world.add_decode(max_running_requests=100)
    prefill.gate.clear()
    waiting = [asyncio.create_task(world.complete([9] * 12)) for _ in range(5)]
    await world.until(lambda: len(prefill.at_work) + len(world.service.queue) == 5)
    assert len(prefill.at_work) == 3  # 24 tokens outstanding are fewer than 2 * 16, 36 are not
    prefill.gate.set()
    assert all(answer.status_code == 200 for answer in await asyncio.gather(*waiting))


async def test_first_come_first_served(make_world):
    world = await make_world()
    prefill = world.add_prefill(max_running_requests=1)
    world.add_decode(max_running_requests=1)
    order = []
    run = prefill.run
    prefill.run = lambda request, grant: order.append(len(request.token_ids)) or run(request, grant)
    await asyncio.gather(*(world.complete([9] * size) for size in (40, 3, 60, 1)))
    assert order == [40, 3, 60, 1]


async def test_a_large_request_claims_one_decode_node_and_the_rest_go_on(make_world):
    world = await make_world()
    world.add_prefill(max_running_requests=64)
    ledgers = []
    for number in range(8):
        world.add_decode(f"decode-{number}", num_pages=16, max_running_requests=64)
        ledgers.append(world.service.nodes.find(f"decode-{number}").ledger)
        ledgers[-1].take("running", 9 * 16)  # 7 of 16 pages are free
    large = asyncio.create_task(world.complete([9] * 60, max_tokens=120))  # starts with 8
    await world.until(lambda: len(world.service.queue) == 1)
    small = [world.complete([9] * 4, max_tokens=4) for _ in range(20)]
    assert {answer.status_code for answer in await asyncio.gather(*small)} == {200}
    assert not large.done()
    for ledger in ledgers:
        ledger.give_back("running")
    assert (await large).status_code == 200
    await world.until(world.quiescent)


async def test_a_large_request_starts_however_many_small_ones_come_behind_it(make_world):
    world = await make_world()
    world.add_prefill(max_running_requests=2)
    for number in range(2):
        decode = world.add_decode(f"decode-{number}", num_pages=16, max_running_requests=8)
        decode.gate.clear()
    small = [asyncio.create_task(world.complete([9] * 60, max_tokens=20)) for _ in range(4)]
    await world.until(lambda: sum(len(d.generating) for d in world.decodes.values()) == 4)
    large = asyncio.create_task(world.complete([9] * 120, max_tokens=120))
    for decode in world.decodes.values():
        decode.gate.set()
    while not large.done():
        assert len(small) < 40, "overtaken by 36"
        small += [asyncio.create_task(world.complete([9] * 60, max_tokens=20)) for _ in range(2)]
        await asyncio.wait([large, *small[-2:]], return_when=asyncio.FIRST_COMPLETED)
    assert {answer.status_code for answer in await asyncio.gather(large, *small)} == {200}


async def test_a_request_that_outgrew_prefill_goes_on_where_decode_computes_it(make_world):
    world = await make_world()
    world.add_prefill(num_pages=4)  # 64 tokens
    decode = world.add_decode(num_pages=16)
    decode.preempt_after = 30
    answer = await world.complete([9] * 40, max_tokens=100, ignore_eos=True)
    assert answer.json()["usage"]["completion_tokens"] == 100
    [request] = decode.computed_here
    assert len(request.token_ids) == 40 + 1 + 30 and request.local
    await world.until(world.quiescent)


async def test_a_prompt_that_no_prefill_node_can_hold_is_refused_at_once(make_world):
    world = await make_world()
    prefill = world.add_prefill(num_pages=4)
    world.add_decode(num_pages=16)
    answer = await world.complete([9] * 65)
    error = answer.json()["error"]
    assert answer.status_code == 400 and "65 tokens, expected at most 64" in error["message"]
    assert not prefill.calls


async def test_a_request_cancelled_when_it_has_just_been_given_a_pair_returns_its_credit(world):
    ledger = world.service.nodes.find("decode-0").ledger
    ledger.take("everything", 64 * 16)
    line = world.service.queue
    request = GenerateRequest("r", (9,) * 20, SamplingParams(max_tokens=8))
    waiting = asyncio.create_task(line.pair_for(request, line.ticket()))
    await world.until(lambda: len(line) == 1)
    ledger.give_back("everything")
    await world.until(lambda: len(line) == 0)
    assert ledger.running == 1 and not waiting.done()  # it has the pair, and not had its turn
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    await world.until(world.quiescent)


async def test_those_behind_a_request_that_leaves_may_have_what_it_waited_for(make_world):
    world = await make_world()
    world.add_prefill()
    world.add_decode(num_pages=16)
    world.service.nodes.find("decode-0").ledger.take("running", 9 * 16)
    large = world.raw(prompt=[9] * 60, max_tokens=120)
    await world.until(lambda: len(world.service.queue) == 1)
    small = asyncio.create_task(world.complete())
    await world.until(lambda: len(world.service.queue) == 2)
    await large.leave()
    assert (await small).status_code == 200


async def test_a_stream_that_outgrows_its_promise_takes_the_room_of_others(make_world):
    world = await make_world()
    world.add_prefill()
    decode = world.add_decode(num_pages=12)  # 192 tokens
    ledger = world.service.nodes.find("decode-0").ledger
    decode.tokens_per_chunk = 60
    stream = world.raw(prompt=[9] * 16, max_tokens=170, ignore_eos=True, stream=True)
    await world.until(lambda: sum(promised_pages(ledger).values()) == 5)  # 16 + 64 tokens
    await world.until(lambda: sum(promised_pages(ledger).values()) > 8)
    assert ledger.room_tokens() < 4 * 16
    await stream.task
    await world.until(world.quiescent)


async def test_the_only_decode_node_takes_nothing_new_while_it_drains(world):
    world.draining.add("decode-0")
    world.publish()
    assert (await world.complete()).status_code == 503
    assert not world.decodes["decode-0"].calls
    line = world.service.queue
    request = GenerateRequest("r", (9,) * 20, SamplingParams(max_tokens=8))
    with pytest.raises(Unavailable):
        await line.pair_for(request, line.ticket())


async def test_a_draining_node_finishes_and_gets_nothing_new(world):
    drained = world.decodes["decode-0"]
    drained.gate.clear()
    running = asyncio.create_task(world.complete())
    await world.until(lambda: bool(drained.generating))
    world.add_decode("decode-1")
    await world.http.post("/admin/drain", json={"node": "decode-0"})
    idle = asyncio.create_task(world.service.wait_idle("decode-0"))
    assert (await world.complete()).status_code == 200
    assert drained.calls.count("reserve") == 1 and not idle.done()
    drained.gate.set()
    assert (await running).json()["choices"][0]["text"] == world.expected()
    await idle


async def test_the_lower_priority_goes_first_and_equals_by_arrival(make_world):
    world = await make_world()
    prefill = world.add_prefill(max_running_requests=1)
    world.add_decode(max_running_requests=1)
    seen = world.seen_requests()
    prefill.gate.clear()
    waiting = [asyncio.create_task(world.complete([9] * 40))]
    await world.until(lambda: bool(prefill.at_work))
    sent = [(3, 5), (60, -1), (1, 0), (9, -1)]
    waiting += [asyncio.create_task(world.complete([9] * n, priority=p)) for n, p in sent]
    await world.until(lambda: len(world.service.queue) == 4)
    prefill.gate.set()
    assert all(answer.status_code == 200 for answer in await asyncio.gather(*waiting))
    assert [len(request.token_ids) for request in seen] == [40, 60, 9, 1, 3]
    refused = await world.complete(priority=10**6)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "priority"


@pytest.mark.parametrize("long_from_tokens", [1, 50_000])  # keys made in a thread, or not
async def test_prompts_go_where_their_beginning_is_cached(
    make_world, monkeypatch, long_from_tokens
):
    monkeypatch.setattr(queue, "LONG_PROMPT_TOKENS", long_from_tokens)
    world = await make_world()
    nodes = [world.add_prefill(f"prefill-{number}") for number in range(3)]
    world.add_decode()
    beginning = list(range(10, 50))  # two units of 16 tokens, and a half
    for turn in range(4):
        await world.complete([*beginning, *range(60, 60 + turn)])
    assert sorted(node.calls.count("run") for node in nodes) == [0, 0, 4]
    told = nodes[0] if not nodes[0].calls else nodes[1]
    other = list(range(100, 140))
    for key in Prompt(GenerateRequest("r", tuple(other), SamplingParams(1))).keys("f", 16):
        told.journal.add(key)
    await world.http.get("/admin/status")  # the router looks at its nodes
    await world.complete(other)
    assert told.calls == ["run"]


async def test_policies_spread_work(make_world):
    for policy in ("round_robin", "least_loaded", "cache_aware"):
        world = await make_world(router={"decode_policy": policy, "prefill_policy": policy})
        world.add_prefill()
        nodes = [world.add_decode(f"decode-{number}") for number in range(3)]
        for _ in range(6):
            await world.complete()
        assert [node.calls.count("reserve") for node in nodes] == [2, 2, 2]


async def test_stopping_lets_streams_finish_and_refuses_new_ones(world):
    world.decodes["decode-0"].gate.clear()
    running = asyncio.create_task(world.complete())
    await world.until(lambda: bool(world.decodes["decode-0"].generating))
    stopping = asyncio.create_task(world.service.stop())
    await world.until(lambda: not world.service.ready)
    assert (await world.complete()).status_code == 503
    assert (await world.http.get("/ready")).status_code == 503
    world.decodes["decode-0"].gate.set()
    assert (await running).json()["choices"][0]["text"] == world.expected()
    await stopping


async def test_stopping_ends_what_takes_too_long_and_gives_it_back(world):
    world.decodes["decode-0"].gate.clear()
    running = asyncio.create_task(world.complete())
    await world.until(lambda: bool(world.decodes["decode-0"].generating))
    await world.service.stop(limit_s=0)
    assert (await running).status_code == 503
    assert not world.decodes["decode-0"].grants


async def test_a_lost_connection_is_noticed_by_the_call_that_meets_it(world):
    world.prefills["prefill-0"].faults = [NodeLost("connection reset")]
    other = world.add_prefill("prefill-1")
    world.service.nodes.find("prefill-1").last_picked = 1
    assert (await world.complete()).json()["choices"][0]["text"] == world.expected()
    assert other.calls == ["run"]
