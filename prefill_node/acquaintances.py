"""Acquaintances: the decode nodes that a prefill node should know, as the controller last said."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sluice.protocol.messages import NodeError, NodeInfo, SluiceError
from sluice.transfer.sender import Sender

log = logging.getLogger(__name__)


class Acquaintances:
    """Brings the sender's peers in line with a list. Belongs to the node's loop thread."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._version = 0
        self._known: set[str] = set()

    def meet(
        self, own: NodeInfo, version: int, peers: Sequence[NodeInfo]
    ) -> dict[str, SluiceError]:
        """Know exactly these decode nodes: connect whom we lack, drop whom the list lacks.

        Returns those that could not be connected, and why. The list may come as often as one
        likes: again, it mends what has broken since. Raises NodeError for one older than the last
        that came, which changes nothing.
        """
        if version < self._version:
            raise NodeError(f"list {version} of peers came after list {self._version}; it is void")
        self._version = version
        for gone in self._known - {peer.node_id for peer in peers}:
            self._sender.disconnect(gone)
            self._known.discard(gone)
        failed = {peer.node_id: self._failure(own, peer) for peer in peers}
        return {node_id: error for node_id, error in failed.items() if error is not None}

    def add(self, own: NodeInfo, peer: NodeInfo) -> None:
        """Know this decode node too, until a list says otherwise. Raises what connecting raises."""
        self._known.add(peer.node_id)  # whatever comes of it, there may be something to drop
        self._sender.connect(own, peer)

    def _failure(self, own: NodeInfo, peer: NodeInfo) -> SluiceError | None:
        """Connect the peer unless it stands; what went wrong."""
        try:
            self.add(own, peer)
        except SluiceError as error:
            return error
        except Exception as error:  # the others are met all the same
            log.warning("event=connect_failed peer=%s", peer.node_id, exc_info=True)
            return NodeError(f"connecting {peer.node_id}: {type(error).__name__}: {error}")
        return None
