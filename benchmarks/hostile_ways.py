"""Ways to send a hostile request: each makes one attempt and says how it ended.

What comes of an attempt is the answer's status ("400"), or "closed" if the server hung up without
one, or "left" where it was the client who did.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from sluice.benchmarks.load_client import connected

SLICE_BYTES = 1 << 20
STAY_UNREAD_S = 10.0
DRIP_S = 1.0
LEAVE_WITHIN_S = 0.05

Way = Callable[[str, bytes], Awaitable[str]]  # the router's URL, and all that is to be sent


async def answered(url: str, request: bytes) -> str:
    """Send it all and read the answer to its end; the server may answer before it has it all."""
    async with _streams(url) as (reader, writer):
        sending = asyncio.create_task(_send(writer, request))
        try:
            status = await _status(reader)
            with contextlib.suppress(OSError):
                while await reader.read(SLICE_BYTES):
                    pass
            return status
        finally:
            sending.cancel()


async def leaving(url: str, request: bytes) -> str:
    """Send it and leave at once, or within some milliseconds."""
    async with _streams(url) as (_, writer):
        await _send(writer, request)
        await asyncio.sleep(random.choice((0.0, random.random() * LEAVE_WITHIN_S)))
    return "left"


async def unread(url: str, request: bytes) -> str:
    """Send it and stay for a while without reading the answer."""
    connection = await connected(url)
    with contextlib.closing(connection):
        await asyncio.get_running_loop().sock_sendall(connection, request)
        await asyncio.sleep(STAY_UNREAD_S)
    return "left"


async def held(url: str, part: bytes) -> str:
    """Send a part of a request, and nothing more: how long does the server wait?"""
    async with _streams(url) as (reader, writer):
        await _send(writer, part)
        return await _status(reader)


async def dripped(url: str, request: bytes) -> str:
    """Send it byte by byte."""
    async with _streams(url) as (reader, writer):
        dripping = asyncio.create_task(_drip(writer, request))
        try:
            return await _status(reader)
        finally:
            dripping.cancel()


@asynccontextmanager
async def _streams(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()  # `close` would first send what is still to be sent


async def _send(writer: asyncio.StreamWriter, request: bytes) -> None:
    """In slices, as what the server does not take would be copied."""
    view = memoryview(request)
    with contextlib.suppress(OSError):  # the answer says why it hung up
        for begin in range(0, len(view), SLICE_BYTES):
            writer.write(view[begin : begin + SLICE_BYTES])
            await writer.drain()


async def _drip(writer: asyncio.StreamWriter, request: bytes) -> None:
    with contextlib.suppress(OSError):
        for byte in request:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(DRIP_S)


async def _status(reader: asyncio.StreamReader) -> str:
    try:
        line = await reader.readline()
    except (OSError, ValueError):  # reset, or no line of HTTP
        return "closed"
    return line.split()[1].decode() if line.startswith(b"HTTP/1.1 ") else "closed"
