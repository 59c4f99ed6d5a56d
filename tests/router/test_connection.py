"""What a stranger can do to the server with bytes alone, before any key is looked at."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from sluice.router.http import connection
from sluice.router.http.server import serve

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
BODY = b'{"model": "tiny", "prompt": "the cat", "max_tokens": 8}'
POST = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture
async def server(world):
    server = await serve(world.service, "127.0.0.1", 0)
    yield server
    await server.stop(limit_s=0)


@contextlib.asynccontextmanager
async def connected(server):
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def answer_of(reader) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the next answer."""
    async with asyncio.timeout(20):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
    return int(head[0].split()[1]), headers, body


async def ask(server, data: bytes) -> tuple[int, dict[str, str], bytes]:
    async with connected(server) as (reader, writer):
        writer.write(data)
        return await answer_of(reader)


async def lives(server) -> None:
    assert (await ask(server, HEALTH))[0] == 200


def is_error(answer, status: int) -> dict:
    assert answer[0] == status
    assert answer[1]["x-request-id"] and answer[1]["content-type"] == "application/json"
    error = json.loads(answer[2])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


NO_HTTP = [
    b"hello\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64,  # TLS
    b"FOO / HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /\x80 HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET / HTTP/9.9\r\nhost: x\r\n\r\n",
    HEAD + b"content-length: -5\r\n\r\n",
    HEAD + b"content-length: 99999999999999999999999\r\n\r\n",
    HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
    HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    HEAD + b"transfer-encoding: gzip\r\n\r\nhello",
    HEAD + b"transfer-encoding: chunked\r\n\r\nnot-a-size\r\nhello\r\n",
    b"GET /health HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n",
]


@pytest.mark.parametrize("data", NO_HTTP, ids=lambda data: repr(data[-30:]))
async def test_what_is_no_http_is_a_400_in_the_usual_shape(server, data):
    is_error(await ask(server, data), 400)
    await lives(server)


@pytest.mark.parametrize(
    "data",
    [
        b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\n",
        b"GET / HTTP/1.1\r\nx: " + b"a" * (1 << 20),
        b"GET / HTTP/1.1\r\n" + b"a" * (1 << 20),
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (1 << 17),
        b"GET / HTTP/1.1\r\nx: " + b"a" * (70 << 10) + b"\r\n\r\n",  # complete, within one read
        HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\nx: " + b"a" * (1 << 20),
        HEAD + b"transfer-encoding: chunked\r\n\r\n5;" + b"a" * (1 << 20),
        HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * (1 << 17),
    ],
    ids=["url", "value", "name", "many", "whole", "trailer", "chunk extension", "tiny chunks"],
)
async def test_a_head_without_end_is_refused_at_its_limit(server, data):
    async with connected(server) as (reader, writer):
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            is_error(await answer_of(reader), 431)
    await lives(server)


async def test_a_head_below_the_limit_is_taken(server):
    status, _, _ = await ask(server, HEALTH[:-2] + b"x: " + b"a" * (50 << 10) + b"\r\n\r\n")
    assert status == 200


async def test_a_body_in_small_chunks_is_taken(server):
    content = BODY + b" " * (100 << 10)
    pieces = [content[begin : begin + 8] for begin in range(0, len(content), 8)]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    status, _, _ = await ask(
        server, HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    )
    assert status == 200


