"""Offer: rows that lie ready to be read, and the reader's Answer."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from sluice.transfer.notification import Malformed, typed
from sluice.transfer.plan import ByteRuns, Copy

PREFIX = b"offer 1 "  # tells it, and its version, from a notification


@dataclass(frozen=True)
class Offer:
    """What one part of a chunk would be written with: decode copies and counts it by itself.

    number: names it at its sender. address: reaches the memory it lies in. notification: to be
    taken once all is copied.
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
        fields = (self.number, _text(self.address), copies, _text(self.notification))
        return PREFIX + json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, message: bytes) -> Offer:
        """Raises Malformed for anything that `encode` cannot have written."""
        try:
            number, address, copies, notification = json.loads(message.removeprefix(PREFIX))
            return cls(
                number=typed(number, int),
                address=base64.b64decode(address),
                copies=tuple(_copy(*fields) for fields in copies),
                notification=base64.b64decode(notification),
            )
        except (ValueError, TypeError, binascii.Error, RecursionError) as error:
            raise Malformed(f"{message[:80]!r}: {error}") from error


@dataclass(frozen=True)
class Answer:
    """The rows of an offer have been copied; or why they will not be, and are not looked at."""

    number: int
    error: str | None = None

    def encode(self) -> bytes:
        return json.dumps((self.number, self.error)).encode()

    @classmethod
    def decode(cls, message: bytes) -> Answer:
        """Raises Malformed for anything that `encode` cannot have written."""
        try:
            number, error = json.loads(message)
            return cls(typed(number, int), None if error is None else typed(error, str))
        except (ValueError, TypeError, RecursionError) as error:
            raise Malformed(f"{message[:80]!r}: {error}") from error


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _copy(source: Any, target: Any, runs: Any) -> Copy:
    numbers = np.frombuffer(base64.b64decode(runs), dtype=np.int64).reshape(3, -1)
    return Copy(typed(source, str), typed(target, str), ByteRuns(*numbers))
