"""Sender and receiver together: rows arrive bytewise, nothing else changes, faults are noticed."""

import dataclasses
import random
from collections import Counter

import pytest
import torch

from sluice.protocol.messages import TransferFailed
from sluice.transfer.local_transport import LocalTransport
from sluice.transfer.notification import Notification
from sluice.transfer.plan import rows_to_receive

RELAID = {"history": 48, "index": 16, "window": 3, "state": 4, "sums": 32}


def complete(polled):
    return [item for item in polled if getattr(item, "first_token", None) is not None]


def check_bytes(source, source_runs, target, grant, before):
    """Every wanted row equals the source's; every other byte is as before."""
    for name, pool in target.pools.items():
        for row in rows_to_receive(pool.spec, grant.num_tokens, grant.skip_tokens):
            arrived = target.row(name, grant.pages, row)
            assert torch.equal(arrived, source.row(name, source_runs, row)), (name, row)
            page = grant.pages[pool.spec.table]
            physical = page.pages[row // pool.spec.rows_per_page - page.first]
            before[name][physical, :, row % pool.spec.rows_per_page] = arrived
        assert torch.equal(pool.tensor, before[name]), f"{name}: other rows changed"


@pytest.mark.parametrize("mode", ["write", "read"])
@pytest.mark.parametrize("layout", [{}, RELAID])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 15, 16, 17, 31, 32, 33, 64, 77])
def test_every_wanted_row_arrives_and_nothing_else_changes(toy, layout, num_tokens, mode):
    source, target = toy.pair(toy.relaid(toy.SPECS, **layout), mode=mode)
    grant, before = target.grant(num_tokens), target.bytes()
    target.end.expect(grant)
    runs = toy.deliver(source, grant, [*range(13, num_tokens, 13), num_tokens])
    [arrival] = complete(toy.wait_for(complete, target))
    assert (arrival.grant_id, arrival.first_token) == ("grant", 42)
    check_bytes(source, runs, target, grant, before)


def test_random_chunkings_with_rows_already_there(toy):
    seed = random.randrange(1 << 32)
    print(f"seed={seed}")
    rng = random.Random(seed)
    source, target = toy.pair(toy.relaid(toy.SPECS, **RELAID))
    for number in range(30):
        num_tokens = rng.randint(1, 90)
        skip = rng.randint(0, num_tokens - 1)
        cuts = sorted({rng.randint(1, num_tokens) for _ in range(rng.randint(0, 4))} | {num_tokens})
        grant = target.grant(num_tokens, grant_id=f"g{number}", epoch=number, skip_tokens=skip)
        before = target.bytes()
        target.end.expect(grant)
        runs = toy.deliver(source, grant, cuts)
        source.end.poll()
        assert len(complete(target.end.poll())) == 1
        check_bytes(source, runs, target, grant, before)


def test_nothing_completes_before_the_last_missing_chunk(toy):
    source, target = toy.pair()
    grant = target.grant(40)
    target.end.expect(grant)
    toy.deliver(source, grant, [16, 32, 40])
    messages = target.transport.notifications()
    assert len(messages) == 3
    order = [messages[2], messages[0], messages[1]]  # the last chunk's may overtake
    target.transport.notifications = lambda: [order.pop(0)] if order else []
    assert [bool(complete(target.end.poll())) for _ in range(3)] == [False, False, True]


def test_traffic_is_counted_by_pool(toy):
    source, target = toy.pair()
    grant = target.grant(40)
    target.end.expect(grant)
    toy.deliver(source, grant, [8, 20, 40])
    transfers = source.end.poll()
    pages = Counter()
    for transfer in transfers:
        pages.update({name: traffic.pages for name, traffic in transfer.pools.items()})
    assert pages == {"history": 3, "index": 3, "window": 2, "state": 1, "sums": 1}
    sent = sum(p.bytes for t in transfers for p in t.pools.values())
    assert sent == sum(sum(a.num_bytes.values()) for a in target.end.poll())
    assert all(t.seconds >= 0 and t.error is None for t in transfers)


