"""A client that does not read holds neither nodes nor memory, and misses nothing when it does."""

import asyncio

import pytest

from sluice.router.dispatch import routed_node as nodes
from sluice.router.openai import streaming


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Tokens count as unread as soon as they have come."""
    monkeypatch.setattr(nodes, "UNREAD_LIMIT_S", 0.0)


def unread(world):
    """A stream of 100 tokens, of which the client takes nothing before it is told to."""
    return world.raw(stream=True, max_tokens=100, ignore_eos=True, max_unread=2)


async def read_on(request) -> str:
    """Take every message until the answer ends; what was sent."""
    sent, more = b"", True
    while more:
        message = await request.messages.get()
        sent, more = sent + message.get("body", b""), message.get("more_body", True)
    await request.task
    return sent.decode()


async def test_an_unread_stream_gives_its_nodes_back_and_goes_on_when_it_is_read(
    world, monkeypatch, events
):
    world.script.plan = (7,) * 100
    request = unread(world)
    await world.until(lambda: "release" in world.decodes["decode-0"].calls)
    await world.until(world.quiescent)
    assert not request.task.done()
    monkeypatch.setattr(nodes, "UNREAD_LIMIT_S", 5.0)
    sent, done = events(await read_on(request))
    text = "".join(event["choices"][0]["text"] for event in sent)
    assert done and text == world.tokenizer.decode([7] * 100)
    await world.until(world.quiescent)


async def test_others_get_the_slots_of_unread_streams(world, monkeypatch):
    requests = [unread(world) for _ in range(4)]  # all that decode runs at once
    await world.until(lambda: world.decodes["decode-0"].calls.count("release") == 4)
    monkeypatch.setattr(nodes, "UNREAD_LIMIT_S", 5.0)
    assert (await world.complete()).json()["choices"][0]["text"] == world.expected()
    await asyncio.gather(*(request.leave() for request in requests))
    await world.until(world.quiescent)


async def test_a_client_that_never_reads_is_let_go_with_a_log_line(world, monkeypatch, caplog):
    monkeypatch.setattr(streaming, "SEND_LIMIT_S", 0.1)
    with caplog.at_level("INFO", logger="sluice"):
        await unread(world).task
    assert "event=parked request_id=" in caplog.text
    assert "event=not_read request_id=" in caplog.text
    await world.until(world.quiescent)


async def test_an_answer_of_prefill_that_comes_late_is_not_the_clients_fault(world, caplog):
    prefill, decode = world.prefills["prefill-0"], world.decodes["decode-0"]
    world.script.plan = (7,) * 100
    run, answered = prefill.run, asyncio.Event()

    async def late(request, grant):
        result = await run(request, grant)
        await answered.wait()  # busy with its next step
        return result

    prefill.run = late
    with caplog.at_level("INFO", logger="sluice"):
        answer = asyncio.create_task(world.complete(max_tokens=100, ignore_eos=True))
        await world.until(lambda: any(task.done() for task in decode.generating.values()))
        await world.turns()  # all tokens have come, and nobody could read them
        answered.set()
        assert (await answer).json()["usage"]["completion_tokens"] == 100
    assert decode.calls.count("reserve") == 1 and "event=parked" not in caplog.text


async def test_a_parked_request_is_no_failure_of_anybody(world, monkeypatch):
    world.script.plan = (7,) * 100
    request = unread(world)
    calls = world.decodes["decode-0"].calls
    for _ in range(5):  # more often than attempts may fail
        num_releases = calls.count("release")
        for _ in range(3):
            await request.messages.get()
        await world.until(lambda before=num_releases: calls.count("release") > before)
    monkeypatch.setattr(nodes, "UNREAD_LIMIT_S", 5.0)
    assert "[DONE]" in await read_on(request)
    assert all(not node.breaker.num_failures for node in world.service.nodes)
