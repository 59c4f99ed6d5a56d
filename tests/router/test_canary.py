"""A second deployment on a share of the requests: compared or answering, never in anyone's way."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
import socket
from types import SimpleNamespace

import pytest

from sluice.protocol.config import parse_config
from sluice.protocol.messages import ConfigError
from sluice.router.canary.canary import MAX_AT_ONCE, MAX_PENDING, Canary
from sluice.router.canary.transcript import Said, first_difference, transcript, transcript_of_body
from sluice.router.http.server import serve

STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
PIECE = {"choices": [{"index": 0, "text": "half", "finish_reason": None}]}
BROKEN = {
    "an error": b"HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n",
    "a refusal": b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n",
    "no HTTP": b"hello\r\n\r\n",
    "a closed connection": b"",
    "no JSON": b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nnope",
    "another shape": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
    "half a body": b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{",
    "half a stream": STREAM_HEAD + f"data: {json.dumps(PIECE)}\n\n".encode(),
    "an empty stream": STREAM_HEAD + b"data: [DONE]\n\n",
}


@pytest.fixture
async def other(make_world, checkpoint):
    """A second deployment: scripted nodes behind a real port."""
    world = await make_world(model={"path": str(checkpoint), "name": "other"})
    world.add_prefill()
    world.add_decode()
    server = await serve(world.service, "127.0.0.1", 0)
    world.url = server.url
    yield world
    await server.stop(limit_s=0)


@pytest.fixture
async def raw_server():
    """A server that answers with fixed bytes; `asked` counts, None: it never answers."""
    servers = []

    async def start(answer: bytes | None):
        server = SimpleNamespace(asked=0, released=asyncio.Event())

        async def handle(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            server.asked += 1
            if answer is None:
                await server.released.wait()
            writer.write(answer or b"")
            writer.close()

        server.listener = await asyncio.start_server(handle, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{server.listener.sockets[0].getsockname()[1]}"
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.released.set()
        server.listener.close()


@pytest.fixture
def with_canary(make_world):
    """A World whose canary is at the URL; it sees every request unless told otherwise."""

    async def make(url: str, **settings):
        canary = {"url": url, "model": "other", "weight": 1.0, **settings}
        world = await make_world(router={"canary": canary})
        world.add_prefill()
        world.add_decode()
        return world

    return make


def counted(world, result: str) -> float:
    return world.service.metrics.canary_requests.labels(result)._value.get()


async def until_counted(world, result: str, number: int = 1) -> None:
    await world.until(lambda: counted(world, result) == number)


@pytest.mark.parametrize("stream", [False, True])
async def test_equal_answers_agree(with_canary, other, stream):
    world = await with_canary(other.url)
    await world.complete(temperature=0, max_tokens=30, stream=stream)
    await world.chat(seed=7, max_tokens=30, stream=stream)
    await until_counted(world, "agreed", 2)
    assert other.prefills["prefill-0"].calls == ["run", "run"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_planted_disagreement_is_counted_and_only_ours_reaches_the_client(
    with_canary, other, stream, caplog, events
):
    world = await with_canary(other.url)
    world.script.plan = world.ids("the cat and the hat")
    other.script.plan = world.ids("the cat and the cat")
    answer = await world.complete(temperature=0, max_tokens=len(world.script.plan), stream=stream)
    pieces = events(answer.text)[0] if stream else [answer.json()]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == "the cat and the hat"
    assert {piece["model"] for piece in pieces} == {"tiny"}
    await until_counted(world, "disagreed")
    (line,) = [line for line in caplog.messages if "canary_disagreed" in line]
    assert "choice=0 character=16" in line and "request_id=" in line
    assert "hat" not in line and "cat and" not in line
    assert 'sluice:canary_requests_total{result="disagreed"} 1.0' in (
        await world.http.get("/metrics")
    ).text  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "stream", "shadow"),
    [
        case
        for case in itertools.product([*BROKEN, "nobody"], [False, True], [True, False])
        if case != ("half a stream", True, False)  # of which the client gets a piece: see below
    ],
)
async def test_a_broken_canary_costs_no_answer(
    with_canary, raw_server, events, kind, stream, shadow
):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        closed = f"http://127.0.0.1:{taken.getsockname()[1]}"
    url = closed if kind == "nobody" else (await raw_server(BROKEN[kind])).url
    world = await with_canary(url, shadow=shadow)
    answer = await world.complete(temperature=0, stream=stream)
    pieces = events(answer.text)[0] if stream else [answer.json()]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == world.expected()
    await until_counted(world, "failed")
    await world.until(world.quiescent)


async def test_clients_do_not_wait_for_a_hanging_canary_and_its_copies_are_bounded(
    with_canary, raw_server
):
    hanging = await raw_server(None)
    world = await with_canary(hanging.url)
    for _ in range(MAX_PENDING + 10):
        answer = await world.complete(temperature=0)
        assert answer.json()["choices"][0]["text"] == world.expected()
    await world.until(lambda: hanging.asked == MAX_AT_ONCE)
    assert counted(world, "skipped") == 10
    assert counted(world, "failed") == 0, "all the answers came while it hung"


async def test_a_copy_that_takes_too_long_has_failed(with_canary, raw_server):
    world = await with_canary((await raw_server(None)).url, timeout_s=0.05)
    await world.complete(temperature=0)
    await until_counted(world, "failed")


async def test_what_cannot_be_compared_is_skipped_untried(with_canary, other):
    world = await with_canary(other.url)
    await world.complete(temperature=1)  # draws at random
    await world.complete(temperature=0, max_tokens=-1)  # refused
    await world.complete(temperature=0, user="x" * (1 << 20))  # too long
    await until_counted(world, "skipped", 3)
    assert other.prefills["prefill-0"].calls == []


async def test_a_client_that_left_is_not_compared(with_canary, other):
    world = await with_canary(other.url)
    request = world.raw(temperature=0, stream=True, max_tokens=200)
    await world.until(lambda: request.messages.qsize() > 2)
    await request.leave()
    await until_counted(world, "skipped")


async def test_a_weight_is_the_share_of_requests():
    config = parse_config(
        {"model": {"path": "x"}, "router": {"canary": {"url": "http://x", "weight": 0.25}}}
    ).router.canary
    canary = Canary(config, lambda result: None, random.Random(1))
    assert 0.23 < sum(canary.draws() for _ in range(10_000)) / 10_000 < 0.27
    canary.retire()
    assert not any(canary.draws() for _ in range(100))
    await canary.close(0)


async def test_without_shadow_the_canary_answers(with_canary, other, events):
    world = await with_canary(other.url, shadow=False)
    other.script.plan = other.ids("the cat")
    assert (await world.complete(max_tokens=2)).json()["model"] == "other"
    stream, done = events((await world.chat(max_tokens=20, stream=True)).text)
    assert done and {event["model"] for event in stream} == {"other"}
    assert counted(world, "answered") == 2 and not world.prefills["prefill-0"].calls


async def test_a_stream_that_the_canary_breaks_off_ends_with_an_error(
    with_canary, raw_server, events
):
    server = await raw_server(BROKEN["half a stream"])
    world = await with_canary(server.url, shadow=False)
    stream, done = events((await world.complete(stream=True)).text)
    assert stream[0] == PIECE and stream[1]["error"]["code"] == "canary_failed" and not done
    assert counted(world, "failed") == 1


async def test_a_canary_that_failed_rests(with_canary, raw_server):
    server = await raw_server(None)
    world = await with_canary(server.url, shadow=False, timeout_s=0.05)
    for _ in range(5):
        answer = await world.complete()
        assert answer.json()["choices"][0]["text"] == world.expected()
    assert (counted(world, "failed"), counted(world, "skipped")) == (1, 4) and server.asked <= 1


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_the_canary_answers_leaves_nothing(with_canary, other, stream):
    world = await with_canary(other.url, shadow=False)
    other.prefills["prefill-0"].gate.clear()
    request = world.raw(stream=stream)
    await world.until(lambda: bool(other.prefills["prefill-0"].at_work))
    await request.leave()
    await world.until(other.quiescent)
    assert not world.prefills["prefill-0"].calls and counted(world, "answered") == 0


async def test_bad_requests_are_refused_by_our_own_router(with_canary, other):
    for shadow in (True, False):
        world = await with_canary(other.url, shadow=shadow)
        answer = await world.complete(max_tokens=-1)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "max_tokens"
        odd = await world.http.post("/v1/completions", content=b"[", headers={
            "content-type": "application/json"})  # fmt: skip
        assert odd.status_code == 400


async def test_two_that_are_each_others_canary_do_not_go_round(with_canary, raw_server):
    first = await with_canary("http://127.0.0.1:9")
    server = await serve(first.service, "127.0.0.1", 0)
    second = await with_canary(server.url, model="tiny")
    await second.complete(temperature=0)
    await until_counted(second, "agreed")
    assert counted(first, "failed") == counted(first, "skipped") == 0
    await server.stop(limit_s=0)


async def test_the_canarys_key_is_sent_and_the_clients_is_not(with_canary, make_world, tmp_path):
    (tmp_path / "theirs").write_text("their-key\n")
    keyed = await make_world(router={"api_keys_file": str(tmp_path / "theirs")})
    keyed.add_prefill()
    keyed.add_decode()
    server = await serve(keyed.service, "127.0.0.1", 0)
    world = await with_canary(
        server.url, model="", api_keys_file=str(tmp_path / "theirs"), timeout_s=20
    )
    await world.complete(temperature=0)
    await until_counted(world, "agreed")
    await server.stop(limit_s=0)


@pytest.mark.parametrize(
    ("canary", "expected"),
    [
        ({"config": "b.yaml", "weight": 0.1}, "sluice up"),
        ({"url": "127.0.0.1:8001"}, "http://127.0.0.1:8001"),
        ({"url": "http://x", "weight": 1.5}, "router.canary.weight"),
        ({"url": "http://x", "shadows": True}, "did you mean 'shadow'"),
    ],
)
def test_a_canary_that_cannot_work_is_refused(canary, expected):
    with pytest.raises(ConfigError, match=expected):
        parse_config({"model": {"path": "x"}, "router": {"canary": canary}})


def test_a_transcript_does_not_depend_on_how_the_answer_was_cut():
    call = {"index": 0, "function": {"name": "f", "arguments": "{}"}}
    message = {"reasoning_content": "hm", "content": "yes", "tool_calls": [call]}
    whole = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    deltas = [
        {"role": "assistant"}, {"reasoning_content": "h"}, {"reasoning_content": "m"},
        {"content": "ye"}, {"content": "s"}, {"tool_calls": [call]},
    ]  # fmt: skip
    chunks = [{"choices": [{"index": 0, "delta": d, "finish_reason": None}]} for d in deltas]
    chunks += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}, {"choices": []}]
    assert transcript(chunks) == transcript([whole]) == (Said("hmyesf{}", "stop"),)
    assert transcript(chunks[:-2]) is None
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    assert transcript_of_body(f"{body}data: [DONE]\n\n".encode()) == transcript([whole])
    assert transcript_of_body(body.encode()) is None


@pytest.mark.parametrize(
    ("ours", "theirs", "place"),
    [
        ([("abc", "stop")], [("abc", "stop")], None),
        ([("abc", "stop")], [("abd", "stop")], (0, 2)),
        ([("abc", "stop")], [("ab", "stop")], (0, 2)),
        ([("abc", "stop")], [("abc", "length")], (0, 3)),
        ([("a", "stop"), ("b", "stop")], [("a", "stop"), ("c", "stop")], (1, 0)),
        ([("a", "stop"), ("b", "stop")], [("a", "stop")], (1, 0)),
    ],
)
def test_the_first_difference_is_found(ours, theirs, place):
    found = first_difference(*(tuple(Said(*said) for said in side) for side in (ours, theirs)))
    assert (found and (found.choice, found.character)) == place


async def test_stopping_ends_copies_that_hang(with_canary, raw_server, caplog):
    caplog.set_level(logging.ERROR, logger="sluice")
    hanging = await raw_server(None)
    world = await with_canary(hanging.url)
    await world.complete(temperature=0)
    await world.until(lambda: hanging.asked == 1)
    await world.service.canary.close(limit_s=0)
    assert not caplog.messages
