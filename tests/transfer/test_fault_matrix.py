"""Every fault in each pool in turn, both transports and modes: wrong rows are never taken as right.

After each fault the next request, into the same pages and with other content, must arrive whole.
"""

import dataclasses
import uuid

import numpy as np
import pytest
import torch

from sluice.protocol.messages import Role, TransferFailed
from sluice.transfer.envelope import is_kind
from sluice.transfer.local_transport import LocalTransport
from sluice.transfer.notification import Notification
from sluice.transfer.offer import KIND as OFFER
from sluice.transfer.offer import Offer
from sluice.transfer.plan import ByteRuns, rows_to_receive

POOLS = ["history", "index", "window", "state", "sums"]
NUM_TOKENS = 39


def lost(writes, note, pool):
    """The pool's bytes never leave."""
    return [write for write in writes if write.target != pool], note


def damaged(writes, note, pool):
    """The pool's first run is read from the null page."""
    return [
        _moved(write, "source_offset") if write.target == pool else write for write in writes
    ], note


def misplaced(writes, note, pool):
    """The pool's first run lands in the null page."""
    return [
        _moved(write, "target_offset") if write.target == pool else write for write in writes
    ], note


def _moved(write, field):
    offsets = getattr(write.runs, field).copy()
    offsets[0] = 0
    runs = {f.name: getattr(write.runs, f.name) for f in dataclasses.fields(ByteRuns)}
    return dataclasses.replace(write, runs=ByteRuns(**(runs | {field: np.array(offsets)})))


def uncounted(writes, note, pool):
    """The notification does not speak of the pool."""
    return writes, dataclasses.replace(
        note,
        rows={name: rows for name, rows in note.rows.items() if name != pool},
        checksums={name: digest for name, digest in note.checksums.items() if name != pool},
    )


def counted_short(writes, note, pool):
    """The notification speaks of one row too few."""
    rows = note.rows.get(pool, range(0))
    if len(rows) == 1:
        return uncounted(writes, note, pool)
    if rows:
        shorter = {**note.rows, pool: rows[:-1]}
        writes, note = uncounted(writes, note, pool)
        note = dataclasses.replace(note, rows=shorter)
    return writes, note


def refused(writes, note, pool):
    """The transport refuses a post that holds the pool."""
    if any(write.target == pool for write in writes):
        raise TransferFailed(f"{pool} cannot be written")
    return writes, note


FAULTS = [lost, damaged, misplaced, uncounted, counted_short, refused]


def faulty(transport):
    """The transport's class with a fault on its way to the peer: `fault` and `pool`."""

    class Faulty(transport):
        fault = None
        pool = ""

        def post(self, peer, writes, notification):
            if self.fault is not None and is_kind(OFFER, notification):
                offer = Offer.decode(notification)
                copies, note = self._faulty(offer.copies, offer.notification)
                notification = dataclasses.replace(offer, copies=copies, notification=note).encode()
            elif self.fault is not None:
                writes, notification = self._faulty(writes, notification)
            return super().post(peer, writes, notification)

        def _faulty(self, copies, notification):
            copies, note = self.fault(copies, Notification.decode(notification), self.pool)
            return copies, note.encode()

    return Faulty


@pytest.fixture(scope="module", params=["local", "nixl"])
def make_transport(request):
    if request.param == "local":
        return LocalTransport, faulty(LocalTransport)
    nixl = pytest.importorskip("sluice.transfer.nixl_transport").NixlTransport

    def maker(kind):
        return lambda name: kind(f"{name}.{uuid.uuid4().hex[:8]}", "UCX", {})

    return maker(nixl), maker(faulty(nixl))


@pytest.mark.parametrize("mode", ["write", "read"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_in_any_pool_fails_the_grant_and_nothing_else(toy, make_transport, fault, mode):
    sound, broken = make_transport
    source = toy.local(Role.PREFILL, seed=1, kind=broken, checksum="full", mode=mode)
    target = toy.local(Role.DECODE, seed=2, kind=sound)
    source.end.connect(source.info, target.info)
    for number, pool in enumerate(POOLS):
        grant = target.grant(NUM_TOKENS, f"bad-{pool}", epoch=2 * number)
        source.transport.fault, source.transport.pool = fault, pool
        assert outcome(toy, source, target, grant) is None, f"{fault.__name__} {pool}"
        source.transport.fault = None
        refill(source)
        again = dataclasses.replace(grant, grant_id=f"good-{pool}", epoch=2 * number + 1)
        runs = outcome(toy, source, target, again)
        assert runs is not None
        for spec in target.specs:
            for row in rows_to_receive(spec, NUM_TOKENS):
                arrived = target.row(spec.name, grant.pages, row)
                assert torch.equal(arrived, source.row(spec.name, runs, row)), spec.name
    source.end.close()
    target.end.close()


def outcome(toy, source, target, grant):
    """Deliver a grant; the source's pages if it completed, None if either side failed it."""
    target.end.expect(grant)
    try:
        runs = toy.deliver(source, grant, [16, NUM_TOKENS])
        polled = toy.wait_for(
            lambda items: any(getattr(i, "first_token", None) or i.error for i in items),
            source,
            target,
        )
    except TransferFailed:
        runs, polled = None, []
    toy.wait_for(lambda _: not source.end.in_flight(grant.grant_id), source, target)
    source.end.close_grant(grant.grant_id)
    target.end.forget(grant.grant_id)
    return None if any(item.error for item in polled) else runs


def refill(source):
    """Other content: the next prompt's."""
    for pool in source.pools.values():
        pool.tensor.view(-1).view(torch.uint8).bitwise_xor_(1)
