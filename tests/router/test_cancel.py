"""A client that leaves, in whichever phase, leaves nothing behind."""

from __future__ import annotations

import asyncio
import random

import pytest

from sluice.protocol.messages import GenerateRequest, SamplingParams


async def reach(world, phase: str, request) -> None:
    """Let the request come exactly as far as the phase."""
    prefill, decode = world.prefills["prefill-0"], world.decodes["decode-0"]
    reached = {
        "queued": lambda: len(world.service.queue) == 1,
        "reserving": lambda: world.service.nodes.find("decode-0").ledger.running == 1,
        "prefilling": lambda: bool(prefill.at_work),
        "handed over": lambda: bool(decode.generating),
        "decoding": lambda: request.messages.qsize() > 2,
    }
    await world.until(reached[phase])


def block(world, phase: str) -> None:
    """Stop the nodes so that no request gets past the phase."""
    if phase == "queued":
        world.service.nodes.find("decode-0").ledger.take("everything", 64 * 16)
    if phase == "reserving":
        world.decodes["decode-0"].alive.clear()
    if phase == "prefilling":
        world.prefills["prefill-0"].gate.clear()
    if phase == "handed over":
        world.decodes["decode-0"].gate.clear()


def unblock(world, phase: str) -> None:
    if phase == "queued":
        world.service.nodes.find("decode-0").ledger.give_back("everything")
    world.decodes["decode-0"].alive.set()
    world.decodes["decode-0"].gate.set()
    world.prefills["prefill-0"].gate.set()


PHASES = ["queued", "reserving", "prefilling", "handed over", "decoding"]


@pytest.mark.parametrize(
    ("phase", "streamed"),
    [*((phase, True) for phase in PHASES), *((p, False) for p in PHASES[:-1])],
)
async def test_leaving_frees_everything(world, phase, streamed):
    for _ in range(200):
        block(world, phase)
        request = world.raw(stream=streamed, max_tokens=200)
        await reach(world, phase, request)
        leaving = asyncio.create_task(request.leave())
        if phase != "reserving":  # there, only a node that answers can end the wait
            await leaving
        unblock(world, phase)
        await leaving
        await world.until(world.quiescent)
    assert (await world.complete()).json()["choices"][0]["text"] == world.expected()


async def test_leaving_the_queue_touches_no_node(world):
    block(world, "queued")
    request = world.raw()
    await reach(world, "queued", request)
    await request.leave()
    assert not world.decodes["decode-0"].calls and not world.prefills["prefill-0"].calls


async def test_a_request_cancelled_just_before_its_turn_is_passed_over(world):
    block(world, "queued")
    queue = world.service.queue
    request = GenerateRequest("r", (7,), SamplingParams(max_tokens=1))
    waiting = asyncio.create_task(queue.pair_for(request, queue.ticket()))
    await world.until(lambda: len(queue) == 1)
    waiting.cancel()
    unblock(world, "queued")  # its turn, before the task can take itself out
    await asyncio.wait({waiting})
    assert waiting.cancelled() and world.quiescent()


async def test_prefill_is_stopped_before_its_pages_are_given_back(world):
    block(world, "prefilling")
    request = world.raw()
    await reach(world, "prefilling", request)
    await request.leave()
    await world.until(world.quiescent)
    assert world.prefills["prefill-0"].calls == ["run", "abort"]
    assert world.decodes["decode-0"].calls == ["reserve", "release"]


async def test_random_cancels_leave_silence(world):
    seed = random.randrange(2**32)
    print(f"seed={seed}")
    rng = random.Random(seed)
    world.add_decode("decode-1")
    requests = []
    for _ in range(200):
        size = rng.randrange(1, 50)
        requests.append(world.raw(prompt=[7] * size, max_tokens=rng.randrange(1, 60)))
        for _ in range(rng.randrange(6)):
            await asyncio.sleep(0)
        if rng.random() < 0.5:
            await asyncio.wait({asyncio.create_task(rng.choice(requests).leave())})
    await asyncio.gather(*(request.task for request in requests))
    await world.until(world.quiescent)
    assert (await world.complete()).status_code == 200
