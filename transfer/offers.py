"""Offers: the prefill side of READ mode. Rows are offered, decode reads and answers."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from sluice.protocol.messages import TransferFailed
from sluice.transfer.envelope import Malformed
from sluice.transfer.offer import MAX_NUMBER, Answer, Offer
from sluice.transfer.plan import Copy
from sluice.transfer.transport import Handle, Transport

log = logging.getLogger(__name__)


class Declined(TransferFailed):
    """The peer will not read, or could not: the connection is sound and our memory is free."""


@dataclass
class _Offered:
    peer: str
    sending: Handle | None
    answer: Answer | None = None


class Offers:
    """Posts by letting the peer read; see Posts in transport.py.

    Source memory must stay as it is until the answer. Without one, because the connection broke or
    was given up, the peer may still be reading: see UNHEARD_LEASES.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.dropped = 0  # messages that are no answers of peers to offers of ours
        self._offered: dict[Handle, _Offered] = {}

    def post(self, peer: str, writes: Sequence[Copy], notification: bytes) -> Handle:
        # Who answers an offer frees its pages: its number is told to nobody but the reader.
        number = secrets.randbelow(MAX_NUMBER)
        offer = Offer(number, self._transport.address(), writes, notification)
        sending = self._transport.post(peer, [], offer.encode())
        self._offered[number] = _Offered(peer, sending)
        self._watch()
        return number

    def poll(self, handle: Handle) -> bool:
        """Raises Declined if that is the answer, TransferFailed if the offer may have been lost."""
        self._take_answers()
        offered = self._offered[handle]
        if offered.sending is not None:
            self._send_on(handle, offered.sending)
        if offered.answer is None or offered.sending is not None:
            return False
        self._forget(handle)
        if offered.answer.error is not None:
            raise Declined(f"peer {offered.peer}: {offered.answer.error}")
        return True

    def abandon(self, handle: Handle) -> None:
        offered = self._forget(handle)
        if offered.sending is not None:
            self._transport.abandon(offered.sending)

    def _forget(self, handle: Handle) -> _Offered:
        offered = self._offered.pop(handle)
        self._watch()
        return offered

    def _watch(self) -> None:
        """While peers read, our end of the connections has to move."""
        self._transport.watch(bool(self._offered))

    def _send_on(self, handle: Handle, sending: Handle) -> None:
        try:
            if self._transport.poll(sending):
                self._offered[handle].sending = None
        except TransferFailed:
            self._forget(handle)
            raise

    def _take_answers(self) -> None:
        """Note what has been answered; an answer that comes after the end changes nothing."""
        for sender, message in self._transport.notifications():
            try:
                answer = Answer.decode(message)
            except Malformed as error:
                self.dropped += 1
                log.warning("event=answer_dropped peer=%.80r error=%s", sender, error)
                continue
            offered = self._offered.get(answer.number)
            if offered is None or offered.peer != sender:
                self.dropped += 1
            else:
                offered.answer = answer
