"""The body of a request: JSON, and not more of it than we are ready to hold."""

from __future__ import annotations

from starlette.requests import Request

from sluice.router.errors import BodyTooLarge, WrongContentType

MAX_BODY_BYTES = 16 << 20


async def read_body(request: Request) -> bytes:
    """Raises WrongContentType or BodyTooLarge; the latter before the rest is read."""
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
    declared = request.headers.get("content-length", "")
    _check_size(int(declared) if declared.isdecimal() else 0)
    chunks, num_bytes = [], 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        _check_size(num_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_BODY_BYTES:
        raise BodyTooLarge(f"body: {num_bytes} bytes or more, expected at most {MAX_BODY_BYTES}")
