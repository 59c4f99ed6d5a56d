"""A client that does not read holds neither nodes nor memory, and misses nothing when it does."""

import asyncio

import pytest

from sluice.router import nodes, streaming


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
