"""Introductions: every prefill node must know every decode node before requests use the pair.

Nobody is introduced once and for all: each prefill node is told the whole list whenever it has
changed, again as long as one on it fails, and at a slow beat, which gives it back a peer that it
has lost. A frozen node delays nobody, as each is told by a task of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable

from sluice.deploy.common.waiting import News, until, within
from sluice.deploy.controller.node_record import NodeRecord
from sluice.protocol.messages import IncompatiblePeers, NodeError, Role, SluiceError

log = logging.getLogger(__name__)

ANSWER_LIMIT_S = 10.0  # of one telling; then it is told again
RETRY_S = 1.0
BEAT_S = 10.0
MEETING_LIMIT_S = 30.0  # how long a newcomer waits for one who does not answer


class Introductions:
    """Tells prefill nodes of decode nodes; says when a newcomer has met whom it must.

    nodes: all that the controller has. members: spread when one of them has started or died.
    """

    def __init__(self, nodes: Callable[[], Iterable[NodeRecord]], members: News) -> None:
        self._nodes = nodes
        self._members = members
        self._told = News()
        self._versions = itertools.count(1)

    async def keep(self, prefill: NodeRecord) -> None:
        """Tell a prefill node of the decode nodes as long as it lives; never return."""
        while prefill.info is None:
            await self._members.next.wait()
        while True:
            news = self._members.next
            all_met = await self._tell(prefill)
            self._told.spread()
            await until(news, BEAT_S if all_met else RETRY_S)

    async def welcome(self, newcomer: NodeRecord) -> None:
        """Make a started node ready, once it has met every node of the other role that serves.

        Raises IncompatiblePeers if a pair has no mapping, NodeError if it cannot be connected: the
        newcomer is at fault, pairs that work go on. A known node that does not answer is declared
        lost, and the newcomer goes on.
        """
        deadline = asyncio.get_running_loop().time() + MEETING_LIMIT_S
        while strangers := self._strangers(newcomer):
            if asyncio.get_running_loop().time() > deadline:
                _give_up(newcomer, strangers)
                break
            await until(self._told.next, RETRY_S)
        newcomer.welcome()

    async def _tell(self, prefill: NodeRecord) -> bool:
        """Tell the node once and note whom it has met; whether that is everybody."""
        started = [n for n in self._nodes() if n.role is Role.DECODE and n.death is None]
        peers = [node.info for node in started if node.info is not None]
        telling = prefill.handle.meet(next(self._versions), peers)
        try:
            failed = await within(ANSWER_LIMIT_S, prefill.node_id, telling)
        except SluiceError as error:  # its own watch sees whether it is gone
            log.log(
                logging.WARNING if prefill.answers else logging.DEBUG,
                "event=introduction_failed node=%s reason=%s",
                prefill.node_id,
                error,
            )
            prefill.answers = False
            return False
        prefill.answers = True
        for node_id in failed.keys() - prefill.unmet.keys():
            reason = failed[node_id]
            log.warning("event=not_met node=%s peer=%s reason=%s", prefill.node_id, node_id, reason)
        prefill.unmet = failed
        prefill.met = frozenset(peer.node_id for peer in peers) - failed.keys()
        return not failed

    def _strangers(self, newcomer: NodeRecord) -> list[tuple[NodeRecord, NodeRecord]]:
        """Pairs of a prefill and a decode node that have still to meet for the newcomer's sake.

        Raises IncompatiblePeers if that cannot be.
        """
        others = [n for n in self._nodes() if n.role is not newcomer.role and n.takes_requests]
        prefill_first = newcomer.role is Role.PREFILL
        pairs = [(newcomer, other) if prefill_first else (other, newcomer) for other in others]
        strangers = [(p, d) for p, d in pairs if d.node_id not in p.met]
        for prefill, decode in strangers:
            error = prefill.unmet.get(decode.node_id)
            if isinstance(error, IncompatiblePeers):
                raise error
        return strangers


def _give_up(newcomer: NodeRecord, strangers: list[tuple[NodeRecord, NodeRecord]]) -> None:
    """Find who is at fault. Raises NodeError if it is the newcomer."""
    for prefill, decode in strangers:
        error = prefill.unmet.get(decode.node_id)
        reason = f"{prefill.node_id} has not met {decode.node_id} within {MEETING_LIMIT_S:g} s"
        if error is not None or prefill is newcomer:
            raise NodeError(f"{reason}: {error or 'it does not answer'}")
        prefill.declare_lost(reason)
