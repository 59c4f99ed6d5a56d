"""Receiver: learns from notifications which granted rows have landed.

The life of a grant here:

1. `expect` before anyone may write to it, or offer rows for it to be read from here.
2. `poll` fetches what is offered, and reports every chunk that landed. With the last missing one,
   and every pool's rows counted, the arrival carries the first output token: only now may the rows
   be used.
3. `forget` when its pages may be reused; before that `retire`, if a write may still be under way.

Messages may arrive late, twice, in another order or never; a grant whose rows do not all arrive is
given up by its lease. A wrong epoch, an unknown grant, a second sender, an offer that does not lie
in the grant, or bytes that are no message of ours never complete a grant, nor fail it: they are
dropped and counted in `dropped`. Wrong rows or a wrong checksum fail it.

A sender's name is what it says itself. That does no harm: what it sends counts only with the
grant's epoch, which is random and known to nobody but us and those to whom the grant was given; and
its addresses are looked at only then, so that nobody else can have us connect anywhere.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sluice.cache.clock import lease_clock
from sluice.cache.pools import Pool
from sluice.protocol.messages import PageGrant, TransferFailed
from sluice.transfer.checksum import checked_rows, checksum
from sluice.transfer.envelope import Malformed, is_kind
from sluice.transfer.incoming import Incoming, bytes_of
from sluice.transfer.notification import Notification
from sluice.transfer.offer import KIND as OFFER
from sluice.transfer.offer import Offer
from sluice.transfer.plan import rows_to_receive, touched_pages
from sluice.transfer.reads import Read, Reads
from sluice.transfer.transport import Transport

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arrival:
    """A chunk of a grant has landed, which is progress, or the grant has failed for good.

    first_token: set once nothing is missing. num_bytes: what landed, by pool. retired: somebody
    still writes to a grant that was given up, so its pages are not safe to reuse for a lease.
    """

    grant_id: str
    first_token: int | None = None
    error: str | None = None
    num_bytes: Mapping[str, int] = field(default_factory=dict)
    retired: bool = False


class Receiver:
    """The decode side of transfers. Belongs to the node's loop thread.

    `dropped` counts notifications that were ignored, by reason; `failed` the grants that failed.
    """

    def __init__(
        self,
        transport: Transport,
        pools: Mapping[str, Pool],
        *,
        clock: Callable[[], float] = lease_clock,
    ) -> None:
        """Registers the pools at the transport; they stay registered until `close`."""
        transport.register(pools)
        self.dropped: Counter[str] = Counter()
        self.failed = 0
        self._transport = transport
        self._pools = dict(pools)
        self._specs = {name: pool.spec for name, pool in pools.items()}
        self._incoming: dict[str, Incoming] = {}
        self._reads = Reads(transport, clock)

    def expect(self, grant: PageGrant) -> None:
        """Take notifications for the grant from now on."""
        assert grant.grant_id not in self._incoming, f"grant {grant.grant_id} is expected already"
        for spec in self._specs.values():
            needed = touched_pages(spec, rows_to_receive(spec, grant.num_tokens, grant.skip_tokens))
            run = grant.pages[spec.table]
            held = range(run.first, run.first + len(run.pages))
            assert not needed or (needed.start in held and needed[-1] in held), (
                f"pool {spec.name}: grant {grant.grant_id} holds logical pages {held}, "
                f"its rows need {needed}"
            )
        self._incoming[grant.grant_id] = Incoming(grant, self._specs)
        self._watch()

    def retire(self, grant_id: str) -> None:
        """Never complete the grant, but go on reporting writes to it. Unknown ids are ignored."""
        if (incoming := self._incoming.get(grant_id)) is not None:
            incoming.open = False

    def forget(self, grant_id: str) -> None:
        """Ignore the grant from now on. Unknown ids are ignored.

        What is being read for it is cut off: its pages may be somebody else's in a moment.
        """
        incoming = self._incoming.pop(grant_id, None)
        if incoming is not None and incoming.reading:
            self._reads.stop(grant_id)
        self._watch()

    def poll(self) -> list[Arrival]:
        """What has landed since the last call."""
        arrivals = [self._take_read(read) for read in self._reads.poll()]
        for sender, message in self._transport.notifications():
            if is_kind(OFFER, message):
                self._take_offer(sender, message)
            else:
                arrivals.append(self._take(sender, message))
        return [arrival for arrival in arrivals if arrival is not None]

    def close(self) -> None:
        """Expect nothing any more and close the transport."""
        self._incoming.clear()
        self._transport.close()

    def _watch(self) -> None:
        """While rows are to come they move on even if nobody polls: a step may take a second."""
        self._transport.watch(bool(self._incoming))

    def _take_offer(self, sender: str, message: bytes) -> None:
        """Begin to read what is offered for a grant that still waits for it, or decline it.

        What is offered twice is read once, and answered once.
        """
        try:
            offer = Offer.decode(message)
            note = Notification.decode(offer.notification)
        except Malformed as error:
            self._drop(sender, "malformed", str(error))
            return
        incoming = self._incoming.get(note.grant_id)
        reason = incoming.refuses(sender, note) if incoming else "unknown_grant"
        if reason is None and incoming is not None:
            self._read(incoming, sender, offer, note)
            return
        self._drop(sender, str(reason), f"grant_id={note.grant_id}")
        if reason != "duplicate":
            why = f"grant {note.grant_id}: {reason}; reserve again"
            self._reads.decline(sender, offer, why, stranger=True)

    def _read(self, incoming: Incoming, sender: str, offer: Offer, note: Notification) -> None:
        """Begin to read from a sender that knows the grant's epoch, or decline the offer."""
        reason, why = "unknown_grant", f"grant {note.grant_id}: unknown_grant; reserve again"
        if incoming.open:
            reason, why = "misplaced", incoming.misplaced(note, offer.copies)
        if why:
            self._drop(sender, reason, f"grant_id={note.grant_id}")
            self._reads.decline(sender, offer, why)
        elif self._reads.start(sender, offer, note, incoming.grant.lease_s):
            incoming.sender = sender
            incoming.reading.add(note.chunk)
        else:
            self._drop(sender, "other_address", f"grant_id={note.grant_id}")

    def _take_read(self, read: Read) -> Arrival | None:
        """Take the notification of a read that is over; its failure fails the grant."""
        incoming = self._incoming.get(read.note.grant_id)
        if incoming is None or incoming.grant.epoch != read.note.epoch:
            return None
        incoming.reading.discard(read.note.chunk)
        if read.error is not None:
            return self._fail(incoming, read.error)
        return self._count(incoming, read.sender, read.note)

    def _take(self, sender: str, message: bytes) -> Arrival | None:
        """Count a notification, or drop it: then None."""
        try:
            note = Notification.decode(message)
        except Malformed as error:
            self._drop(sender, "malformed", str(error))
            return None
        incoming = self._incoming.get(note.grant_id)
        reason = incoming.refuses(sender, note) if incoming else "unknown_grant"
        if incoming is None or reason is not None:
            self._drop(sender, str(reason), f"grant_id={note.grant_id}")
            return None
        return self._count(incoming, sender, note)

    def _count(self, incoming: Incoming, sender: str, note: Notification) -> Arrival | None:
        if not incoming.open:
            return Arrival(note.grant_id, retired=True)
        try:
            incoming.take(sender, note)
            self._verify(incoming.grant, note)
        except TransferFailed as error:
            return self._fail(incoming, str(error))
        num_bytes = bytes_of(note.rows, self._specs)
        if not incoming.all_chunks_here:
            return Arrival(note.grant_id, num_bytes=num_bytes)
        self.forget(note.grant_id)
        return Arrival(note.grant_id, first_token=incoming.first_token, num_bytes=num_bytes)

    def _fail(self, incoming: Incoming, error: str) -> Arrival | None:
        """The first error of a grant is its last news."""
        if not incoming.open:
            return None
        incoming.open = False
        self.failed += 1
        return Arrival(incoming.grant.grant_id, error=error)

    def _verify(self, grant: PageGrant, note: Notification) -> None:
        """Raise TransferFailed if checksums came along and landed rows are other bytes."""
        for name, expected in note.checksums.items():
            pool = self._pools[name]
            rows = checked_rows(note.rows[name], "sample" if note.sampled else "full")
            found = checksum(pool, grant.pages[pool.spec.table], rows)
            if found != expected:
                raise TransferFailed(
                    f"pool {name}: checksum of {rows} is {found} here, was {expected} "
                    "at the sender; the bytes were damaged on the way"
                )

    def _drop(self, sender: str, reason: str, detail: str) -> None:
        self.dropped[reason] += 1
        log.warning("event=notification_dropped reason=%s peer=%.80r %s", reason, sender, detail)
