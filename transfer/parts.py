"""Parts: what of a chunk one post can move, and from where to where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sluice.cache.pools import Pool
from sluice.cache.spec import TableSpec
from sluice.protocol.messages import (
    IncompatiblePeers,
    NodeInfo,
    PageGrant,
    PageRun,
    TransferFailed,
)
from sluice.transfer.checksum import ChecksumMode, checked_rows, checksum
from sluice.transfer.outgoing import Shipment
from sluice.transfer.peers import Peer
from sluice.transfer.plan import Copy, byte_runs
from sluice.transfer.staging import Bay, Convert, Packed, Staging, needs_packing
from sluice.transfer.transport import Transport

STAGING = "*staging"  # the name of its memory at the transport
Pages = Mapping[TableSpec, PageRun]


@dataclass(frozen=True)
class Part:
    """What one post moves, and the rows of its chunk that must wait for another."""

    rows: Mapping[str, range]
    later: Mapping[str, range]
    bay: Bay | None


class Parts:
    """Our pools, and the staging memory through which some rows take a peer's layout."""

    def __init__(
        self,
        transport: Transport,
        pools: Mapping[str, Pool],
        *,
        checksum: ChecksumMode,
        staging_bytes: int,
        convert: Convert | None,
    ) -> None:
        self._transport = transport
        self._pools = dict(pools)
        self.checksum_mode = checksum
        self._staging_bytes = staging_bytes
        self._staging: Staging | None = None
        self._convert = convert or (lambda rows, source, target: rows)

    def packed_for(self, info: NodeInfo) -> frozenset[str]:
        """Pools whose rows are packed for a peer. Takes the staging memory that they need.

        Raises IncompatiblePeers if it is too small.
        """
        targets = {spec.name: spec for spec in info.specs}
        bay_bytes = Staging.bay_bytes_of(self._staging_bytes)
        pairs = [(pool.spec, targets[name]) for name, pool in self._pools.items()]
        packed = [t for s, t in pairs if needs_packing(s, t, bay_bytes)]
        for target in packed:
            if target.page_bytes > bay_bytes:
                raise IncompatiblePeers(
                    f"pool {target.name}: rows become {target.dtype} for {info.node_id}, in pages "
                    f"of {target.page_bytes} bytes, and a bay of staging memory has {bay_bytes}; "
                    f"set transfer.staging_bytes to {Staging.bytes_for(target.page_bytes)} or more"
                )
        if packed and self._staging is None:
            device = next(iter(self._pools.values())).spec.device
            self._staging = Staging(self._staging_bytes, device)
            self._transport.stage(STAGING, self._staging.memory)
        return frozenset(spec.name for spec in packed)

    def next_of(self, chunk: Shipment, peer: Peer) -> Part | None:
        """As much of the chunk as can be posted at once; None if a bay must come free first."""
        packed = [name for name in chunk.rows if name in peer.packed]
        if not packed:
            return Part(chunk.rows, {}, None)
        assert self._staging is not None, "a peer with packed pools brings staging memory"
        bay = self._staging.take()
        if bay is None:
            return None
        rows = {name: r for name, r in chunk.rows.items() if name not in peer.packed}
        later = {}
        for name in packed:
            wanted = chunk.rows[name]
            fitting = bay.reserve(peer.specs[name], wanted)
            if fitting:
                rows[name] = fitting
            if fitting.stop < wanted.stop:
                later[name] = range(fitting.stop, wanted.stop)
        return Part(rows, later, bay)

    def lay_out(
        self, part: Part, grant: PageGrant, peer: Peer, pages: Pages
    ) -> tuple[list[Copy], dict[str, str]]:
        """Pack what must be; from where to where the rows of every pool go, and checksums."""
        packed, copies = {}, []
        for name, rows in part.rows.items():
            pool, target = self._pools[name], peer.specs[name]
            here, there = pages[pool.spec.table], _target_run(grant, peer, name)
            if name in peer.packed:
                assert part.bay is not None, "packed rows need a bay"
                packed[name] = part.bay.pack(pool, here, target, there, rows, self._convert)
                copies.append(Copy(STAGING, name, packed[name].runs))
            else:
                copies.append(Copy(name, name, byte_runs(pool.spec, here, target, there, rows)))
        return copies, dict(self._checksums(part.rows, pages, packed))

    def free(self, bay: Bay | None) -> None:
        """The part's rows are not read any more."""
        if bay is not None:
            assert self._staging is not None, "bays come from staging memory"
            self._staging.give_back(bay)

    def _checksums(
        self, rows: Mapping[str, range], pages: Pages, packed: Mapping[str, Packed]
    ) -> Iterator[tuple[str, str]]:
        """Of what is moved: of packed rows as the target has them."""
        if self.checksum_mode == "off":
            return
        for name, pool_rows in rows.items():
            pool = self._pools[name]
            run = pages[pool.spec.table]
            if name in packed:
                pool, run = packed[name].pool, packed[name].run
            yield name, checksum(pool, run, checked_rows(pool_rows, self.checksum_mode))


def _target_run(grant: PageGrant, peer: Peer, name: str) -> PageRun:
    table = peer.specs[name].table
    if table not in grant.pages:
        raise TransferFailed(
            f"grant {grant.grant_id}: it lists no pages for pool {name} although "
            f"{grant.node_id} has that pool; reserve again"
        )
    return grant.pages[table]