@pytest.mark.parametrize("sent", [b"G", b"GET / HTTP/1.1\r\n", HEAD])
async def test_a_head_that_does_not_end_is_given_up(server, sent, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_LIMIT_S", 0.2)
    is_error(await ask(server, sent), 408)


@pytest.mark.parametrize("sent", [b"", b"{", b'{"model": "tiny", "prompt": "'])
async def test_a_body_that_does_not_come_is_given_up(server, sent, monkeypatch):
    monkeypatch.setattr(connection, "PROGRESS_LIMIT_S", 0.2)
    is_error(await ask(server, HEAD + b"content-length: 9999\r\n\r\n" + sent), 408)


async def test_a_connection_that_says_nothing_is_closed_like_an_idle_one(make_world):
    world = await make_world(router={"keep_alive_s": 1})
    server = await serve(world.service, "127.0.0.1", 0)
    try:
        async with connected(server) as (silent, _), connected(server) as (reader, writer):
            writer.write(HEALTH)
            assert (await answer_of(reader))[0] == 200
            async with asyncio.timeout(20):
                assert await silent.read() == b"" and await reader.read() == b""
    finally:
        await server.stop(limit_s=0)


async def test_of_thousands_of_half_sent_requests_the_oldest_make_room(server, monkeypatch):
    """Nobody is held up by them, and what is sent at once is answered."""
    limit = server._server.config.http_protocol_class.keywords["shared"].half_sent._limit
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for _ in range(limit + 50):
            reader, writer = await stack.enter_async_context(connected(server))
            writer.write(HEAD + b"content-length: 9999\r\n\r\n{")
            clients.append(reader)
        for reader in clients[:10]:
            is_error(await answer_of(reader), 408)
        assert (await ask(server, HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY))[
            0
        ] == 200


async def test_a_client_without_a_key_is_refused_before_its_body_comes(make_world, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    world = await make_world(router={"api_keys_file": str(keys)})
    server = await serve(world.service, "127.0.0.1", 0)
    try:
        is_error(await ask(server, HEAD + b"content-length: 9999999\r\n\r\n"), 401)
    finally:
        await server.stop(limit_s=0)


async def test_requests_in_a_row_are_answered_in_order(server):
    async with connected(server) as (reader, writer):
        writer.write(HEALTH + POST + HEALTH)
        bodies = [await answer_of(reader) for _ in range(3)]
    assert [status for status, _, _ in bodies] == [200] * 3
    assert b"choices" in bodies[1][2] and b"choices" not in bodies[0][2] + bodies[2][2]


async def test_http_1_0_is_answered_and_closed(server):
    async with connected(server) as (reader, writer):
        writer.write(b"GET /health HTTP/1.0\r\n\r\n")
        assert (await answer_of(reader))[0] == 200
        assert await reader.read() == b""


UPGRADES = [
    b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n",
    b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n",
]


@pytest.mark.parametrize("upgrade", UPGRADES, ids=["h2c", "websocket"])
async def test_an_offered_upgrade_is_declined_and_the_body_kept(server, upgrade):
    post = HEAD + upgrade + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
    async with connected(server) as (reader, writer):
        for data in (post, post[:60], post[60:], HEALTH + post):  # in one piece, in two, in a row
            writer.write(data)
            await writer.drain()
        answers = [await answer_of(reader) for _ in range(4)]
    assert [status for status, _, _ in answers] == [200] * 4


async def test_a_stream_is_cut_where_its_client_sends_what_is_no_http(world, server):
    world.decodes["decode-0"].gate.clear()
    body = BODY[:-1] + b', "stream": true}'
    async with connected(server) as (reader, writer):
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        await reader.readuntil(b"data: ")
        writer.write(b"\x00\x01\x02 nonsense\r\n\r\n")
        rest = await reader.read()
        assert b"HTTP/1.1" not in rest
    await world.until(world.quiescent)


@pytest.mark.parametrize("path", ["/v1/models/", "/v1//models", "//v1/models", "/v1/models/tiny/"])
async def test_slashes_too_many_do_not_matter(world, path):
    answer = await world.http.get(f"http://test{path}")
    assert answer.status_code == 200


async def test_slashes_too_many_open_no_door(make_world, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("admin:root\nsecret\n")
    world = await make_world(router={"api_keys_file": str(keys)})
    for path in ("//admin/status", "/admin//status", "/admin/status/", "/%61dmin/status"):
        url = f"http://test{path}"
        assert (await world.http.get(url)).status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert (await world.http.get(url, headers=headers)).status_code == 403


async def test_unknown_paths_and_methods_are_refused_in_the_usual_shape(world):
    for method, path, status in (("PUT", "/v1/models", 405), ("GET", "/nothing/", 404)):
        answer = await world.http.request(method, path)
        assert answer.status_code == status and answer.json()["error"]["code"]


@pytest.mark.parametrize("coding", ["gzip", "br", "deflate, gzip"])
async def test_a_coded_body_is_refused_with_the_way_out(world, coding):
    headers = {"content-type": "application/json", "content-encoding": coding}
    answer = await world.http.post("/v1/completions", content=BODY, headers=headers)
    assert answer.status_code == 415 and "identity" in answer.json()["error"]["message"]


CONTROLS = ["\x1b]0;x\x07\x1b[2J", "\n", "\r", "\x00", "\x85", "\u202e", "\u2028"]


@pytest.mark.parametrize("mark", CONTROLS, ids=ascii)
async def test_no_character_of_a_client_gets_into_a_log_line(world, caplog, mark):
    caplog.set_level("INFO", logger="sluice")
    path = "/a" + "".join(f"%{byte:02x}" for byte in mark.encode()) + "event=finished"
    assert (await world.http.get(path)).status_code == 404
    [line] = [r.getMessage() for r in caplog.records if "event=refused" in r.getMessage()]
    assert line.isprintable() and mark not in line


async def test_a_path_without_end_leaves_a_short_line(server, caplog):
    caplog.set_level("INFO", logger="sluice")
    assert (await ask(server, b"GET /" + b"a" * 50_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n"))[0] == 404
    assert max(len(record.getMessage()) for record in caplog.records) < 2000
