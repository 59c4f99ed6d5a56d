"""Reads: the decode side of READ mode. Copies what prefill nodes offer, and answers them.

offer ──► in flight ──► over, and the sender told with the last byte
             │ failure, or a lease over
             ▼
            cut: all that is read from that sender begins once more on a new connection if that was
            the failure; else, and the second time, it fails, and the sender is told

A read counts only if it ends within a lease of its offer's arrival: for so long, and longer, the
sender keeps its pages as they are (see Outgoing).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from sluice.cache.clock import lease_clock
from sluice.protocol.messages import IncompatiblePeers, TransferFailed
from sluice.transfer.notification import Notification
from sluice.transfer.offer import Answer, Offer
from sluice.transfer.transport import Handle, NothingLeft, Transport

log = logging.getLogger(__name__)

# A sender without an offer for so long is disconnected when a new one comes: it may have been
# restarted under another name. If not, its next offer connects it again.
FORGET_AFTER_S = 300.0


# How long an answer to an offer for a grant that we do not know may take.
ANSWER_LIMIT_S = 30.0


@dataclass(frozen=True)
class Read:
    """A read that is over: its notification is to be taken, unless there is an error."""

    sender: str
    offer: Offer
    note: Notification
    error: str | None = None


@dataclass(frozen=True)
class _Posted:
    """In flight to a sender: a read, or an answer alone."""

    handle: Handle
    sender: str
    read: Read | None
    deadline: float  # seconds of the reads' clock
    again: bool = False  # begun a second time


class Reads:
    """What is being read, and from whom. Belongs to the receiver's thread.

    Senders are connected by the addresses in their offers.
    """

    def __init__(self, transport: Transport, clock: Callable[[], float] = lease_clock) -> None:
        self._transport = transport
        self._clock = clock
        self._posted: list[_Posted] = []
        self._over: list[Read] = []
        self._addresses: dict[str, bytes] = {}
        self._heard_at: dict[str, float] = {}

    def start(self, sender: str, offer: Offer, note: Notification, lease_s: float) -> bool:
        """Begin to copy; `poll` reports the end, also if this fails at once.

        Returns whether it has begun: not if the offer brings an address that is not the sender's.
        """
        deadline = self._clock() + lease_s
        try:
            self._begin(Read(sender, offer, note), deadline)
        except IncompatiblePeers as error:
            log.warning("event=offer_refused peer=%.80r error=%s", sender, error)
            return False
        return True

    def _begin(self, read: Read, deadline: float, *, again: bool = False) -> None:
        """Post a read; if that fails it has ended. Raises IncompatiblePeers."""
        sender, offer = read.sender, read.offer
        try:
            self._connect(sender, offer.address)
            handle = self._transport.read(sender, offer.copies, Answer(offer.number).encode())
        except TransferFailed as error:
            self._cut(sender, str(error), retry=True)
            if isinstance(error, NothingLeft) and not again:
                self._begin(read, deadline, again=True)
            else:
                self._fail(read, str(error))
        else:
            self._posted.append(_Posted(handle, sender, read, deadline, again))

    def decline(self, sender: str, offer: Offer, error: str, *, stranger: bool = False) -> None:
        """Tell the sender that its offer is not read; if it cannot be told, it has its lease.

        stranger: nothing shows that it is one of ours, so only a connection that stands is used.
        """
        if stranger and self._addresses.get(sender) != offer.address:
            return
        deadline = self._clock() + ANSWER_LIMIT_S
        try:
            self._connect(sender, offer.address)
            handle = self._transport.post(sender, [], Answer(offer.number, error).encode())
        except (TransferFailed, IncompatiblePeers) as failure:
            log.warning("event=answer_lost peer=%.80r error=%s", sender, failure)
        else:
            self._posted.append(_Posted(handle, sender, None, deadline))

    def stop(self, grant_id: str) -> None:
        """Cut off what is being read for a grant, so that none of it lands from now on.

        Mostly it has landed, and its sender was told so, before we came to look: then the other
        reads from that sender go on.
        """
        for posted in [p for p in self._posted if p.read and p.read.note.grant_id == grant_id]:
            if posted in self._posted:  # still: a failure cuts off others
                self._settle(posted)
        reads = [posted.read for posted in self._posted if posted.read is not None]
        for sender in {read.sender for read in reads if read.note.grant_id == grant_id}:
            self._cut(sender, f"grant {grant_id} was given up during a read")

    def poll(self) -> list[Read]:
        """Reads that are over since the last call.

        Those that have outlasted their lease are cut off first: we may have been frozen, and
        polling a transport moves on what it has queued.
        """
        now = self._clock()
        for sender in {posted.sender for posted in self._posted if now >= posted.deadline}:
            self._cut(sender, "a read has not ended within the lease; is its node frozen?")
        for posted in list(self._posted):
            if posted in self._posted:  # still: a failure cuts off others
                self._settle(posted)
        over, self._over = self._over, []
        return over

    def _settle(self, posted: _Posted) -> None:
        """Note the end of what is in flight; a failure is that of the connection."""
        try:
            if not self._transport.poll(posted.handle):
                return
            self._posted.remove(posted)
            if posted.read is not None:
                self._over.append(posted.read)
        except TransferFailed as error:
            self._cut(posted.sender, str(error), failed=posted)

    def _cut(
        self, sender: str, error: str, *, failed: _Posted | None = None, retry: bool = False
    ) -> None:
        """Give up the connection and every read on it, or begin those once more on a new one.

        Unlike what a peer writes, nothing of them can land later: it would come to our own end of
        the connection, which is closed.
        """
        lost = [posted for posted in self._posted if posted.sender == sender]
        self._posted = [posted for posted in self._posted if posted.sender != sender]
        for posted in lost:
            if posted is not failed:
                self._transport.abandon(posted.handle)
        self._disconnect(sender)
        for posted in lost:
            if posted.read is not None:
                self._go_on(posted, error, retry=retry or failed is not None)

    def _go_on(self, posted: _Posted, error: str, *, retry: bool) -> None:
        """Begin a read once more, on a new connection, or fail it."""
        assert posted.read is not None, "an answer alone is not repeated"
        try:
            if retry and not posted.again:
                self._begin(posted.read, posted.deadline, again=True)
                return
        except IncompatiblePeers as failure:
            error = str(failure)
        self._fail(posted.read, error)

    def _fail(self, read: Read, error: str) -> None:
        self._over.append(replace(read, error=error))
        self.decline(read.sender, read.offer, error)

    def _connect(self, sender: str, address: bytes) -> None:
        """Load the sender, if need be. Raises IncompatiblePeers if the address is not its own."""
        now = self._clock()
        if self._addresses.get(sender) != address:
            for silent in [s for s, at in self._heard_at.items() if now > at + FORGET_AFTER_S]:
                self._forget(silent)
            self._transport.connect(address, expected=sender)
            self._addresses[sender] = address
        self._heard_at[sender] = now

    def _forget(self, sender: str) -> None:
        if not any(posted.sender == sender for posted in self._posted):
            self._disconnect(sender)

    def _disconnect(self, sender: str) -> None:
        self._transport.disconnect(sender)
        self._addresses.pop(sender, None)
        self._heard_at.pop(sender, None)
