"""What a fault costs: a refused peer, a failed grant, never a late write and never a hang."""

import dataclasses
import math
import time

import pytest
import torch

from sluice.cache.spec import Window
from sluice.protocol.messages import IncompatiblePeers, PageGrant, Role, TransferFailed
from sluice.transfer.local_transport import LocalTransport
from sluice.transfer.peers import RECONNECT_EVERY_S
from sluice.transfer.plan import rows_to_receive
from sluice.transfer.staging import NUM_BAYS
from sluice.transfer.transport import NothingLeft


class SlowTransport(LocalTransport):
    """Completes nothing until told how: True, or an error."""

    outcome = False

    def poll(self, handle):
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class FlappingTransport(LocalTransport):
    """Its next posts, and its next connections, fail so many times."""

    post_fails = refusals = connect_fails = connects = 0

    def post(self, peer, writes, notification):
        if self.post_fails:
            self.post_fails -= 1
            raise TransferFailed("the wire is cut")
        if self.refusals:
            self.refusals -= 1
            raise NothingLeft("the wire is cut")
        return super().post(peer, writes, notification)

    def connect(self, address, *, expected=None):
        self.connects += 1
        if self.connect_fails:
            self.connect_fails -= 1
            raise TransferFailed("no route")
        return super().connect(address, expected=expected)


class CountingTransport(SlowTransport):
    """Notes whom it disconnects."""

    def __init__(self, name):
        super().__init__(name)
        self.disconnected = []

    def disconnect(self, peer):
        self.disconnected.append(peer)
        super().disconnect(peer)


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def changed_info(side, **changes):
    return dataclasses.replace(side.info, **changes)


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"protocol_version": 99}, r"protocol_version: .* has \d+, .* has 99"),
        ({"fingerprint": "other"}, "fingerprint: .* has toy, .* has other"),
        ({"agent": b"elsewhere"}, "transfer.backend"),
    ],
)
def test_a_peer_that_cannot_work_is_refused_by_field(toy, changes, shown):
    source, target = toy.local(Role.PREFILL), toy.local(Role.DECODE)
    with pytest.raises(IncompatiblePeers, match=shown):
        source.end.connect(source.info, changed_info(target, **changes))


def test_a_pool_of_other_meaning_is_refused_and_a_good_pair_goes_on(toy):
    source, target = toy.pair()
    changed = [
        dataclasses.replace(s, retention=Window(9)) if s.name == "window" else s for s in toy.SPECS
    ]
    other = toy.local(Role.DECODE, tuple(changed))
    with pytest.raises(IncompatiblePeers, match="pool window: retention is Window.size=7.*size=9"):
        source.end.connect(source.info, other.info)
    grant = target.grant(20)
    target.end.expect(grant)
    toy.deliver(source, grant, [20])
    assert target.end.poll()[-1].first_token == 42


def test_a_restarted_decode_node_works_without_restarting_prefill(toy):
    source, old = toy.pair()
    old.transport.close()
    new = toy.local(Role.DECODE, seed=3, node_id=old.info.node_id)
    source.end.connect(source.info, new.info)
    grant = new.grant(20)
    new.end.expect(grant)
    toy.deliver(source, grant, [20])
    assert new.end.poll()[-1].first_token == 42


def test_a_grant_of_an_earlier_incarnation_is_refused(toy):
    source, old = toy.pair()
    new = toy.local(Role.DECODE, seed=3, node_id=old.info.node_id)
    source.end.connect(source.info, new.info)
    with pytest.raises(TransferFailed, match="incarnation"):
        source.end.open(old.grant(20))


def test_a_grant_of_an_unknown_node_is_refused(toy):
    source = toy.local(Role.PREFILL)
    with pytest.raises(TransferFailed, match="is not connected"):
        source.end.open(toy.local(Role.DECODE).grant(20))


def test_nothing_is_written_after_the_lease(toy):
    clock = Clock()
    source, target = toy.pair(clock=clock)
    grant, before = target.grant(40, lease_s=5.0), target.bytes()
    runs = source.page_runs(40)
    source.end.open(grant)
    clock.now_s = 5.0
    with pytest.raises(TransferFailed, match="lease of 5.0 s ended"):
        source.end.send(grant, runs, 0, 16)
    with pytest.raises(TransferFailed, match="lease"):
        source.end.send(grant, runs, 0, 32)
    assert all(torch.equal(pool.tensor, before[name]) for name, pool in target.pools.items())
    assert target.end.poll() == [] and source.end.poll() == []  # the caller knows already


