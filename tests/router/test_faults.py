"""Nodes fail; clients see the reference text or an error, never another text."""

from __future__ import annotations

import asyncio
import random

import pytest

from sluice.protocol.messages import NodeLost, Refused, TransferFailed
from sluice.router.dispatch.dispatcher import MAX_FAILURES

EOS = 1


def text_of(stream: list[dict]) -> str:
    return "".join(choice["text"] for event in stream for choice in event["choices"])


@pytest.mark.parametrize("die_after", [1, 2, 9])
@pytest.mark.parametrize("streamed", [False, True])
async def test_decode_death_mid_stream_costs_the_client_nothing(world, events, die_after, streamed):
    world.decodes["decode-0"].die_after = die_after
    other = world.add_decode("decode-1")
    world.service.nodes.find("decode-1").last_picked = 1  # decode-0 is next
    answer = await world.complete(max_tokens=30, stream=streamed)
    text = text_of(events(answer.text)[0]) if streamed else answer.json()["choices"][0]["text"]
    assert text == world.expected(max_tokens=30)
    assert "reserve" in other.calls
    assert 'sluice:retries_total{reason="node_lost"} 1.0' in (await world.http.get("/metrics")).text
    await world.until(world.quiescent)


async def test_fail_over_delivers_held_back_stop_text_once(world, events):
    world.script.plan = (*world.ids("and the hat of the naïve"), EOS)
    stop = "hat of the cat"  # held back over the node's death, then not completed
    for die_after in range(1, 6):
        world.decodes["decode-0"].die()
        world.remove("decode-0")
        world.add_decode("decode-0").die_after = die_after
        world.add_decode(f"decode-{die_after}")
        world.service.nodes.find(f"decode-{die_after}").last_picked = 10**6 + die_after
        stream, done = events((await world.complete(stop=stop, stream=True, max_tokens=50)).text)
        assert text_of(stream) == "and the hat of the naïve" and done
        assert world.decodes["decode-0"].dead
        world.remove(f"decode-{die_after}")


async def test_prefill_death_is_only_latency(world):
    world.prefills["prefill-0"].gate.clear()
    request = world.raw()
    await world.until(lambda: world.prefills["prefill-0"].at_work)
    world.add_prefill("prefill-1")
    world.remove("prefill-0")
    await request.task
    assert "prefill-1" in world.prefills and world.prefills["prefill-1"].calls == ["run"]
    await world.until(world.quiescent)
    assert len(world.decodes["decode-0"].voided) == 0  # the node could still confirm the abort


async def test_unconfirmed_abort_voids_the_grant(world):
    prefill = world.prefills["prefill-0"]
    prefill.faults = [NodeLost("gone")]
    original, prefill.abort = prefill.abort, None

    async def abort(request_id):
        raise NodeLost("gone")

    prefill.abort = abort
    answer = await world.complete()  # the heartbeat finds the node alive again, or not: 503
    assert answer.status_code in (200, 503)
    decode = world.decodes["decode-0"]
    await world.until(lambda: len(decode.voided) >= 2)  # said again while nobody confirms
    [grant_id] = set(decode.voided)
    prefill.abort = original
    await world.until(lambda: decode.confirmed == [grant_id])


async def test_a_prefill_node_that_has_left_is_asked_no_more(make_world):
    world = await make_world(transfer={"lease_s": 0.2})
    world.add_prefill()
    world.add_decode()
    prefill = world.prefills["prefill-0"]
    prefill.faults = [NodeLost("gone")]

    async def abort(request_id):
        world.remove("prefill-0")
        raise NodeLost("gone")

    prefill.abort = abort
    assert (await world.complete()).status_code == 503
    await world.until(world.quiescent)
    assert len(world.decodes["decode-0"].voided) == 1


@pytest.mark.parametrize("num_faults", [1, 2])
async def test_failed_transfers_are_repeated(world, num_faults):
    world.prefills["prefill-0"].faults = [TransferFailed("lost bytes")] * num_faults
    answer = (await world.complete()).json()
    assert answer["choices"][0]["text"] == world.expected()
    assert world.prefills["prefill-0"].calls.count("abort") == num_faults
    await world.until(world.quiescent)


async def test_a_fault_that_stays_becomes_an_error(world, events):
    prefill = world.prefills["prefill-0"]
    prefill.faults = [TransferFailed("lost bytes")] * 6
    for streamed in (False, True):  # nothing was sent yet, so both get a status
        answer = await world.complete(stream=streamed)
        assert answer.status_code == 500 and "lost bytes" in answer.json()["error"]["message"]
    await world.until(world.quiescent)


async def test_after_the_first_token_an_error_is_an_event_without_done(make_world, events):
    world = await make_world(transfer={"lease_s": 0.2})
    world.add_prefill()
    world.add_decode().die_after = 3
    stream, done = events((await world.complete(stream=True)).text)
    assert stream[-1]["error"]["code"] == "unavailable" and not done
    assert world.expected().startswith(text_of(stream[:-1]))


