"""Answers that end when their client does: server-sent events, and work that a client waits for.

Memory per client is bounded whatever it reads: events are made only when the one before has been
taken by the server, whose write buffer has a fixed limit, and of a client that does not read no
more than a few seconds' tokens are computed (RoutedDecode). One that takes nothing for SEND_LIMIT_S
is treated as gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sluice.protocol.messages import SluiceError
from sluice.router.common.errors import body_of, error_body
from sluice.router.common.events import log_event

logger = logging.getLogger(__name__)

SEND_LIMIT_S = 60.0
CLIENT_CLOSED_REQUEST = 499  # nobody reads it; access logs know the number from nginx
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would otherwise collect the stream
]

# JSON leaves these as they are, but some clients split lines at them.
LINE_ENDS = {ord(c): f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"}

T = TypeVar("T")


class ClientGone(Exception):
    """The client has closed its connection."""


class ClientStuck(ClientGone):
    """It is connected, but has read nothing for SEND_LIMIT_S."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; a client that leaves cancels it, cleanup included, and raises ClientGone."""
    try:
        async with asyncio.timeout(None) as staying:
            watcher = asyncio.create_task(_watch(receive, staying))
            try:
                return await work
            finally:
                watcher.cancel()
    except TimeoutError as error:
        if staying.expired():
            raise ClientGone from error
        raise


async def _watch(receive: Receive, staying: asyncio.Timeout) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    staying.reschedule(0.0)


@dataclass(frozen=True)
class Event:
    """A server-sent event: JSON, with a name where the API's events have one."""

    data: dict[str, Any]
    name: str = ""

    def __str__(self) -> str:
        """Without any character in it that a client might take for the end of a line."""
        data = json.dumps(self.data, ensure_ascii=False).translate(LINE_ENDS)
        return f"event: {self.name}\ndata: {data}\n\n" if self.name else f"data: {data}\n\n"


class Ending(Protocol):
    """How one API ends its streams."""

    @property
    def done(self) -> str:
        """What follows the last event; "" for nothing."""
        ...

    def failed(self, error: dict[str, Any], *, status: int) -> Event:
        """The last event of a stream that fails. error: OpenAI's error object, of that status."""
        ...


class OpenAIEnding:
    """Chat's and completions'."""

    done = "[DONE]"

    def failed(self, error: dict[str, Any], *, status: int) -> Event:
        return Event(error)


class EventStream(Response):
    """Sends events as they come, and then what tells that these were all.

    An error before the first event is a plain error with its own status, raised to whoever gives
    errors their shape; after it, an event that ends the stream.
    """

    def __init__(self, events: AsyncGenerator[Event, None], ending: Ending) -> None:
        super().__init__()
        self._events = events
        self._ending = ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._run(send))
        except ClientStuck:
            request_id = scope["state"]["request_id"]
            log_event(logger, "not_read", request_id=request_id, limit_s=SEND_LIMIT_S)
        except ClientGone:
            pass  # the record of the request has logged it

    async def _run(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            first = await anext(events)
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            await _send_text(send, str(first))
            try:
                async for event in events:
                    await _send_text(send, str(event))
                if self._ending.done:
                    await _send_text(send, f"data: {self._ending.done}\n\n")
            except SluiceError as error:
                failure = self._ending.failed(body_of(error), status=error.status)
                await _send_text(send, str(failure))
            except ClientGone:
                raise
            except Exception:
                logger.exception("event=internal_error while streaming")
                failure = self._ending.failed(error_body("internal error", status=500), status=500)
                await _send_text(send, str(failure))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_text(send: Send, text: str) -> None:
    try:
        async with asyncio.timeout(SEND_LIMIT_S):
            message = {"type": "http.response.body", "body": text.encode(), "more_body": True}
            await send(message)
    except TimeoutError as error:
        raise ClientStuck from error
