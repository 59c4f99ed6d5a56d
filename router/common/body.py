"""The body of a request: JSON, and not more of it than we are ready to hold."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from starlette.requests import Request

from sluice.router.common.errors import BodyTooLarge, TooManyLargeBodies, WrongContentType

MAX_BODY_BYTES = 16 << 20
MAX_SMALL_BODY_BYTES = 64 << 10
MAX_LARGE_BODIES_BYTES = 64 << 20


class Bodies:
    """What is held of all bodies that are being read. Small ones always find room."""

    def __init__(self) -> None:
        self._num_bytes = 0  # of large ones

    @contextlib.asynccontextmanager
    async def read(self, request: Request, max_bytes: int = MAX_BODY_BYTES) -> AsyncIterator[bytes]:
        """The body, for which there is room in the block.

        Raises WrongContentType, BodyTooLarge or TooManyLargeBodies, before the rest is read.
        """
        _check_type(request)
        _check_size(_declared_bytes(request), max_bytes)
        chunks, num_bytes, num_held = [], 0, 0
        try:
            async for chunk in request.stream():
                num_bytes += len(chunk)
                _check_size(num_bytes, max_bytes)
                if num_bytes > MAX_SMALL_BODY_BYTES:
                    self._hold(num_bytes - num_held)
                    num_held = num_bytes
                chunks.append(chunk)
            body = b"".join(chunks)
            chunks.clear()
            yield body
        finally:
            self._num_bytes -= num_held

    def _hold(self, num_bytes: int) -> None:
        if self._num_bytes + num_bytes > MAX_LARGE_BODIES_BYTES:
            raise TooManyLargeBodies(
                f"body: it is large, and {self._num_bytes >> 20} MB of others are being read, of "
                f"at most {MAX_LARGE_BODIES_BYTES >> 20} MB; try again in a moment"
            )
        self._num_bytes += num_bytes


def _check_type(request: Request) -> None:
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise WrongContentType(
            f"content-type is {content_type[:60]!r}, expected 'application/json'; "
            "with curl add -H 'content-type: application/json'"
        )
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise WrongContentType(
            f"content-encoding is {coding[:60]!r}, expected 'identity': send the JSON as it is"
        )


def _declared_bytes(request: Request) -> int:
    declared = request.headers.get("content-length", "")
    return int(declared) if declared.isdecimal() else 0


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise BodyTooLarge(f"body: {num_bytes} bytes or more, expected at most {max_bytes}")