async def test_an_error_chunk_is_repeated_where_it_stopped(world):
    world.decodes["decode-0"].error_after = 3
    assert (await world.complete()).json()["choices"][0]["text"] == world.expected()
    assert 'reason="node_error"} 1.0' in (await world.http.get("/metrics")).text


async def test_a_bug_mid_stream_is_an_error_event(world, events):
    world.script.plan = (60, -1)  # no tokenizer can decode that
    stream, done = events((await world.complete(stream=True)).text)
    assert stream[-1]["error"]["type"] == "server_error" and not done
    await world.until(world.quiescent)


async def test_a_stream_waits_for_the_only_decode_node_to_come_back(world):
    world.decodes["decode-0"].die_after = 3
    request = world.raw(max_tokens=20)
    await world.until(lambda: world.decodes["decode-0"].dead)
    world.remove("decode-0")
    await world.until(lambda: len(world.service.queue) == 1)
    world.add_decode("decode-1")
    await request.task
    start = await request.messages.get()
    assert start["status"] == 200
    await world.until(world.quiescent)
    assert world.decodes["decode-1"].calls == ["reserve", "release"]


async def test_refusals_put_the_request_back_without_counting(world):
    world.decodes["decode-0"].faults = [Refused("no page of table 0")] * 5
    answer = (await world.complete()).json()
    assert answer["choices"][0]["text"] == world.expected()
    await world.until(world.quiescent)


async def test_a_frozen_node_is_lost_after_its_lease_and_usable_when_back(make_world):
    world = await make_world(transfer={"lease_s": 0.2})
    world.add_prefill()
    frozen = world.add_decode()
    world.script.plan = (60,) * 5
    frozen.gate.clear()
    request = world.raw(max_tokens=20)
    await world.until(lambda: bool(frozen.generating))
    frozen.alive.clear()
    world.add_decode("decode-1")
    await request.task
    assert (await request.messages.get())["status"] == 200
    assert world.service.nodes.find("decode-0").lost_because
    frozen.alive.set()
    frozen.gate.set()
    await world.until(lambda: world.service.nodes.find("decode-0").ready)
    await world.until(lambda: not frozen.grants)
    world.remove("decode-1")
    assert (await world.complete()).status_code == 200


async def test_a_restarted_node_replaces_its_old_self(world):
    for _ in range(10):
        world.prefills["prefill-0"].dead = True
        world.add_prefill()  # same id, new incarnation
        assert (await world.complete()).json()["choices"][0]["text"] == world.expected()
    await world.until(world.quiescent)


async def test_chaos_ends_in_reference_texts_and_silence(world):
    seed = random.randrange(2**32)
    print(f"seed={seed}")
    rng = random.Random(seed)
    for number in (1, 2):
        world.add_prefill(f"prefill-{number}")
        world.add_decode(f"decode-{number}")
    requests = []
    for _ in range(60):
        node = rng.choice([*world.prefills.values(), *world.decodes.values()])
        fault = Refused if node.info.role == "decode" else TransferFailed
        # One failure fewer than a request gives up at: all of them might meet the same one.
        spare = sum(len(prefill.faults) for prefill in world.prefills.values()) < MAX_FAILURES - 1
        if rng.random() < 0.3 and (fault is Refused or spare):
            node.faults.append(fault("injected"))
        prompt = list(rng.choices(range(5, 200), k=rng.randrange(1, 60)))
        requests.append((prompt, world.complete(prompt, max_tokens=rng.randrange(1, 60))))
    answers = await asyncio.gather(*(answer for _, answer in requests))
    for (prompt, _), answer in zip(requests, answers, strict=True):
        body = answer.json()
        num_tokens = body["usage"]["completion_tokens"]
        assert body["choices"][0]["text"] == world.expected(prompt, num_tokens)
    await world.until(world.quiescent)


async def test_a_request_under_which_two_nodes_were_lost_goes_to_no_third(world):
    prefill = world.prefills["prefill-0"]
    prefill.faults = [NodeLost("its process died")] * 3
    answer = await world.complete()
    assert answer.status_code == 500
    assert "2 nodes were lost while they computed this request" in answer.json()["error"]["message"]
    assert prefill.calls.count("run") == 2


async def test_an_answer_that_goes_on_survives_any_number_of_lost_nodes(world):
    decode = world.decodes["decode-0"]
    decode.die_after = 3

    reviving = asyncio.create_task(_revive(world, decode))
    answer = await world.complete(max_tokens=30)
    reviving.cancel()
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == world.expected(max_tokens=30)


async def _revive(world, decode):
    """Bring the node back whenever it has died."""
    while True:
        await asyncio.sleep(0.01)
        if decode.dead:
            decode.streams.clear()
            decode.dead = False
