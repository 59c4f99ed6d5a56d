"""Sender: brings a request's rows into the pages a decode node granted.

The life of a grant here:

1. `open` at its receipt, which starts the lease.
2. `send` after each chunk posts the rows it completed; the last chunk takes along window,
   compressor state and the first output token. Where the roles' layouts differ, rows go through
   staging memory; what it has no room for waits, and is posted by a later `poll`.
3. `poll` reports each post that has completed or failed; progress renews the lease. A post that
   fails, or outlasts the lease, ends the connection it is on, and all other posts there.
4. `close_grant` once nothing is in flight. `cancel` before that drops what waits.

After the first failure, or the end of the lease, nothing more is posted for the grant: a late
write must never land in pages that decode has given to somebody else. For the same reason whatever
ends a post other than completion leaves it in flight for another lease (see outgoing.py). All of
it holds in READ mode too, where a post is an offer that decode reads (see offers.py).

A grant that arrives late is refused after its expiry; one that arrives twice is a bug of the node.
A peer whose connection is lost stays known, and each use of it tries to connect again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from sluice.cache.clock import lease_clock
from sluice.cache.pools import Pool
from sluice.protocol.messages import NodeInfo, PageGrant, TransferFailed
from sluice.transfer.checksum import ChecksumMode
from sluice.transfer.notification import Notification
from sluice.transfer.offers import Offers
from sluice.transfer.outgoing import Outgoing, Post, Shipment, Transfer
from sluice.transfer.parts import Pages, Part, Parts
from sluice.transfer.peers import Peer, Peers, check_peers
from sluice.transfer.plan import Copy
from sluice.transfer.staging import Convert
from sluice.transfer.transport import Handle, NothingLeft, Posts, Transport

STAGING_BYTES = 64 << 20

TransferMode = Literal["write", "read"]


class Sender:
    """The prefill side of transfers. Belongs to the node's loop thread."""

    def __init__(
        self,
        transport: Transport,
        pools: Mapping[str, Pool],
        *,
        mode: TransferMode = "write",
        checksum: ChecksumMode = "off",
        staging_bytes: int = STAGING_BYTES,
        convert: Convert | None = None,
        clock: Callable[[], float] = lease_clock,
    ) -> None:
        """Registers the pools at the transport; they stay registered until `close`.

        mode: whether we write the rows, or the peer reads them. staging_bytes: taken when a peer's
        layout asks for it. convert: makes rows of one of a pool's dtypes from rows of another;
        without it only plain numbers are converted.
        """
        transport.register(pools)
        self._transport = transport
        self._posts: Posts = Offers(transport) if mode == "read" else transport
        self._mode = mode
        self._specs = {name: pool.spec for name, pool in pools.items()}
        self._parts = Parts(
            transport, pools, checksum=checksum, staging_bytes=staging_bytes, convert=convert
        )
        self._clock = clock
        self._peers = Peers(transport)
        self._outgoing: dict[str, Outgoing] = {}

    def connect(self, own: NodeInfo, peer: NodeInfo) -> None:
        """Meet a decode node; a new incarnation replaces the old, whose transfers fail.

        One that cannot be reached now is known all the same, and reached by the first grant that
        can. Raises IncompatiblePeers naming the field; then what was known stays.
        """
        check_peers(own, peer)
        known = self._peers.find(peer)
        if known is not None and known.info.incarnation == peer.incarnation:
            return
        newcomer = Peer(peer, self._parts.packed_for(peer))
        self._peers.reach(newcomer, self._clock())
        self._give_up(peer.node_id, f"the connection to {peer.node_id} was renewed")
        self._peers.put(newcomer)

    def disconnect(self, node_id: str) -> None:
        """Forget a decode node; what is in flight to it fails. Unknown ids are ignored."""
        self._give_up(node_id, f"{node_id} was disconnected")
        self._peers.remove(node_id)

    def open(self, grant: PageGrant) -> None:
        """Start the grant's lease, at the moment of its receipt.

        Raises TransferFailed if it has expired on its way, or if the node that made it is not known
        in that incarnation.
        """
        assert grant.grant_id not in self._outgoing, f"grant {grant.grant_id} is open already"
        self._peers.of_grant(grant)
        now = self._clock()
        outgoing = Outgoing(grant, now, read_by_peer=self._mode == "read")
        outgoing.check(now)
        self._outgoing[grant.grant_id] = outgoing

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
        must have been synchronised: rows are read at once, or by a later poll. Raises
        TransferFailed, and again for every later chunk of the grant.
        """
        outgoing = self._outgoing[grant.grant_id]
        assert start <= outgoing.sent_tokens <= end <= grant.num_tokens, "chunks come in order"
        last = end == grant.num_tokens
        assert last == (first_token is not None), "the first token goes with the last chunk"
        try:
            outgoing.check(self._clock())
            candidates = {name: outgoing.rows(spec, end) for name, spec in self._specs.items()}
            rows = {name: pool_rows for name, pool_rows in candidates.items() if pool_rows}
            if rows or last:
                outgoing.queue.append(Shipment(rows, pages, first_token))
            outgoing.sent_tokens = end
            self._post_queued(outgoing)
            if outgoing.error is not None:
                raise outgoing.error
        except TransferFailed:
            outgoing.told()
            raise

    def poll(self) -> list[Transfer]:
        """Posts that completed since the last call, and failures, each once."""
        now = self._clock()
        self._abandon_overdue(now)  # first: polling a transport moves on what it has queued
        transfers: list[Transfer] = []
        lost: set[Peer] = set()
        for outgoing in self._outgoing.values():
            over, completed, failed = outgoing.settle(self._posts, now)
            self._give_back(outgoing, over, now)
            transfers += completed
            lost |= failed
        for peer in lost:
            self._cut(peer, f"the connection to {peer.info.node_id} was lost")
        for outgoing in self._outgoing.values():
            self._post_queued(outgoing)
            transfers += outgoing.news_of_failure()
        self._limit_moves()
        return transfers

    def in_flight(self, grant_id: str) -> bool:
        """Whether a write of the grant may still read our pages or change decode's."""
        outgoing = self._outgoing.get(grant_id)
        return outgoing is not None and outgoing.busy(self._clock())

    def reads(self, grant_id: str) -> bool:
        """Whether our pages of the grant must stay as they are."""
        outgoing = self._outgoing.get(grant_id)
        return outgoing is not None and outgoing.reads(self._clock())

    def cancel(self, grant_id: str) -> None:
        """Post nothing more of the grant; what is in flight goes on. Unknown ids are ignored."""
        outgoing = self._outgoing.get(grant_id)
        if outgoing is not None:
            outgoing.queue.clear()
            self._drop(outgoing)

    def close_grant(self, grant_id: str) -> None:
        """End of the grant here; nothing of it may be in flight. Unknown ids are ignored."""
        assert not self.in_flight(grant_id), f"grant {grant_id} still has writes in flight"
        outgoing = self._outgoing.pop(grant_id, None)
        for bay in outgoing.stranded if outgoing else ():
            self._parts.free(bay)

    def close(self) -> None:
        """Give up everything and close the transport."""
        self._outgoing.clear()
        self._transport.close()

    def _limit_moves(self) -> None:
        """Let nothing move on by itself once a lease of what is in flight, or will be, is over."""
        deadlines = [out.deadline for out in self._outgoing.values() if out.in_flight or out.waits]
        self._transport.move_until(min(deadlines, default=math.inf))

    def _post_queued(self, outgoing: Outgoing) -> None:
        """Post what waits, as far as connection and staging memory allow.

        A failure ends the grant.
        """
        if outgoing.waits:
            self._limit_moves()
        try:
            while outgoing.waits and outgoing.error is None:
                outgoing.check(self._clock())
                peer = self._usable_peer(outgoing.grant)
                if peer is None:
                    return
                if outgoing.again:
                    self._repeat(outgoing, peer)
                    continue
                part = self._parts.next_of(outgoing.queue[0], peer)
                if part is None:
                    return
                self._post(outgoing, peer, part)
        except TransferFailed as error:
            outgoing.fail(error)
        finally:
            if outgoing.error is not None:
                self._drop(outgoing)

    def _repeat(self, outgoing: Outgoing, peer: Peer) -> None:
        """Post a part again of which nothing has left."""
        post = outgoing.again[0]
        handle = self._handle(peer, post.copies, post.message)
        outgoing.again.popleft()
        outgoing.in_flight.append(replace(post, handle=handle, peer=peer, posted_at=self._clock()))

    def _drop(self, outgoing: Outgoing) -> None:
        """Free the bays of posts that will not be repeated."""
        for post in outgoing.take_back():
            self._parts.free(post.bay)

    def _post(self, outgoing: Outgoing, peer: Peer, part: Part) -> None:
        """Post a part of the first chunk that waits."""
        chunk = outgoing.queue.popleft()
        if part.later:
            outgoing.queue.appendleft(Shipment(part.later, chunk.pages, chunk.first_token))
        token = None if part.later else chunk.first_token
        try:
            copies, checksums = self._parts.lay_out(part, outgoing.grant, peer, chunk.pages)
            message = self._notification(outgoing, part.rows, checksums, token).encode()
            now = self._clock()
            outgoing.check(now)  # again: planning and checksums take time
            handle = self._handle(peer, copies, message)
        except TransferFailed:
            self._parts.free(part.bay)
            raise
        traffic = {
            copy.target: outgoing.count(peer.specs[copy.target], part.rows[copy.target], copy.runs)
            for copy in copies
        }
        outgoing.posted(Post(handle, peer, copies, message, now, traffic, part.bay))

    def _handle(self, peer: Peer, copies: Sequence[Copy], message: bytes) -> Handle:
        """Post it; on a connection that proves lost, once more on a new one. Raises TransferFailed.

        Then nothing of it is in flight.
        """
        try:
            return self._posts.post(peer.transport_id, copies, message)
        except TransferFailed as error:
            peer.broken = True
            if self._in_use(peer) or not isinstance(error, NothingLeft):
                raise
            self._peers.mend(peer, self._clock())
        try:
            return self._posts.post(peer.transport_id, copies, message)
        except TransferFailed:
            peer.broken = True
            raise

    def _usable_peer(self, grant: PageGrant) -> Peer | None:
        """The grant's peer, connected again if need be; None if it has to wait for that.

        What is in flight shows soon whether a connection stands that refused a post. Raises
        TransferFailed.
        """
        peer = self._peers.of_grant(grant)
        if peer.broken:
            if self._in_use(peer):
                return None
            self._peers.mend(peer, self._clock())
        return peer

    def _in_use(self, peer: Peer) -> bool:
        return any(outgoing.uses(peer) for outgoing in self._outgoing.values())

    def _notification(
        self,
        outgoing: Outgoing,
        rows: Mapping[str, range],
        checksums: Mapping[str, str],
        first_token: int | None,
    ) -> Notification:
        return Notification(
            grant_id=outgoing.grant.grant_id,
            epoch=outgoing.grant.epoch,
            chunk=outgoing.num_posts,
            last=first_token is not None,
            rows=rows,
            first_token=first_token,
            sampled=self._parts.checksum_mode == "sample",
            checksums=checksums,
        )

    def _abandon_overdue(self, now: float) -> None:
        """Cut the connections on which a transfer has outlasted its lease.

        The node at the other end is frozen or cut off, or we were: what the transport has queued
        would be written whenever that ends, into pages that may be somebody else's by then.
        """
        overdue = [out for out in self._outgoing.values() if out.overdue(now)]
        for peer in {post.peer for outgoing in overdue for post in outgoing.in_flight}:
            lease_s = max(out.grant.lease_s for out in overdue if out.uses(peer))
            self._cut(
                peer,
                f"a transfer to {peer.info.node_id} has not ended within the lease of {lease_s} s; "
                "is the node frozen or cut off?",
            )

    def _cut(self, peer: Peer, reason: str) -> None:
        """Give up a connection and everything on it; the next use of the peer makes a new one."""
        now = self._clock()
        for outgoing in self._outgoing.values():
            if outgoing.uses(peer):
                self._give_back(outgoing, outgoing.give_up(self._posts, reason, now), now)
        self._peers.lose(peer)

    def _give_up(self, node_id: str, reason: str) -> None:
        """Fail the grants of a node, with what is in flight for them."""
        now = self._clock()
        for outgoing in self._outgoing.values():
            if outgoing.grant.node_id == node_id:
                self._give_back(outgoing, outgoing.give_up(self._posts, reason, now), now)

    def _give_back(self, outgoing: Outgoing, posts: Sequence[Post], now: float) -> None:
        """Free the posts' bays, or leave them as they are while a peer may read them."""
        for post in posts:
            if post.bay is not None and self._mode == "read" and now < outgoing.silent_at:
                outgoing.stranded.append(post.bay)
            else:
                self._parts.free(post.bay)
