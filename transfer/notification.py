"""Notification: what travels with the last byte of a chunk, and tells decode what has landed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VERSION = 1


class Malformed(Exception):
    """These bytes are no notification of ours."""


@dataclass(frozen=True)
class Notification:
    """One chunk of one grant has landed.

    chunk: counts from 0 without gaps; `last` marks the final one, which alone carries the first
    output token. rows: for each pool the absolute rows that were written; pools without are left
    out. checksums: for each pool in `rows` the digest of them, or empty; of a sample of them if
    `sampled`.
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
            "v": VERSION,
            "grant": self.grant_id,
            "epoch": self.epoch,
            "chunk": self.chunk,
            "last": self.last,
            "rows": {pool: [rows.start, rows.stop] for pool, rows in self.rows.items()},
            "token": self.first_token,
            "sampled": self.sampled,
            "sums": dict(self.checksums),
        }
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, message: bytes) -> Notification:
        """Raises Malformed for anything that `encode` cannot have written."""
        try:
            fields = json.loads(message)
            if fields["v"] != VERSION:
                raise Malformed(f"version is {fields['v']!r}, expected {VERSION}")
            token = fields["token"]
            return cls(
                grant_id=typed(fields["grant"], str),
                epoch=typed(fields["epoch"], int),
                chunk=typed(fields["chunk"], int),
                last=typed(fields["last"], bool),
                rows={typed(pool, str): _rows(ends) for pool, ends in fields["rows"].items()},
                first_token=None if token is None else typed(token, int),
                sampled=typed(fields["sampled"], bool),
                checksums={pool: typed(hexed, str) for pool, hexed in fields["sums"].items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Malformed(f"{message[:80]!r}: {error}") from error


def typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _rows(ends: Any) -> range:
    start, stop = ends
    if not 0 <= typed(start, int) < typed(stop, int):
        raise ValueError(f"{ends} are no rows")
    return range(start, stop)
