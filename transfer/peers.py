"""Peers: the nodes at the other end, each in exactly one incarnation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from sluice.cache.spec import PoolSpec
from sluice.engine.protocol import IncompatiblePeers, NodeInfo, PageGrant, TransferFailed
from sluice.transfer.plan import check_mapping
from sluice.transfer.transport import Transport


@dataclass
class Peer:
    """A connected node. `broken` once a write to it failed: it is reloaded before the next.

    packed: names of the pools whose rows must take its layout before they are written.
    """

    info: NodeInfo
    transport_id: str
    packed: frozenset[str] = frozenset()
    broken: bool = False

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
    """Connected peers by node id. Used by the transport's thread only."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._peers: dict[str, Peer] = {}

    def replaces(self, own: NodeInfo, info: NodeInfo) -> bool:
        """Whether `info` is news: an unknown node, another incarnation, or one that broke.

        Raises IncompatiblePeers, naming the field, if its pages mean something else than ours.
        """
        check_peers(own, info)
        known = self._peers.get(info.node_id)
        return known is None or known.broken or known.info.incarnation != info.incarnation

    def connect(self, info: NodeInfo, *, packed: frozenset[str] = frozenset()) -> None:
        """Load the peer in place of what was known under its id. Raises IncompatiblePeers.

        Nothing may be in flight to the old one.
        """
        self.disconnect(info.node_id)
        self._peers[info.node_id] = Peer(info, self._transport.connect(info.agent), packed)

    def disconnect(self, node_id: str) -> None:
        peer = self._peers.pop(node_id, None)
        if peer is not None:
            self._transport.disconnect(peer.transport_id)

    def of_grant(self, grant: PageGrant) -> Peer:
        """The peer that made the grant. Raises TransferFailed if it is not connected any more."""
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
