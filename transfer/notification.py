"""Notification: what travels with the last byte of a chunk, and tells decode what has landed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sluice.transfer.envelope import Malformed, name, number, seal, typed, unseal

KIND = "note 2"
FIELDS = ("grant", "epoch", "chunk", "last", "rows", "token", "sampled", "sums")
MAX_BYTES = 64 << 10
MAX_EPOCH = 1 << 63
MAX_CHUNKS = 1 << 31
MAX_ROWS = 1 << 40
MAX_TOKEN = 1 << 31
DIGEST_DIGITS = 16


@dataclass(frozen=True)
class Notification:
    """One chunk of one grant has landed.

    chunk: counts from 0 without gaps; `last` marks the final one, which alone carries the first
    output token, and alone may be without rows. rows: for each pool the absolute rows that were
    written; pools without are left out. checksums: for each pool in `rows` the digest of them, or
    empty; of a sample of them if `sampled`.
    """

    grant_id: str
    epoch: int
    chunk: int
    last: bool
    rows: Mapping[str, range]
    first_token: int | None = None
    sampled: bool = False
    checksums: Mapping[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        fields = {
            "grant": self.grant_id,
            "epoch": self.epoch,
            "chunk": self.chunk,
            "last": self.last,
            "rows": {pool: [rows.start, rows.stop] for pool, rows in self.rows.items()},
            "token": self.first_token,
            "sampled": self.sampled,
            "sums": dict(self.checksums),
        }
        return seal(KIND, fields)

    @classmethod
    def decode(cls, message: bytes) -> Notification:
        """Raises Malformed for anything that `encode` cannot have written."""
        fields = typed(unseal(KIND, message, MAX_BYTES), dict)
        if tuple(fields) != FIELDS:
            raise Malformed(f"{message[:80]!r} has other fields than {', '.join(FIELDS)}")
        token = fields["token"]
        note = cls(
            grant_id=name(fields["grant"]),
            epoch=number(fields["epoch"], MAX_EPOCH),
            chunk=number(fields["chunk"], MAX_CHUNKS),
            last=typed(fields["last"], bool),
            rows={name(p): _rows(ends) for p, ends in typed(fields["rows"], dict).items()},
            first_token=None if token is None else number(token, MAX_TOKEN),
            sampled=typed(fields["sampled"], bool),
            checksums={p: _digest(d) for p, d in typed(fields["sums"], dict).items()},
        )
        note._check()
        return note

    def _check(self) -> None:
        """Raise Malformed where fields contradict each other."""
        if self.last != (self.first_token is not None):
            raise Malformed("the first token comes with the last chunk, and with no other")
        if not self.rows and not self.last:
            raise Malformed(f"chunk {self.chunk} is not the last and brings no rows")
        if not self.checksums.keys() <= self.rows.keys():
            raise Malformed(f"checksums of pools without rows: {', '.join(self.checksums)}")


def _rows(ends: Any) -> range:
    if len(typed(ends, list)) != 2:
        raise Malformed(f"{ends[:8]} are no first and last row")
    start, stop = (number(end, MAX_ROWS) for end in ends)
    if start >= stop:
        raise Malformed(f"{ends} are no rows")
    return range(start, stop)


def _digest(value: Any) -> str:
    if len(typed(value, str)) != DIGEST_DIGITS or set(value) - set("0123456789abcdef"):
        raise Malformed(f"{value[:80]!r} is no checksum of {DIGEST_DIGITS} digits")
    return str(value)
