"""OpenAI workers that answer at once: the quickest that asyncio allows, and one in FastAPI."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from sluice.router.http.server import bind

MODEL_NAME = "tiny-v4"
TEXT = " token"
STREAMS = b'"stream": true'


def answer(num_tokens: int) -> bytes:
    """The body of a whole answer."""
    usage = {"prompt_tokens": 16, "completion_tokens": num_tokens, "total_tokens": 16 + num_tokens}
    return json.dumps(_object(TEXT * num_tokens, "length") | {"usage": usage}).encode()


def events(num_tokens: int) -> list[bytes]:
    """The server-sent events of a streamed answer."""
    objects = [_object(TEXT, None)] * num_tokens + [_object("", "length")]
    return [f"data: {json.dumps(event)}\n\n".encode() for event in objects] + [b"data: [DONE]\n\n"]


def _object(text: str, finish_reason: str | None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
    return {
        "id": "cmpl-" + 32 * "0",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": MODEL_NAME,
        "choices": [choice],
    }


class Worker(asyncio.Protocol):
    """Answers whatever comes in HTTP/1.1 with bytes made before; does not read what it is asked."""

    def __init__(self, num_tokens: int) -> None:
        body = answer(num_tokens)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n%b\r\n\r\n"
        length = b"content-length: %d" % len(body)
        self._whole = head % (b"application/json", length) + body
        parts = [b"%x\r\n%b\r\n" % (len(event), event) for event in (*events(num_tokens),)]
        chunked = head % (b"text/event-stream", b"transfer-encoding: chunked")
        self._stream = [chunked, *parts, b"0\r\n\r\n"]
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end or len(body) < _content_length(head):
            return
        self._received = b""
        if STREAMS in body.replace(b'":true', b'": true'):
            for part in self._stream:  # one by one, as a model would
                self._transport.write(part)
        else:
            self._transport.write(self._whole)


def _content_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


def run_worker(told: Connection, num_tokens: int) -> None:
    """Serve on a free port, which is told; a process's whole life."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Worker(num_tokens), "127.0.0.1", 0)
        told.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


def run_fastapi(told: Connection, num_tokens: int) -> None:
    """The same answers from FastAPI and uvicorn, as most workers are made."""
    app = FastAPI()

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        asked = await request.json()
        if asked.get("stream"):
            return StreamingResponse(_each(events(num_tokens)), media_type="text/event-stream")
        return JSONResponse(json.loads(answer(num_tokens)))

    listener = bind("127.0.0.1", 0)
    told.send(listener.getsockname()[1])
    uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False)).run(sockets=[listener])


async def _each(parts: list[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