def test_a_grant_that_has_expired_on_its_way_is_refused(toy):
    clock = Clock()
    clock.now_s = 5.0
    source, target = toy.pair(clock=clock)
    grant = dataclasses.replace(target.grant(20, lease_s=30.0), expires_at=5.0)
    with pytest.raises(TransferFailed, match="reserve again"):
        source.end.open(grant)
    assert not source.end.in_flight(grant.grant_id)
    source.end.open(dataclasses.replace(grant, expires_at=5.1))


def test_nothing_is_posted_after_a_grants_expiry_but_progress_renews_it(toy):
    clock = Clock()
    source, target = toy.pair(clock=clock)
    early, late = (
        dataclasses.replace(target.grant(40, name, lease_s=5.0), expires_at=3.0)
        for name in ("early", "late")
    )
    runs = source.page_runs(40)
    for grant in (early, late):
        source.end.open(grant)
    clock.now_s = 2.0
    source.end.send(early, runs, 0, 16)
    source.end.poll()
    clock.now_s = 3.0
    source.end.send(early, runs, 16, 32)
    with pytest.raises(TransferFailed, match="lease"):
        source.end.send(late, runs, 0, 16)


def test_progress_renews_the_lease_from_when_it_was_posted(toy):
    clock = Clock()
    source, target = toy.pair(clock=clock)
    grant = target.grant(40, lease_s=5.0)
    runs = source.page_runs(40)
    source.end.open(grant)
    clock.now_s = 4.0
    source.end.send(grant, runs, 0, 16)
    clock.now_s = 4.5
    assert [t.seconds for t in source.end.poll()] == [0.5]
    clock.now_s = 8.9
    source.end.send(grant, runs, 16, 20)
    clock.now_s = 9.2  # from its completion the first lease would last until 9.5
    with pytest.raises(TransferFailed, match="lease"):
        source.end.send(grant, runs, 20, 24)


def test_what_was_never_seen_to_complete_renews_nothing(toy):
    clock = Clock()
    source, target = toy.pair(clock=clock)
    grant = target.grant(40, lease_s=5.0)
    runs = source.page_runs(40)
    source.end.open(grant)
    clock.now_s = 4.0
    source.end.send(grant, runs, 0, 16)
    clock.now_s = 4.5
    source.end.poll()
    clock.now_s = 8.0
    source.end.send(grant, runs, 16, 32)
    clock.now_s = 13.5  # the second post was never polled, so it renewed nothing
    with pytest.raises(TransferFailed, match="lease"):
        source.end.send(grant, runs, 32, 40, first_token=1)


def test_a_write_that_outlasts_the_lease_is_abandoned_and_counts_for_another_lease(toy):
    clock = Clock()
    source, target = toy.pair(kind=SlowTransport, clock=clock)
    grant = target.grant(20, lease_s=5.0)
    toy.deliver(source, grant, [20])
    assert source.end.poll() == []
    clock.now_s = 6.0
    [failed] = source.end.poll()
    assert failed.grant_id == grant.grant_id and "within the lease of 5.0 s" in str(failed.error)
    clock.now_s = 10.9
    assert source.end.poll() == [] and source.end.in_flight(grant.grant_id)
    clock.now_s = 11.0
    assert not source.end.in_flight(grant.grant_id)


def test_what_a_frozen_node_had_queued_is_abandoned_before_anything_moves_on(toy):
    class Queue(SlowTransport):
        def poll(self, handle):
            raise AssertionError("the transport moved on")

    clock = Clock()
    source, target = toy.pair(kind=Queue, clock=clock)
    toy.deliver(source, target.grant(20, lease_s=5.0), [20])
    clock.now_s = 60.0
    [failed] = source.end.poll()
    assert "frozen" in str(failed.error)


def test_after_an_abandoned_write_the_peer_is_loaded_again(toy):
    clock = Clock()
    source, target = toy.pair(kind=SlowTransport, clock=clock)
    toy.deliver(source, target.grant(20, "stuck", lease_s=5.0), [20])
    clock.now_s = 6.0
    source.end.poll()
    source.transport.outcome = True
    grant = target.grant(20, "next", epoch=2)
    target.end.expect(grant)
    toy.deliver(source, grant, [20])
    assert target.end.poll()[-1].first_token == 42 and not source.end.poll()[-1].error


