"""Incoming: one grant of ours while its rows arrive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sluice.cache.spec import PoolSpec
from sluice.engine.protocol import PageGrant
from sluice.transfer.notification import Notification
from sluice.transfer.plan import rows_to_receive


class Incoming:
    """Counts a grant's chunks, and the rows of every pool, until none is missing.

    `open` turns False with the first error, or when decode has given the request up: a grant that
    is not open never completes.
    """

    def __init__(self, grant: PageGrant, specs: Iterable[PoolSpec]) -> None:
        self.grant = grant
        self.open = True
        self.sender: str | None = None  # the first to write is the only one to write
        self.first_token: int | None = None
        self._expected = {
            spec.name: rows_to_receive(spec, grant.num_tokens, grant.skip_tokens) for spec in specs
        }
        self._arrived: dict[str, list[range]] = {name: [] for name in self._expected}
        self._chunks: set[int] = set()
        self._num_chunks: int | None = None  # known with the last one

    def refuses(self, sender: str, note: Notification) -> str | None:
        """Why a notification for this grant's id does not count; None if it does."""
        if note.epoch != self.grant.epoch:
            return "wrong_epoch"
        if self.sender not in (None, sender):
            return "other_sender"
        if note.chunk in self._chunks:
            return "duplicate"
        return None

    def take(self, sender: str, note: Notification) -> str | None:
        """Count a chunk. Returns what is wrong with its rows, if anything."""
        self.sender = sender
        self._chunks.add(note.chunk)
        for name, rows in note.rows.items():
            expected = self._expected.get(name)
            if expected is None:
                return f"pool {name}: rows arrived for a pool this node does not have"
            if rows.start < expected.start or rows.stop > expected.stop:
                return f"pool {name}: rows {rows} arrived, expected rows within {expected}"
            self._arrived[name].append(rows)
        if note.last:
            self._num_chunks = note.chunk + 1
            self.first_token = note.first_token
        return self._missing() if self.all_chunks_here else None

    @property
    def all_chunks_here(self) -> bool:
        return self._chunks == set(range(self._num_chunks or 0)) and bool(self._chunks)

    def _missing(self) -> str | None:
        """Which pool's rows are not exactly the expected ones, although every chunk is here."""
        if self.first_token is None:
            return "the last chunk brought no first token"
        for name, expected in self._expected.items():
            position = expected.start
            for rows in sorted(self._arrived[name], key=lambda rows: rows.start):
                if rows.start != position:
                    break
                position = rows.stop
            if position != expected.stop or _count(self._arrived[name]) != len(expected):
                return (
                    f"pool {name}: {_count(self._arrived[name])} rows arrived, expected each of "
                    f"{expected} once"
                )
        return None


def _count(ranges: Iterable[range]) -> int:
    return sum(len(rows) for rows in ranges)


def bytes_of(rows: Mapping[str, range], specs: Mapping[str, PoolSpec]) -> dict[str, int]:
    """Bytes of rows of all layers, for each pool that has any."""
    return {
        name: len(pool_rows) * specs[name].row_bytes * len(specs[name].layers)
        for name, pool_rows in rows.items()
    }