def test_payload_never_exceeds_the_pages_a_request_holds(toy):
    source, target = toy.pair()
    for num_tokens in range(1, 80):
        grant = target.grant(num_tokens, grant_id=str(num_tokens))
        toy.deliver(source, grant, [num_tokens])
        moved = source.end.poll()[-1].pools
        for spec in toy.SPECS:
            held = len(spec.pages(num_tokens, num_tokens)) * spec.page_bytes
            assert spec.name not in moved or moved[spec.name].bytes <= held
        source.end.close_grant(grant.grant_id)


@pytest.mark.parametrize("change", [{"epoch": 9}, {"grant_id": "other"}])
def test_a_notification_for_another_epoch_or_grant_never_completes(toy, change):
    source, target = toy.pair()
    grant = target.grant(20)
    target.end.expect(grant)
    stale = type(grant)(**{**vars(grant), **change})
    toy.deliver(source, stale, [20])
    assert target.end.poll() == []
    assert sum(target.end.dropped.values()) == 1


def test_repeats_are_dropped(toy):
    source, target = toy.pair()
    grant = target.grant(40)
    target.end.expect(grant)
    toy.deliver(source, grant, [16])
    [message] = target.transport.notifications()
    target.transport._inbox.put(message)
    target.transport._inbox.put(message)
    assert complete(target.end.poll()) == []
    assert target.end.dropped == {"duplicate": 1}


def test_garbage_is_counted_and_dropped(toy):
    _, target = toy.pair()
    for message in (b"", b"\xff\x00", b"[]", b'{"v": 1}', b'{"v": 99}'):
        target.transport._inbox.put(("nobody", message))
    assert target.end.poll() == []
    assert target.end.dropped == {"malformed": 5}


def test_late_writes_to_a_retired_grant_are_reported_but_never_complete(toy):
    source, target = toy.pair()
    grant = target.grant(20)
    target.end.expect(grant)
    target.end.retire(grant.grant_id)
    toy.deliver(source, grant, [20])
    [arrival] = target.end.poll()
    assert arrival.retired and arrival.first_token is None
    target.end.forget(grant.grant_id)
    target.end.forget("unknown")


class LosingTransport(LocalTransport):
    """Delivers everything but one pool's bytes."""

    lost = ""

    def post(self, peer, writes, notification):
        kept = [write for write in writes if write.target != self.lost]
        return super().post(peer, kept, notification)


@pytest.mark.parametrize("pool", ["history", "index", "window", "state", "sums"])
def test_a_checksum_notices_lost_bytes_in_any_pool(toy, pool):
    source, target = toy.pair(kind=LosingTransport, checksum="full")
    source.transport.lost = pool
    grant = target.grant(37)
    target.end.expect(grant)
    toy.deliver(source, grant, [37])
    [arrival] = target.end.poll()
    assert f"pool {pool}: checksum" in arrival.error and arrival.first_token is None
    assert target.end.failed == 1


def test_checksums_agree_across_layouts(toy):
    source, target = toy.pair(toy.relaid(toy.SPECS, **RELAID), checksum="full")
    grant = target.grant(77)
    target.end.expect(grant)
    toy.deliver(source, grant, [30, 77])
    assert len(complete(target.end.poll())) == 1 and target.end.failed == 0


class PartialTransport(LocalTransport):
    """Tells decode of fewer rows than it should: the notification lacks a pool."""

    def post(self, peer, writes, notification):
        note = Notification.decode(notification)
        rows = {name: rows for name, rows in note.rows.items() if name != "state"}
        return super().post(peer, writes, dataclasses.replace(note, rows=rows).encode())


def test_an_uncounted_pool_fails_the_grant(toy):
    source, target = toy.pair(kind=PartialTransport)
    grant = target.grant(20)
    target.end.expect(grant)
    toy.deliver(source, grant, [20])
    [arrival] = target.end.poll()
    assert arrival.first_token is None and "expected" in arrival.error


def test_pages_missing_from_a_grant_fail_at_once_and_write_nothing(toy):
    source, target = toy.pair()
    grant, before = target.grant(40), target.bytes()
    short = {t: type(r)(r.first, r.pages[:-1]) for t, r in grant.pages.items()}
    grant = type(grant)(**{**vars(grant), "pages": short})
    with pytest.raises(TransferFailed, match="holds too few pages"):
        toy.deliver(source, grant, [40])
    assert all(torch.equal(pool.tensor, before[name]) for name, pool in target.pools.items())