def test_a_failed_write_is_reported_once_and_ends_the_grant(toy):
    source, target = toy.pair(kind=SlowTransport)
    grant = target.grant(40)
    runs = source.page_runs(40)
    source.end.open(grant)
    source.end.send(grant, runs, 0, 16)
    source.transport.outcome = TransferFailed("the peer is gone")
    assert [str(t.error) for t in source.end.poll()] == ["the peer is gone"]
    assert source.end.poll() == []
    with pytest.raises(TransferFailed, match="the peer is gone"):
        source.end.send(grant, runs, 16, 32)


def end_by_error(source, target):
    source.transport.outcome = TransferFailed("the peer is gone")
    source.end.poll()


def end_by_disconnect(source, target):
    source.end.disconnect(target.info.node_id)


def end_by_other_grants_error(source, target):
    """Another post on the same connection fails while this one's end is unknown."""
    polls = iter([False, TransferFailed("the peer is gone")])
    source.end.open(target.grant(20, "other"))
    source.end.send(target.grant(20, "other"), source.page_runs(20), 0, 16)

    def poll(handle):
        if isinstance(outcome := next(polls), Exception):
            raise outcome
        return outcome

    source.transport.poll = poll
    source.end.poll()


def end_by_new_incarnation(source, target):
    info = dataclasses.replace(target.info, incarnation="next")
    source.end.connect(source.info, info)


@pytest.mark.parametrize(
    "end",
    [end_by_error, end_by_disconnect, end_by_other_grants_error, end_by_new_incarnation],
    ids=lambda end: end.__name__,
)
def test_whatever_ends_a_post_but_completion_leaves_it_in_flight_for_a_lease(toy, end):
    clock = Clock()
    source, target = toy.pair(kind=CountingTransport, clock=clock)
    grant = target.grant(40, lease_s=5.0)
    toy.deliver(source, grant, [16])
    clock.now_s = 1.0
    end(source, target)
    clock.now_s = 5.9
    assert source.end.in_flight(grant.grant_id), "decode would use its pages again"
    assert not source.end.reads(grant.grant_id), "ours are free: what lands never counts"
    clock.now_s = 6.0
    assert not source.end.in_flight(grant.grant_id)
    source.end.close_grant(grant.grant_id)


def test_an_abandoned_write_loses_its_connection_once(toy):
    clock = Clock()
    source, target = toy.pair(kind=CountingTransport, clock=clock)
    for number in range(3):
        toy.deliver(source, target.grant(20, f"g{number}", lease_s=5.0), [20])
    clock.now_s = 6.0
    assert len(source.end.poll()) == 3 and source.end.poll() == []
    assert source.transport.disconnected == [target.transport.name]


def test_a_post_that_raises_fails_its_request_at_once_and_no_other(toy):
    source, target = toy.pair(kind=FlappingTransport)
    source.transport.post_fails = 1
    first, second = target.grant(20, "first", epoch=1), target.grant(20, "second", epoch=2)
    target.end.expect(second)
    started = time.monotonic()
    with pytest.raises(TransferFailed, match="the wire is cut"):
        toy.deliver(source, first, [20])
    assert time.monotonic() - started < 1.0
    assert not source.end.in_flight("first")
    toy.deliver(source, second, [20])  # the peer is loaded again on the way
    assert target.end.poll()[-1].first_token == 42


def test_a_post_that_raises_does_not_end_what_is_in_flight_for_others(toy):
    source, target = toy.pair(kind=FlappingTransport)
    grant = target.grant(20, "first")
    target.end.expect(grant)
    toy.deliver(source, grant, [20])
    source.transport.post_fails = 1
    with pytest.raises(TransferFailed, match="the wire is cut"):
        toy.deliver(source, target.grant(20, "second"), [20])
    assert [t.error for t in source.end.poll()] == [None]


def test_a_connection_that_broke_unnoticed_costs_no_request(toy):
    source, target = toy.pair(kind=FlappingTransport)
    source.transport.refusals = 1
    grant = target.grant(20)
    target.end.expect(grant)
    toy.deliver(source, grant, [20])
    assert target.end.poll()[-1].first_token == 42 and source.transport.connects == 2


def test_a_peer_that_is_gone_fails_a_request_after_two_connections(toy):
    source, target = toy.pair(kind=FlappingTransport)
    source.transport.refusals = 10
    with pytest.raises(TransferFailed, match="the wire is cut"):
        toy.deliver(source, target.grant(20), [20])
    assert source.transport.connects == 2 and not source.end.in_flight("grant")


