"""Waiting happens in the queue: in order, bounded, and never longer than the deadline."""

from __future__ import annotations

import asyncio
import time

from sluice.engine.protocol import GenerateRequest, NodeLost, SamplingParams
from sluice.router.prompt import Prompt


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


async def test_prompts_go_where_their_beginning_is_cached(make_world):
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
