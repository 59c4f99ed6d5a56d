"""Envelope: a message's kind and version, and a digest of all of it, around its fields.

    note 2 8a1f..(32 digits) {"grant":...

What arrives is read only if it is, byte for byte, what `seal` would have written: damage, numbers
in other spellings, repeated keys and old versions end here. The digest has no key: it tells damage,
not forgery, which is what secret numbers inside are for (a grant's epoch, an offer's number).
"""

from __future__ import annotations

import json
from typing import Any

import xxhash

MAX_NAME_CHARS = 512


class Malformed(Exception):
    """These bytes are no message of ours."""


def seal(kind: str, fields: Any) -> bytes:
    """The fields (what JSON can hold) as a message; a kind is a word and a version."""
    return _sealed(kind, _body(fields))


def unseal(kind: str, message: bytes, max_bytes: int) -> Any:
    """The fields of a message. Raises Malformed for anything that `seal` cannot have written."""
    if len(message) > max_bytes:
        raise Malformed(f"{len(message)} bytes, expected at most {max_bytes}")
    body = message[len(_sealed(kind, b"")) :]
    if message != _sealed(kind, body):
        raise Malformed(f"{message[:80]!r} is no {kind!r}, or was damaged on its way")
    try:
        fields = json.loads(body)
        canonical = _body(fields)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"{message[:80]!r}: {error}") from error
    if body != canonical:
        raise Malformed(f"{message[:80]!r} is not written as we write")
    return fields


def is_kind(kind: str, message: bytes) -> bool:
    return message.startswith(kind.encode() + b" ")


def typed(value: Any, kind: type) -> Any:
    """The value, if it is of just this type. Raises Malformed."""
    if type(value) is not kind:
        raise Malformed(f"{repr(value)[:80]} is no {kind.__name__}")
    return value


def number(value: Any, limit: int) -> int:
    """A whole number from 0 to below the limit. Raises Malformed."""
    if not 0 <= typed(value, int) < limit:
        raise Malformed(f"{repr(value)[:80]} is not within [0, {limit})")
    return int(value)


def name(value: Any) -> str:
    """A name that may stand in a log line. Raises Malformed."""
    if not 0 < len(typed(value, str)) <= MAX_NAME_CHARS or not value.isprintable():
        raise Malformed(
            f"{value[:80]!r} is no name of 1 to {MAX_NAME_CHARS} characters that can be printed"
        )
    return str(value)


def _body(fields: Any) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def _sealed(kind: str, body: bytes) -> bytes:
    digest = xxhash.xxh3_128_hexdigest(kind.encode() + body)
    return f"{kind} {digest} ".encode() + body