class HoldingTransport(LocalTransport):
    """Holds what is posted until it is told an outcome: True, or how the connection is lost."""

    def __init__(self, name):
        super().__init__(name)
        self.outcome, self.connects, self.held, self.unreachable = False, 0, {}, False

    def post(self, peer, writes, notification):
        self.held[handle := next(self._handles)] = (peer, writes, notification)
        return handle

    def poll(self, handle):
        if isinstance(self.outcome, Exception):
            del self.held[handle]
            raise self.outcome
        if self.outcome:
            super().post(*self.held.pop(handle))
        return self.outcome

    def abandon(self, handle):
        del self.held[handle]

    def connect(self, address, *, expected=None):
        self.connects += 1
        if self.unreachable:
            raise TransferFailed("no route")
        return super().connect(address, expected=expected)


@pytest.mark.parametrize("layout", [{}, {"history": 48, "index": 16}], ids=["equal", "packed"])
def test_what_has_not_left_goes_again_on_new_connections_until_the_peer_gives_a_sign(toy, layout):
    source, target = toy.pair(toy.relaid(toy.SPECS, **layout), kind=HoldingTransport)
    grant, before = target.grant(20), target.bytes()
    target.end.expect(grant)
    runs = toy.deliver(source, grant, [16, 20])
    for number in range(2, 12):
        source.transport.outcome = NothingLeft("no sign", silent=True)
        assert source.end.poll() == [] and source.transport.connects == number
        assert len(source.transport.held) == 2, "each part once"
        source.transport.outcome = False
        source.end.poll()
    assert all(torch.equal(pool.tensor, before[name]) for name, pool in target.pools.items())
    source.transport.outcome = True
    assert [transfer.error for transfer in source.end.poll()] == [None] * 2
    assert target.end.poll()[-1].first_token == 42 and not source.end.in_flight(grant.grant_id)
    for spec in target.specs:
        for row in rows_to_receive(spec, 20):
            arrived = target.row(spec.name, grant.pages, row)
            assert torch.equal(arrived, source.row(spec.name, runs, row)), spec.name


def test_a_peer_that_refuses_two_connections_fails_the_grant_with_nothing_in_flight(toy):
    source, target = toy.pair(kind=HoldingTransport)
    grant = target.grant(20)
    toy.deliver(source, grant, [20])
    source.transport.outcome = NothingLeft("refused")
    assert source.end.poll() == []
    [failed] = source.end.poll()
    assert "refused" in str(failed.error) and not source.end.in_flight(grant.grant_id)
    source.end.close_grant(grant.grant_id)


def test_what_cannot_go_again_leaves_nothing_in_flight_and_its_memory_free(toy):
    clock = Clock()
    relaid = toy.relaid(toy.SPECS, history=48, index=16)
    source, target = toy.pair(relaid, kind=HoldingTransport, clock=clock)
    for number in range(2 * NUM_BAYS):
        grant = target.grant(20, f"g{number}")
        toy.deliver(source, grant, [20])
        source.transport.outcome = NothingLeft("no sign", silent=True)
        source.transport.unreachable = True
        [failed] = source.end.poll()
        assert "cannot be reached" in str(failed.error)
        assert not source.end.in_flight(grant.grant_id)
        source.end.close_grant(grant.grant_id)
        source.transport.outcome = source.transport.unreachable = False
        clock.now_s += RECONNECT_EVERY_S
    grant = target.grant(20)
    target.end.expect(grant)
    toy.deliver(source, grant, [20])
    source.transport.outcome = True
    source.end.poll()
    assert target.end.poll()[-1].first_token == 42


def test_a_failed_reconnect_costs_the_requests_of_that_moment(toy):
    clock = Clock()
    source, target = toy.pair(kind=FlappingTransport, clock=clock)
    source.transport.post_fails, source.transport.connect_fails = 1, 3
    outcomes = []
    for number in range(20):
        grant = target.grant(20, f"g{number}", number)
        target.end.expect(grant)
        try:
            toy.deliver(source, grant, [20])
            outcomes.append(target.end.poll()[-1].first_token)
        except TransferFailed:
            outcomes.append(None)
        source.end.poll()
        clock.now_s += RECONNECT_EVERY_S / 4
    assert outcomes == [None] * 13 + [42] * 7
    assert source.transport.connects == 1 + 3 + 1, "tried again, but not by every request"


