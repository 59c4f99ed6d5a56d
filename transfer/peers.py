"""Peers: the nodes at the other end, each in exactly one incarnation."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import cached_property

from sluice.cache.spec import PoolSpec
from sluice.protocol.messages import IncompatiblePeers, NodeInfo, PageGrant, TransferFailed
from sluice.transfer.plan import check_mapping
from sluice.transfer.transport import Transport

log = logging.getLogger(__name__)

RECONNECT_EVERY_S = 0.5  # at most, while it fails: each may take the time of others


@dataclass(eq=False)
class Peer:
    """A node that we were introduced to: known until another replaces it, or it has left.

    packed: names of the pools whose rows must take its layout before they are written. broken: a
    write to it failed, or it could not be reached: it is connected again before the next write.
    """

    info: NodeInfo
    packed: frozenset[str] = frozenset()
    transport_id: str = ""  # none while it is not connected
    broken: bool = True
    retry_at: float = -math.inf

    @cached_property
    def specs(self) -> dict[str, PoolSpec]:
        return {spec.name: spec for spec in self.info.specs}


def check_peers(source: NodeInfo, target: NodeInfo) -> None:
    """Raise IncompatiblePeers, naming the field, unless source's pages mean the same at target."""
    for field, way_out in (
        ("protocol_version", "run the same release on both nodes"),
        ("fingerprint", "start both nodes with the same checkpoint"),
    ):
        ours, theirs = getattr(source, field), getattr(target, field)
        if ours != theirs:
            raise IncompatiblePeers(
                f"{field}: {source.node_id} has {ours}, {target.node_id} has {theirs}; {way_out}"
            )
    try:
        check_mapping(source.specs, target.specs)
    except IncompatiblePeers as error:
        raise IncompatiblePeers(f"{source.node_id} to {target.node_id}: {error}") from error


class Peers:
    """Peers by node id. Used by the transport's thread only.

    Introductions come once; so whatever becomes of a connection, the peer stays known, and every
    use of a broken one tries to connect again.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._peers: dict[str, Peer] = {}

    def find(self, info: NodeInfo) -> Peer | None:
        """What we know under its id, in whatever incarnation."""
        return self._peers.get(info.node_id)

    def reach(self, peer: Peer, now: float) -> None:
        """Connect a newcomer; one that is not to be reached now is broken from the start.

        Raises IncompatiblePeers if its address is not one for us.
        """
        try:
            peer.transport_id = self._transport.connect(peer.info.agent)
            peer.broken = False
        except TransferFailed as error:
            peer.retry_at = now + RECONNECT_EVERY_S
            log.warning("event=peer_unreachable peer=%s error=%s", peer.info.node_id, error)

    def mend(self, peer: Peer, now: float) -> None:
        """Connect a broken peer, on whose old connection nothing is in flight.

        Raises TransferFailed, also shortly after a failure, untried.
        """
        node_id = peer.info.node_id
        if now < peer.retry_at:
            raise TransferFailed(
                f"{node_id} could not be reached a moment ago; connecting is tried again in "
                f"{peer.retry_at - now:.3f} s, or prefill the request for another node"
            )
        self.lose(peer)
        try:
            peer.transport_id = self._transport.connect(peer.info.agent)
            peer.broken = False
        except (TransferFailed, IncompatiblePeers) as error:
            peer.retry_at = now + RECONNECT_EVERY_S
            raise TransferFailed(f"{node_id} cannot be reached: {error}") from error

    def put(self, peer: Peer) -> None:
        """Know the peer in place of what was known under its id; of that nothing is in flight."""
        self.remove(peer.info.node_id)
        self._peers[peer.info.node_id] = peer

    def lose(self, peer: Peer) -> None:
        """Drop the connection, of which nothing is in flight any more, but not the peer."""
        if peer.transport_id:
            self._transport.disconnect(peer.transport_id)
        peer.transport_id, peer.broken = "", True

    def remove(self, node_id: str) -> None:
        """The node has left, or was replaced. Unknown ids are ignored."""
        peer = self._peers.pop(node_id, None)
        if peer is not None:
            self.lose(peer)

    def of_grant(self, grant: PageGrant) -> Peer:
        """The peer that made the grant. Raises TransferFailed if we do not know it."""
        peer = self._peers.get(grant.node_id)
        if peer is None:
            raise TransferFailed(
                f"grant {grant.grant_id}: decode node {grant.node_id} is not connected; "
                "connect it, or prefill the request for another node"
            )
        if peer.info.incarnation != grant.incarnation:
            raise TransferFailed(
                f"grant {grant.grant_id}: made by incarnation {grant.incarnation} of "
                f"{grant.node_id}, connected is {peer.info.incarnation}; reserve again"
            )
        return peer
