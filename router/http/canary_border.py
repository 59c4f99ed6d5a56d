"""CanaryBorder: where a share of the requests meets the canary, around everything the API does.

Shadow: request and answer pass through untouched and are noted down on the way; what the canary
makes of the request is nobody's wait. Otherwise the canary is asked first, and the app inside
answers whatever the canary does not.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sluice.router.canary.canary import Canary
from sluice.router.canary.client import MARK, MAX_BYTES, CanaryFailed, Sent
from sluice.router.openai.streaming import (
    CLIENT_CLOSED_REQUEST,
    ClientGone,
    Event,
    EventStream,
    OpenAIEnding,
    unless_gone,
)
from sluice.router.service import RouterService

PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})


class CanaryBorder:
    """ASGI middleware; it stands inside the one that sets the request id and checks the key."""

    def __init__(self, app: ASGIApp, service: RouterService, canary: Canary) -> None:
        self._app = app
        self._service = service
        self._canary = canary

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not (_is_generation(scope) and self._canary.draws()):
            await self._app(scope, receive, send)
        elif self._canary.shadows:
            await self._shadow(scope, receive, send)
        else:
            await self._share(scope, receive, send)

    async def _shadow(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, answer = _Notes(), _Notes()

        async def noted_receive() -> Message:
            message = await receive()
            body.add(message)
            return message

        async def noted_send(message: Message) -> None:
            answer.add(message)
            await send(message)

        try:
            await self._app(scope, noted_receive, noted_send)
        finally:
            content = body.content
            sent = None if content is None else _sent(scope, content)
            self._canary.shadow(sent, answer.content if answer.status == 200 else None)

    async def _share(self, scope: Scope, receive: Receive, send: Send) -> None:
        read, body = await _read_ahead(receive)
        sent = _sent(scope, body)
        fields = self._canary.request(sent) if len(body) <= MAX_BYTES else None
        if fields is None or not await self._answered(sent, fields, scope, receive, send):
            await self._app(scope, _replayed(read, receive), send)

    async def _answered(
        self, sent: Sent, fields: dict[str, Any], scope: Scope, receive: Receive, send: Send
    ) -> bool:
        """Whether the client has an answer, or is gone; if not, nothing was sent to it."""
        respond = self._respond_streamed if fields.get("stream") is True else self._respond
        with self._service.counted():
            try:
                await respond(sent, fields, scope, receive, send)
            except ClientGone:
                await Response(status_code=CLIENT_CLOSED_REQUEST)(scope, receive, send)
            except CanaryFailed:  # counted and logged where it was raised
                return False
        return True

    async def _respond(
        self, sent: Sent, fields: dict[str, Any], scope: Scope, receive: Receive, send: Send
    ) -> None:
        answer = await unless_gone(receive, self._canary.whole(sent, fields))
        await JSONResponse(answer)(scope, receive, send)

    async def _respond_streamed(
        self, sent: Sent, fields: dict[str, Any], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Raises CanaryFailed only before anything is sent; later it becomes an error event."""
        async with contextlib.aclosing(self._canary.stream(sent, fields)) as events:
            first = await unless_gone(receive, _next(events))
            await EventStream(_chained(first, events), OpenAIEnding())(scope, receive, send)


class _Notes:
    """What passed in one direction. `content` is None if it was more than MAX_BYTES."""

    def __init__(self) -> None:
        self.status = 0
        self._chunks: list[bytes] = []
        self._num_bytes = 0

    def add(self, message: Message) -> None:
        self.status = message.get("status", self.status)
        chunk = message.get("body", b"")
        self._num_bytes += len(chunk)
        if self._num_bytes <= MAX_BYTES:
            self._chunks.append(chunk)
        else:
            self._chunks.clear()

    @property
    def content(self) -> bytes | None:
        return b"".join(self._chunks) if self._num_bytes <= MAX_BYTES else None


def _is_generation(scope: Scope) -> bool:
    """Whether the request asks for text and does not come from a router whose canary we are."""
    return (
        scope["type"] == "http"
        and scope["method"] == "POST"
        and scope["path"] in PATHS
        and not any(name == MARK.encode() for name, _ in scope["headers"])
    )


def _sent(scope: Scope, body: bytes) -> Sent:
    return Sent(scope["path"], body, scope["state"]["request_id"])


async def _read_ahead(receive: Receive) -> tuple[list[Message], bytes]:
    """The request's messages and body, up to its end or to a little more than MAX_BYTES."""
    messages: list[Message] = []
    chunks: list[bytes] = []
    num_bytes = 0
    while num_bytes <= MAX_BYTES:
        message = await receive()
        messages.append(message)
        chunks.append(message.get("body", b""))
        num_bytes += len(chunks[-1])
        if not message.get("more_body", False):
            break
    return messages, b"".join(chunks)


def _replayed(read: list[Message], receive: Receive) -> Receive:
    """A `receive` that gives what was read ahead once more, then what follows."""
    return functools.partial(_replay, iter(read), receive)


async def _replay(read: Iterator[Message], receive: Receive) -> Message:
    message = next(read, None)
    return await receive() if message is None else message


async def _next(events: AsyncGenerator[dict[str, Any], None]) -> dict[str, Any]:
    return await anext(events)


async def _chained(
    first: dict[str, Any], rest: AsyncGenerator[dict[str, Any], None]
) -> AsyncGenerator[Event, None]:
    yield Event(first)
    async for event in rest:
        yield Event(event)
