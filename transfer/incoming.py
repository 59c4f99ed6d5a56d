"""Incoming: one grant of ours while its rows arrive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from sluice.cache.spec import PoolSpec
from sluice.protocol.messages import PageGrant, TransferFailed
from sluice.transfer.notification import Notification
from sluice.transfer.plan import Copy, check_landing, rows_to_receive


class Incoming:
    """Counts a grant's chunks, and the rows of every pool, until none is missing.

    `open` turns False with the first error, or when decode has given the request up: a grant that
    is not open never completes. `reading`: chunks that are being read for it.
    """

    def __init__(self, grant: PageGrant, specs: Mapping[str, PoolSpec]) -> None:
        self.grant = grant
        self.open = True
        self.sender: str | None = None  # the first to write is the only one to write
        self.first_token: int | None = None
        self.reading: set[int] = set()
        self._specs = specs
        self._expected = {
            name: rows_to_receive(spec, grant.num_tokens, grant.skip_tokens)
            for name, spec in specs.items()
        }
        self._arrived: dict[str, list[range]] = {name: [] for name in self._expected}
        self._num_arrived: Counter[str] = Counter()
        self._chunks: set[int] = set()
        self._highest_chunk = -1
        self._num_chunks: int | None = None  # known with the last one

    def refuses(self, sender: str, note: Notification) -> str | None:
        """Why a notification for this grant's id does not count; None if it does."""
        if note.epoch != self.grant.epoch:
            return "wrong_epoch"
        if self.sender not in (None, sender):
            return "other_sender"
        if note.chunk in self._chunks or note.chunk in self.reading:
            return "duplicate"
        return None

    def misplaced(self, note: Notification, copies: Sequence[Copy]) -> str:
        """Why an offer would not just fill note's rows in this grant's pages; "" if it would."""
        try:
            for name, rows in note.rows.items():
                self._check_rows(name, rows)
            check_landing(copies, self._specs, self.grant.pages, note.rows)
        except TransferFailed as error:
            return str(error)
        return ""

    def take(self, sender: str, note: Notification) -> None:
        """Count a chunk. Raises TransferFailed if it is not what the grant waits for."""
        self.sender = sender
        for name, rows in note.rows.items():
            self._check_rows(name, rows)
            self._arrived[name].append(rows)
            self._num_arrived[name] += len(rows)
            if self._num_arrived[name] > len(self._expected[name]):
                raise TransferFailed(self._uneven(name))
        self._chunks.add(note.chunk)
        self._highest_chunk = max(self._highest_chunk, note.chunk)
        if note.last:
            self._take_last(note)
        if self._num_chunks is not None and self._highest_chunk >= self._num_chunks:
            raise TransferFailed(f"chunk {self._highest_chunk} arrived of {self._num_chunks}")
        if self.all_chunks_here:
            self._check_whole()

    def _take_last(self, note: Notification) -> None:
        if self._num_chunks is not None:
            raise TransferFailed(f"chunks {self._num_chunks - 1} and {note.chunk} are both last")
        self._num_chunks = note.chunk + 1
        self.first_token = note.first_token

    @property
    def all_chunks_here(self) -> bool:
        """Without gaps: chunks are numbered from 0, and none arrives twice or beyond the last."""
        return len(self._chunks) == self._num_chunks

    def _check_rows(self, name: str, rows: range) -> None:
        expected = self._expected.get(name)
        if expected is None:
            raise TransferFailed(f"pool {name}: rows arrived for a pool this node does not have")
        if rows.start < expected.start or rows.stop > expected.stop:
            raise TransferFailed(f"pool {name}: {rows} arrived, expected rows within {expected}")

    def _check_whole(self) -> None:
        """Raise TransferFailed for a pool whose rows are not the expected ones, each once."""
        for name, expected in self._expected.items():
            position = expected.start
            for rows in sorted(self._arrived[name], key=lambda rows: rows.start):
                if rows.start != position:
                    break
                position = rows.stop
            if position != expected.stop or self._num_arrived[name] != len(expected):
                raise TransferFailed(self._uneven(name))

    def _uneven(self, name: str) -> str:
        return (
            f"pool {name}: {self._num_arrived[name]} rows arrived, expected each of "
            f"{self._expected[name]} once"
        )


def bytes_of(rows: Mapping[str, range], specs: Mapping[str, PoolSpec]) -> dict[str, int]:
    """Bytes of rows of all layers, for each pool that has any."""
    return {
        name: len(pool_rows) * specs[name].row_bytes * len(specs[name].layers)
        for name, pool_rows in rows.items()
    }