def test_a_node_out_of_reach_when_it_was_met_is_reached_by_a_later_grant(toy):
    clock = Clock()
    source = toy.local(Role.PREFILL, seed=1, kind=FlappingTransport, clock=clock)
    target = toy.local(Role.DECODE, seed=2)
    source.transport.connect_fails = 1
    source.end.connect(source.info, target.info)
    clock.now_s = RECONNECT_EVERY_S
    grant = target.grant(20)
    target.end.expect(grant)
    toy.deliver(source, grant, [20])
    assert target.end.poll()[-1].first_token == 42


def test_a_replacement_that_cannot_work_leaves_the_old_peer_as_it_was(toy):
    source, target = toy.pair()
    for change in ({"agent": b"elsewhere"}, {"fingerprint": "other"}):
        with pytest.raises(IncompatiblePeers):
            info = changed_info(target, incarnation="next", **change)
            source.end.connect(source.info, info)
    grant = target.grant(20)
    target.end.expect(grant)
    toy.deliver(source, grant, [20])
    assert target.end.poll()[-1].first_token == 42


def test_what_waits_when_the_lease_ends_is_reported_as_failed(toy):
    clock = Clock()
    relaid = toy.relaid(toy.SPECS, history=48, index=16)
    source, target = toy.pair(relaid, kind=SlowTransport, clock=clock)
    held = [target.grant(40, f"g{number}", lease_s=30.0) for number in range(NUM_BAYS)]
    for grant in held:
        toy.deliver(source, grant, [40])
    waiting = target.grant(40, "waiting", lease_s=5.0)
    toy.deliver(source, waiting, [40])
    clock.now_s = 6.0
    source.transport.outcome = True
    failed = [t for t in source.end.poll() if t.error is not None]
    assert [t.grant_id for t in failed] == ["waiting"] and "lease" in str(failed[0].error)


@pytest.mark.parametrize("restarted", [False, True])
def test_losing_a_peer_fails_what_is_in_flight_to_it(toy, restarted):
    clock = Clock()
    source, target = toy.pair(kind=SlowTransport, clock=clock)
    grant = target.grant(20, lease_s=5.0)
    toy.deliver(source, grant, [20])
    if restarted:
        new = toy.local(Role.DECODE, node_id=target.info.node_id)
        source.end.connect(source.info, new.info)
    else:
        source.end.disconnect(target.info.node_id)
    [failed] = source.end.poll()
    assert isinstance(failed.error, TransferFailed)
    clock.now_s = 5.0
    source.end.close_grant(grant.grant_id)


def test_a_run_outside_the_peers_memory_is_refused(toy):
    source, target = toy.pair()
    grant = target.grant(20)
    pages = {t: type(r)(r.first, tuple(10_000 for _ in r.pages)) for t, r in grant.pages.items()}
    with pytest.raises(TransferFailed, match="pages that do not exist"):
        toy.deliver(source, PageGrant(**{**vars(grant), "pages": pages}), [20])


def test_a_peer_that_stays_away_fails_each_request_until_it_is_connected_again(toy):
    source, target = toy.pair()
    target.transport.close()
    for number in range(3):
        grant = target.grant(20, f"g{number}")
        with pytest.raises(TransferFailed):
            toy.deliver(source, grant, [20])
        source.end.close_grant(grant.grant_id)
    new = toy.local(Role.DECODE, seed=3, node_id=target.info.node_id)
    source.end.connect(source.info, new.info)
    grant = new.grant(20)
    new.end.expect(grant)
    toy.deliver(source, grant, [20])
    assert new.end.poll()[-1].first_token == 42


def test_nothing_moves_on_by_itself_beyond_the_first_lease_that_ends(toy):
    class Limited(SlowTransport):
        def move_until(self, deadline):
            self.deadline = deadline

    clock = Clock()
    source, target = toy.pair(kind=Limited, clock=clock)
    for number, lease_s in enumerate([5.0, 3.0, 9.0]):
        toy.deliver(source, target.grant(20, f"g{number}", lease_s=lease_s), [20])
    assert source.transport.deadline == 3.0
    clock.now_s = 2.0
    source.transport.outcome = True
    source.end.poll()
    assert source.transport.deadline == math.inf


def test_the_lease_is_checked_after_what_takes_time_and_before_the_post(toy):
    class TickingClock(Clock):
        def __call__(self):
            self.now_s += 1.0
            return self.now_s

    source, target = toy.pair(clock=TickingClock())
    grant, before = target.grant(20, lease_s=1.5), target.bytes()
    with pytest.raises(TransferFailed, match="lease"):
        toy.deliver(source, grant, [20])
    assert all(torch.equal(pool.tensor, before[name]) for name, pool in target.pools.items())
