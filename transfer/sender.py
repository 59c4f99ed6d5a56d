"""Sender: writes a request's rows into the pages a decode node granted.

The life of a grant here:

1. `open` at its receipt, which starts the lease.
2. `send` after each chunk posts the rows it completed; the last chunk takes along window,
   compressor state and the first output token.
3. `poll` reports each post that has completed or failed; progress renews the lease.
4. `close_grant` once nothing is in flight.

After the first failure, or the end of the lease, nothing more is posted for the grant: a late
write must never land in pages that decode has given to somebody else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Literal

from sluice.cache.pools import Pool
from sluice.cache.spec import TableSpec
from sluice.engine.protocol import (
    IncompatiblePeers,
    NodeInfo,
    PageGrant,
    PageRun,
    TransferFailed,
)
from sluice.transfer.checksum import checksum
from sluice.transfer.notification import Notification
from sluice.transfer.outgoing import Outgoing, Post, Transfer
from sluice.transfer.peers import Peer, Peers
from sluice.transfer.plan import ByteRuns, byte_runs
from sluice.transfer.transport import Transport

Pages = Mapping[TableSpec, PageRun]


class Sender:
    """The prefill side of transfers. Belongs to the node's loop thread."""

    def __init__(
        self,
        transport: Transport,
        pools: Mapping[str, Pool],
        *,
        checksum: Literal["off", "full"] = "off",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Registers the pools at the transport; they stay registered until `close`."""
        transport.register(pools)
        self._transport = transport
        self._pools = dict(pools)
        self._with_checksums = checksum == "full"
        self._clock = clock
        self._peers = Peers(transport)
        self._outgoing: dict[str, Outgoing] = {}

    def connect(self, own: NodeInfo, peer: NodeInfo) -> None:
        """Meet a decode node; a new incarnation replaces the old, whose transfers fail.

        Raises IncompatiblePeers naming the field.
        """
        if self._peers.replaces(own, peer):
            self._give_up(peer.node_id, f"the connection to {peer.node_id} was renewed")
            self._peers.connect(peer)

    def disconnect(self, node_id: str) -> None:
        """Forget a decode node; what is in flight to it fails. Unknown ids are ignored."""
        self._give_up(node_id, f"{node_id} was disconnected")
        self._peers.disconnect(node_id)

    def open(self, grant: PageGrant) -> None:
        """Start the grant's lease, at the moment of its receipt.

        Raises TransferFailed if the node that made it is not connected in that incarnation.
        """
        assert grant.grant_id not in self._outgoing, f"grant {grant.grant_id} is open already"
        self._peers.of_grant(grant)
        self._outgoing[grant.grant_id] = Outgoing(grant, self._clock())

    def send(
        self,
        grant: PageGrant,
        pages: Pages,
        start: int,
        end: int,
        *,
        first_token: int | None = None,
    ) -> None:
        """Post what is complete with tokens [start, end), out of the request's own `pages`.

        The chunk that ends at `grant.num_tokens` is the last and brings `first_token`. Rows from
        a prefix cache belong to the first chunk, which then starts at 0. On a device, its stream
        must have been synchronised: rows are read at once. Raises TransferFailed, and again for
        every later chunk of the grant.
        """
        outgoing = self._outgoing[grant.grant_id]
        assert start <= outgoing.sent_tokens <= end <= grant.num_tokens, "chunks come in order"
        last = end == grant.num_tokens
        assert last == (first_token is not None), "the first token goes with the last chunk"
        outgoing.check(self._clock())
        try:
            self._post(outgoing, pages, end, first_token)
        except TransferFailed as error:
            outgoing.fail(error)
            outgoing.check(self._clock())

    def poll(self) -> list[Transfer]:
        """Posts that completed since the last call, and failures, each once."""
        now = self._clock()
        return [t for out in self._outgoing.values() for t in out.settle(self._transport, now)]

    def in_flight(self, grant_id: str) -> bool:
        """Whether a write of the grant may still read our pages or change decode's."""
        outgoing = self._outgoing.get(grant_id)
        return outgoing is not None and bool(outgoing.in_flight)

    def close_grant(self, grant_id: str) -> None:
        """End of the grant here; nothing of it may be in flight. Unknown ids are ignored."""
        assert not self.in_flight(grant_id), f"grant {grant_id} still has writes in flight"
        self._outgoing.pop(grant_id, None)

    def close(self) -> None:
        """Give up everything and close the transport."""
        self._outgoing.clear()
        self._transport.close()

    def _post(self, outgoing: Outgoing, pages: Pages, end: int, first_token: int | None) -> None:
        """Post the rows completed up to `end` as one transfer, if there are any."""
        candidates = {name: outgoing.rows(pool.spec, end) for name, pool in self._pools.items()}
        rows = {name: pool_rows for name, pool_rows in candidates.items() if pool_rows}
        if rows or first_token is not None:
            peer = self._usable_peer(outgoing.grant)
            runs = {
                name: self._runs(outgoing.grant, peer, name, pool_rows, pages)
                for name, pool_rows in rows.items()
            }
            note = self._notification(outgoing, rows, pages, first_token)
            now = self._clock()
            outgoing.check(now)  # again: planning and checksums take time
            try:
                handle = self._transport.post(peer.transport_id, runs, note.encode())
            except TransferFailed:
                peer.broken = True
                raise
            traffic = {n: outgoing.count(peer.specs[n], r, runs[n]) for n, r in rows.items()}
            outgoing.posted(Post(handle, peer, now, traffic))
        outgoing.sent_tokens = end

    def _usable_peer(self, grant: PageGrant) -> Peer:
        """The grant's peer, reloaded if a write to it failed and nothing is in flight to it."""
        peer = self._peers.of_grant(grant)
        if not peer.broken or any(outgoing.in_flight for outgoing in self._to(grant.node_id)):
            return peer
        try:
            self._peers.connect(peer.info)
        except IncompatiblePeers as error:
            raise TransferFailed(f"{grant.node_id} cannot be reached again: {error}") from error
        return self._peers.of_grant(grant)

    def _runs(self, grant: PageGrant, peer: Peer, name: str, rows: range, pages: Pages) -> ByteRuns:
        source, target = self._pools[name].spec, peer.specs[name]
        if target.table not in grant.pages:
            raise TransferFailed(
                f"grant {grant.grant_id}: it lists no pages for pool {name} although "
                f"{grant.node_id} has that pool; reserve again"
            )
        return byte_runs(source, pages[source.table], target, grant.pages[target.table], rows)

    def _notification(
        self,
        outgoing: Outgoing,
        rows: Mapping[str, range],
        pages: Pages,
        first_token: int | None,
    ) -> Notification:
        sums = {}
        if self._with_checksums:
            for name, pool_rows in rows.items():
                pool = self._pools[name]
                sums[name] = checksum(pool, pages[pool.spec.table], pool_rows)
        return Notification(
            grant_id=outgoing.grant.grant_id,
            epoch=outgoing.grant.epoch,
            chunk=outgoing.num_posts,
            last=first_token is not None,
            rows=rows,
            first_token=first_token,
            checksums=sums,
        )

    def _to(self, node_id: str) -> list[Outgoing]:
        return [out for out in self._outgoing.values() if out.grant.node_id == node_id]

    def _give_up(self, node_id: str, reason: str) -> None:
        for outgoing in self._to(node_id):
            outgoing.give_up(self._transport, reason)
