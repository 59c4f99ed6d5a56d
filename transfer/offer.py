"""Offer: rows that lie ready to be read, and the reader's Answer."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from sluice.transfer.envelope import Malformed, name, number, seal, typed, unseal
from sluice.transfer.plan import ByteRuns, Copy

KIND = "offer 2"
ANSWER_KIND = "answer 2"
MAX_BYTES = 32 << 20  # of a million runs
MAX_ANSWER_BYTES = 8 << 10
MAX_ERROR_CHARS = 1000
MAX_NUMBER = 1 << 63
MAX_OFFSET = 1 << 48  # so that no sum of two overflows


@dataclass(frozen=True)
class Offer:
    """What one part of a chunk would be written with: decode copies and counts it by itself.

    number: names it at its sender; drawn at random, so that only who has read the offer can answer
    it. address: reaches the memory it lies in. notification: to be taken once all is copied. The
    reader trusts no run: see Incoming.
    """

    number: int
    address: bytes
    copies: Sequence[Copy]
    notification: bytes

    def encode(self) -> bytes:
        copies = [
            (copy.source, copy.target, _text(np.stack(astuple(copy.runs)).tobytes()))
            for copy in self.copies
        ]
        return seal(KIND, (self.number, _text(self.address), copies, _text(self.notification)))

    @classmethod
    def decode(cls, message: bytes) -> Offer:
        """Raises Malformed for anything that `encode` cannot have written."""
        own_number, address, copies, notification = _list(unseal(KIND, message, MAX_BYTES), 4)
        return cls(
            number=number(own_number, MAX_NUMBER),
            address=_data(address),
            copies=tuple(_copy(*_list(fields, 3)) for fields in typed(copies, list)),
            notification=_data(notification),
        )


@dataclass(frozen=True)
class Answer:
    """The rows of an offer have been copied; or why they will not be, and are not looked at."""

    number: int
    error: str | None = None

    def encode(self) -> bytes:
        error = None if self.error is None else " ".join(self.error.split())[:MAX_ERROR_CHARS]
        return seal(ANSWER_KIND, (self.number, error))

    @classmethod
    def decode(cls, message: bytes) -> Answer:
        """Raises Malformed for anything that `encode` cannot have written."""
        own_number, error = _list(unseal(ANSWER_KIND, message, MAX_ANSWER_BYTES), 2)
        if error is not None and not typed(error, str).isprintable():
            raise Malformed(f"{error[:80]!r} cannot be printed")
        return cls(number(own_number, MAX_NUMBER), error)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _data(text: Any) -> bytes:
    try:
        return base64.b64decode(typed(text, str), validate=True)
    except (ValueError, binascii.Error) as error:
        raise Malformed(f"{text[:80]!r}: {error}") from error


def _list(values: Any, length: int) -> list[Any]:
    if len(typed(values, list)) != length:
        raise Malformed(f"{len(values)} fields, expected {length}")
    return list(values)


def _copy(source: Any, target: Any, runs: Any) -> Copy:
    data = _data(runs)
    if len(data) % (3 * 8):
        raise Malformed(f"{len(data)} bytes are no runs of three numbers each")
    numbers = np.frombuffer(data, dtype=np.int64).reshape(3, -1)
    if numbers.size and not (
        0 <= numbers.min() <= numbers.max() < MAX_OFFSET and numbers[2].min() > 0
    ):
        raise Malformed(f"runs outside [0, {MAX_OFFSET}) or of no bytes")
    return Copy(name(source), name(target), ByteRuns(*numbers))
