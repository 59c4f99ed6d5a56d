"""Connection: uvicorn's HTTP/1.1 protocol, with limits on what a client may send and how slowly.

uvicorn keeps any header, waits for ever for the rest of a request, answers what is no HTTP in its
own words, and loses the body of a request that offers an upgrade. All limits hold before anybody
has shown a key, so they are what a stranger can cost:
 - a head (request line and headers): MAX_HEAD_BYTES; what a chunked body has around its content,
   which no client of good will makes larger than the content: MAX_HEAD_BYTES more than that
 - a head within HEAD_LIMIT_S of its first byte, a body at PROGRESS_BYTES each PROGRESS_LIMIT_S
 - connections that wait for their client: Waiting closes the oldest one beyond its number
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import uuid
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from sluice.router.common.errors import error_of_status
from sluice.router.common.events import log_event

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 << 10
SLICE_BYTES = 16 << 10  # between two looks at what a chunked body has around its content
HEAD_LIMIT_S = 10.0
PROGRESS_LIMIT_S = 20.0
PROGRESS_BYTES = 64 << 10
MAX_HALF_SENT = 512
MAX_IDLE = 4096


class Waiting:
    """The connections of one server that wait for their client, the longest waiting first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._connections: dict[Connection, None] = {}

    def add(self, connection: Connection) -> None:
        """From now on it waits; the oldest makes room."""
        self._connections.pop(connection, None)
        self._connections[connection] = None
        if len(self._connections) > self._limit:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.give_up()

    def remove(self, connection: Connection) -> None:
        self._connections.pop(connection, None)


class Connections:
    """What the connections of one server share."""

    def __init__(self) -> None:
        open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.half_sent = Waiting(min(MAX_HALF_SENT, open_files // 8))
        self.idle = Waiting(min(MAX_IDLE, open_files // 4))


class Refusal(Exception):
    """What came is not taken; the client is told so, and the connection ends."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Connection(HttpToolsProtocol):
    """One client. Life: idle, then a head, then a body, then idle again while it is answered."""

    def __init__(self, *args: Any, shared: Connections, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self._shared = shared
        self._num_bytes_around = 0  # of a request: not content, and not made up for by content
        self._content: list[bytes] = []  # of this slice
        self._num_content_bytes = 0  # since the last look at its progress
        self._receiving = False  # a request has begun and is not complete
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: Refusal | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._become_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._received()
        self._shared.idle.remove(self)

    def data_received(self, data: bytes) -> None:
        if self.parser is None or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._shared.idle.remove(self)
        try:
            for begin in range(0, len(data), SLICE_BYTES):
                self._feed(data[begin : begin + SLICE_BYTES])
        except Refusal as refusal:
            self._refuse(refusal)
        except httptools.HttpParserError as error:
            self._refuse(self._refusal or Refusal(400, f"this is no HTTP/1.1 request: {error}"))
        if not self._receiving and (self.cycle is None or self.cycle.response_complete):
            self._become_idle()

    def _feed(self, data: bytes) -> None:
        """Raises Refusal, or the parser's errors."""
        self._num_bytes_around += len(data)
        while data:
            try:
                self.parser.feed_data(data)
                data = b""
            except httptools.HttpParserUpgrade as upgrade:
                self._go_on_without_upgrade()
                data = data[upgrade.args[0] :]
        self._pass_on_content()
        if self._num_bytes_around > MAX_HEAD_BYTES:
            raise _too_large()

    def _pass_on_content(self) -> None:
        """To the application: once for a slice, as each time copies what it has not taken yet."""
        if self._content:
            content = b"".join(self._content)
            self._content.clear()
            super().on_body(content)

    def _go_on_without_upgrade(self) -> None:
        """Read on as if the client had not offered to speak another protocol, as servers may."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            raise Refusal(405, "CONNECT: this is no proxy, expected GET or POST")
        kept = [header for header in self.headers if header[0] not in (b"upgrade", b"connection")]
        stays = b"close" not in dict(self.headers).get(b"connection", b"").lower()
        kept.append((b"connection", b"keep-alive" if stays else b"close"))
        head = b"%s %s HTTP/%s\r\n" % (method, self.url, version)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(head + b"".join(b"%s: %s\r\n" % pair for pair in kept) + b"\r\n")

    # What the parser calls; a Refusal in it would reach us as the parser's own error.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._receiving = True
        self._shared.half_sent.add(self)
        self._wait(HEAD_LIMIT_S, self._head_is_late)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.cycle is None or self.cycle.scope is not self.scope:  # else it is a trailer
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # `_go_on_without_upgrade` brings us back
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            self._refusal = _too_large()
            raise self._refusal
        super().on_headers_complete()
        self._num_content_bytes = 0
        self._wait(PROGRESS_LIMIT_S, self._check_progress)

    def on_body(self, body: bytes) -> None:
        self._num_bytes_around = max(0, self._num_bytes_around - 2 * len(body))
        self._num_content_bytes += len(body)
        self._content.append(body)

    def on_message_complete(self) -> None:
        self._num_bytes_around = 0
        if not self.parser.should_upgrade():
            self._pass_on_content()
            self._received()
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._receiving:  # refused before it was read: there is time to send it and read that
            self._wait(PROGRESS_LIMIT_S, self.transport.close)
        elif self.cycle.response_complete:
            self._become_idle()

    def _become_idle(self) -> None:
        if self.transport.is_closing():
            return
        self._shared.idle.add(self)
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    # Clients that are late

    def _wait(self, seconds: float, then: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(seconds, then)

    def _received(self) -> None:
        """A request is complete, or will never be."""
        self._receiving = False
        self._shared.half_sent.remove(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_is_late(self) -> None:
        self._refuse(Refusal(408, f"no complete head within {HEAD_LIMIT_S:g} s"))

    def _check_progress(self) -> None:
        if self._num_content_bytes < PROGRESS_BYTES and not self.flow.read_paused:  # by us
            self._refuse(
                Refusal(
                    408,
                    f"{self._num_content_bytes} bytes of the body in {PROGRESS_LIMIT_S:g} s, "
                    f"expected {PROGRESS_BYTES} or the end of it",
                )
            )
            return
        self._num_content_bytes = 0
        self._wait(PROGRESS_LIMIT_S, self._check_progress)

    def give_up(self) -> None:
        """Others wait for their client, too, and not for so long."""
        if self._receiving:
            self._refuse(Refusal(408, "too many requests are half sent, and this one for longest"))
        else:
            self.transport.close()

    def _refuse(self, refusal: Refusal) -> None:
        """Say so where nothing has been said yet, and end the connection."""
        self._received()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self._send_refusal(refusal)
        self.transport.close()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _send_refusal(self, refusal: Refusal) -> None:
        request_id = uuid.uuid4().hex
        log_event(
            logger, "refused", request_id=request_id, status=refusal.status, reason=str(refusal)
        )
        content = json.dumps(error_of_status(refusal.status, str(refusal))).encode()
        head = (
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n"
            f"connection: close\r\nx-request-id: {request_id}\r\n\r\n"
        )
        self.transport.write(STATUS_LINE[refusal.status] + head.encode() + content)

    def send_400_response(self, msg: str) -> None:
        self._refuse(Refusal(HTTPStatus.BAD_REQUEST, msg))


def _too_large() -> Refusal:
    return Refusal(431, f"more than {MAX_HEAD_BYTES} bytes around the content, which is too much")
