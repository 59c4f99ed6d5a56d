"""Sender: writes a request's rows into the pages a decode node granted.

The life of a grant here:

1. `open` at its receipt, which starts the lease.
2. `send` after each chunk posts the rows it completed; the last chunk takes along window,
   compressor state and the first output token. Where the roles' layouts differ, rows go through
   staging memory; what it has no room for waits, and is posted by a later `poll`.
3. `poll` reports each post that has completed or failed; progress renews the lease. A post that
   outlasts the lease is abandoned with the connection it is on.
4. `close_grant` once nothing is in flight. `cancel` before that drops what waits.

After the first failure, or the end of the lease, nothing more is posted for the grant: a late
write must never land in pages that decode has given to somebody else. For the same reason an
abandoned post counts as in flight for another lease: TCP may still deliver what it has taken over,
and gives up what stays unacknowledged for so long (see nixl_transport.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sluice.cache.pools import Pool
from sluice.cache.spec import TableSpec
from sluice.engine.protocol import (
    IncompatiblePeers,
    NodeInfo,
    PageGrant,
    PageRun,
    TransferFailed,
)
from sluice.transfer.checksum import ChecksumMode, checked_rows, checksum
from sluice.transfer.notification import Notification
from sluice.transfer.outgoing import Chunk, Outgoing, Post, Transfer
from sluice.transfer.peers import Peer, Peers
from sluice.transfer.plan import Write, byte_runs
from sluice.transfer.staging import Convert, Packed, Slot, Staging, needs_packing
from sluice.transfer.transport import Transport

STAGING = "*staging"  # the name of its memory at the transport
STAGING_BYTES = 64 << 20

Pages = Mapping[TableSpec, PageRun]


@dataclass(frozen=True)
class Part:
    """What one post moves, and the rows of its chunk that must wait for another."""

    rows: Mapping[str, range]
    later: Mapping[str, range]
    slot: Slot | None


class Sender:
    """The prefill side of transfers. Belongs to the node's loop thread."""

    def __init__(
        self,
        transport: Transport,
        pools: Mapping[str, Pool],
        *,
        checksum: ChecksumMode = "off",
        staging_bytes: int = STAGING_BYTES,
        convert: Convert | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Registers the pools at the transport; they stay registered until `close`.

        staging_bytes: taken when a peer's layout asks for it. convert: makes rows of one of a
        pool's dtypes from rows of another; without it only plain numbers are converted.
        """
        transport.register(pools)
        self._transport = transport
        self._pools = dict(pools)
        self._checksum_mode = checksum
        self._staging_bytes = staging_bytes
        self._staging: Staging | None = None
        self._convert = convert or (lambda rows, source, target: rows)
        self._clock = clock
        self._peers = Peers(transport)
        self._outgoing: dict[str, Outgoing] = {}

    def connect(self, own: NodeInfo, peer: NodeInfo) -> None:
        """Meet a decode node; a new incarnation replaces the old, whose transfers fail.

        Raises IncompatiblePeers naming the field.
        """
        if self._peers.replaces(own, peer):
            self._give_up(peer.node_id, f"the connection to {peer.node_id} was renewed")
            self._load(peer)

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
        must have been synchronised: rows are read at once, or by a later poll. Raises
        TransferFailed, and again for every later chunk of the grant.
        """
        outgoing = self._outgoing[grant.grant_id]
        assert start <= outgoing.sent_tokens <= end <= grant.num_tokens, "chunks come in order"
        last = end == grant.num_tokens
        assert last == (first_token is not None), "the first token goes with the last chunk"
        outgoing.check(self._clock())
        candidates = {name: outgoing.rows(pool.spec, end) for name, pool in self._pools.items()}
        rows = {name: pool_rows for name, pool_rows in candidates.items() if pool_rows}
        if rows or last:
            outgoing.queue.append(Chunk(rows, pages, first_token))
        outgoing.sent_tokens = end
        self._post_queued(outgoing)
        if outgoing.error is not None:
            outgoing.check(self._clock())

    def poll(self) -> list[Transfer]:
        """Posts that completed since the last call, and failures, each once."""
        now = self._clock()
        self._abandon_overdue(now)  # first: polling a transport moves on what it has queued
        transfers = []
        for outgoing in self._outgoing.values():
            over, completed = outgoing.settle(self._transport, now)
            self._give_back(over)
            transfers += completed
        for outgoing in self._outgoing.values():
            self._post_queued(outgoing)
            transfers += outgoing.news_of_failure()
        return transfers

    def in_flight(self, grant_id: str) -> bool:
        """Whether a write of the grant may still read our pages or change decode's."""
        outgoing = self._outgoing.get(grant_id)
        return outgoing is not None and outgoing.busy(self._clock())

    def cancel(self, grant_id: str) -> None:
        """Post nothing more of the grant; what is in flight goes on. Unknown ids are ignored."""
        outgoing = self._outgoing.get(grant_id)
        if outgoing is not None:
            outgoing.queue.clear()

    def close_grant(self, grant_id: str) -> None:
        """End of the grant here; nothing of it may be in flight. Unknown ids are ignored."""
        assert not self.in_flight(grant_id), f"grant {grant_id} still has writes in flight"
        self._outgoing.pop(grant_id, None)

    def close(self) -> None:
        """Give up everything and close the transport."""
        self._outgoing.clear()
        self._transport.close()

    def _load(self, info: NodeInfo) -> None:
        """Connect, and find out which of the peer's pools are packed for it."""
        targets = {spec.name: spec for spec in info.specs}
        slot_bytes = Staging.slot_bytes_of(self._staging_bytes)
        pairs = [(pool.spec, targets[name]) for name, pool in self._pools.items()]
        packed = [t for s, t in pairs if needs_packing(s, t, slot_bytes)]
        for target in packed:
            if target.page_bytes > slot_bytes:
                raise IncompatiblePeers(
                    f"pool {target.name}: rows become {target.dtype} for {info.node_id}, in pages "
                    f"of {target.page_bytes} bytes, and a slot of staging memory has {slot_bytes}; "
                    f"set transfer.staging_bytes to {Staging.bytes_for(target.page_bytes)} or more"
                )
        if packed and self._staging is None:
            device = next(iter(self._pools.values())).spec.device
            self._staging = Staging(self._staging_bytes, device)
            self._transport.stage(STAGING, self._staging.memory)
        self._peers.connect(info, packed=frozenset(spec.name for spec in packed))

    def _post_queued(self, outgoing: Outgoing) -> None:
        """Post what waits, as far as staging memory reaches. A failure ends the grant."""
        try:
            while outgoing.queue:
                peer = self._usable_peer(outgoing.grant)
                part = self._next_part(peer, outgoing.queue[0])
                if part is None:
                    return
                self._post(outgoing, peer, part)
        except TransferFailed as error:
            outgoing.fail(error)

    def _next_part(self, peer: Peer, chunk: Chunk) -> Part | None:
        """As much of the chunk as can be posted at once; None if a slot must come free first."""
        packed = [name for name in chunk.rows if name in peer.packed]
        if not packed:
            return Part(chunk.rows, {}, None)
        assert self._staging is not None, "a peer with packed pools brings staging memory"
        slot = self._staging.take()
        if slot is None:
            return None
        rows = {name: r for name, r in chunk.rows.items() if name not in peer.packed}
        later = {}
        for name in packed:
            wanted = chunk.rows[name]
            fitting = slot.reserve(peer.specs[name], wanted)
            if fitting:
                rows[name] = fitting
            if fitting.stop < wanted.stop:
                later[name] = range(fitting.stop, wanted.stop)
        return Part(rows, later, slot)

    def _post(self, outgoing: Outgoing, peer: Peer, part: Part) -> None:
        """Post a part of the first chunk that waits."""
        chunk = outgoing.queue.popleft()
        if part.later:
            outgoing.queue.appendleft(Chunk(part.later, chunk.pages, chunk.first_token))
        token = None if part.later else chunk.first_token
        try:
            packed, writes = self._writes(outgoing.grant, peer, part, chunk.pages)
            note = self._notification(outgoing, part.rows, chunk.pages, packed, token)
            now = self._clock()
            outgoing.check(now)  # again: planning and checksums take time
            handle = self._handle(peer, writes, note)
        except TransferFailed:
            self._free(part.slot)
            raise
        traffic = {
            write.target: outgoing.count(
                peer.specs[write.target], part.rows[write.target], write.runs
            )
            for write in writes
        }
        outgoing.posted(Post(handle, peer, now, traffic, part.slot))

    def _handle(self, peer: Peer, writes: Sequence[Write], note: Notification) -> int:
        try:
            return self._transport.post(peer.transport_id, writes, note.encode())
        except TransferFailed:
            peer.broken = True
            raise

    def _usable_peer(self, grant: PageGrant) -> Peer:
        """The grant's peer, reloaded if a write to it failed and nothing is in flight to it."""
        peer = self._peers.of_grant(grant)
        if not peer.broken or any(outgoing.in_flight for outgoing in self._to(grant.node_id)):
            return peer
        try:
            self._peers.connect(peer.info, packed=peer.packed)
        except IncompatiblePeers as error:
            raise TransferFailed(f"{grant.node_id} cannot be reached again: {error}") from error
        return self._peers.of_grant(grant)

    def _writes(
        self, grant: PageGrant, peer: Peer, part: Part, pages: Pages
    ) -> tuple[dict[str, Packed], list[Write]]:
        """Pack what must be; from where to where the rows of every pool are to be written."""
        packed, writes = {}, []
        for name, rows in part.rows.items():
            pool, target = self._pools[name], peer.specs[name]
            here, there = pages[pool.spec.table], _target_run(grant, peer, name)
            if name in peer.packed:
                assert part.slot is not None, "packed rows need a slot"
                packed[name] = part.slot.pack(pool, here, target, there, rows, self._convert)
                writes.append(Write(STAGING, name, packed[name].runs))
            else:
                runs = byte_runs(pool.spec, here, target, there, rows)
                writes.append(Write(name, name, runs))
        return packed, writes

    def _notification(
        self,
        outgoing: Outgoing,
        rows: Mapping[str, range],
        pages: Pages,
        packed: Mapping[str, Packed],
        first_token: int | None,
    ) -> Notification:
        return Notification(
            grant_id=outgoing.grant.grant_id,
            epoch=outgoing.grant.epoch,
            chunk=outgoing.num_posts,
            last=first_token is not None,
            rows=rows,
            first_token=first_token,
            sampled=self._checksum_mode == "sample",
            checksums=dict(self._checksums(rows, pages, packed)),
        )

    def _checksums(
        self, rows: Mapping[str, range], pages: Pages, packed: Mapping[str, Packed]
    ) -> Iterator[tuple[str, str]]:
        """Of what is written: of packed rows as the target has them."""
        if self._checksum_mode == "off":
            return
        for name, pool_rows in rows.items():
            pool = self._pools[name]
            run = pages[pool.spec.table]
            if name in packed:
                pool, run = packed[name].pool, packed[name].run
            yield name, checksum(pool, run, checked_rows(pool_rows, self._checksum_mode))

    def _to(self, node_id: str) -> list[Outgoing]:
        return [out for out in self._outgoing.values() if out.grant.node_id == node_id]

    def _abandon_overdue(self, now: float) -> None:
        """Cut the connections on which a write has outlasted its lease.

        The node at the other end is frozen or cut off, or we were: what the transport has queued
        would be written whenever that ends, into pages that may be somebody else's by then.
        """
        overdue = [out for out in self._outgoing.values() if out.overdue(now)]
        for node_id in {out.grant.node_id for out in overdue}:
            for outgoing in self._to(node_id):
                if outgoing.in_flight:
                    self._abandon(outgoing, now)

    def _abandon(self, outgoing: Outgoing, now: float) -> None:
        grant = outgoing.grant
        reason = (
            f"a write to {grant.node_id} has not ended within the lease of {grant.lease_s} s; "
            "is the node frozen or cut off?"
        )
        posts = outgoing.give_up(self._transport, reason)
        outgoing.silent_at = now + grant.lease_s
        self._give_back(posts)
        for post in posts:
            post.peer.broken = True
            self._transport.disconnect(post.peer.transport_id)

    def _give_up(self, node_id: str, reason: str) -> None:
        for outgoing in self._to(node_id):
            self._give_back(outgoing.give_up(self._transport, reason))

    def _give_back(self, posts: Sequence[Post]) -> None:
        for post in posts:
            self._free(post.slot)

    def _free(self, slot: Slot | None) -> None:
        if slot is not None:
            assert self._staging is not None, "slots come from staging memory"
            self._staging.give_back(slot)


def _target_run(grant: PageGrant, peer: Peer, name: str) -> PageRun:
    table = peer.specs[name].table
    if table not in grant.pages:
        raise TransferFailed(
            f"grant {grant.grant_id}: it lists no pages for pool {name} although "
            f"{grant.node_id} has that pool; reserve again"
        )
    return grant.pages[table]
