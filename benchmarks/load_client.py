"""Clients of a load test: many streams that check their text, and clients that behave badly.

They speak HTTP/1.1 over bare asyncio, as a few hundred of them share the machine with what they
measure. Our router sends each event as one chunk, so an event is one line here.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

MAX_FILES = 8_192
SMALL_BUFFER_BYTES = 4096  # so that a client that does not read is felt soon


@dataclass(frozen=True)
class Answered:
    """One answer, with the seconds since the request; `problem` is empty if all went well."""

    text: str
    first_s: float
    whole_s: float
    problem: str = ""


def allow_many_connections() -> None:
    """Let this process open more files than the usual 1,024."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def request_bytes(url: str, body: Mapping[str, Any]) -> bytes:
    """A completion request on a connection of its own."""
    content = json.dumps(body)
    return (
        f"POST /v1/completions HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n{content}"
    ).encode()


async def stream(url: str, body: Mapping[str, Any]) -> Answered:
    """Stream one answer to its end; whatever goes wrong is in `problem`."""
    sent = time.perf_counter()
    parts: list[str] = []
    first_s = 0.0
    try:
        async for event in _events(url, body):
            if "error" in event:
                raise ConnectionError(event["error"]["message"])
            first_s = first_s or time.perf_counter() - sent
            parts += [choice["text"] for choice in event["choices"]]
    except OSError as error:
        problem = str(error) or type(error).__name__
        return Answered("".join(parts), first_s, time.perf_counter() - sent, problem)
    return Answered("".join(parts), first_s, time.perf_counter() - sent)


async def _events(url: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The events up to [DONE]. Raises OSError, as for a status that is not 200."""
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=1 << 20)
    with closing(writer):
        writer.write(request_bytes(url, {**body, "stream": True}))
        status = (await reader.readline()).decode().strip()
        if " 200 " not in f"{status} ":
            raise ConnectionError(f"expected 200: {status}")
        async for line in reader:
            if line == b"data: [DONE]\n":
                return
            if line.startswith(b"data: "):
                yield json.loads(line[6:])
    raise ConnectionError("the stream ended without [DONE]")


@asynccontextmanager
async def bad_clients(
    url: str, body: Mapping[str, Any], *, num_idle: int, num_unread: int
) -> AsyncIterator[None]:
    """For the block, so many connections that say nothing, and streams that nobody reads."""
    silent = [await connected(url) for _ in range(num_idle)]
    unread = [await connected(url) for _ in range(num_unread)]
    loop = asyncio.get_running_loop()
    for connection in unread:
        await loop.sock_sendall(connection, request_bytes(url, {**body, "stream": True}))
    try:
        yield
    finally:
        _close([*silent, *unread])


async def connected(url: str) -> socket.socket:
    where = urlsplit(url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, (where.hostname, where.port))
    return connection


def _close(connections: Sequence[socket.socket]) -> None:
    for connection in connections:
        connection.close()
