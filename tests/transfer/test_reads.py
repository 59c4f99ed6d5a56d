"""READ mode: what is offered stays as it is while it may be read; a late read never counts."""

import dataclasses

import pytest
import torch

from sluice.protocol.messages import Role, TransferFailed
from sluice.transfer.envelope import Malformed
from sluice.transfer.local_transport import LocalTransport
from sluice.transfer.notification import Notification
from sluice.transfer.offer import KIND, Answer, Offer
from sluice.transfer.offers import Declined
from sluice.transfer.outgoing import UNHEARD_LEASES
from sluice.transfer.plan import rows_to_receive
from sluice.transfer.reads import FORGET_AFTER_S
from sluice.transfer.transport import NothingLeft

LEASE_S = 5.0


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


class ReaderTransport(LocalTransport):
    """Ends its reads as it is told: True, False for not yet, or an error."""

    outcome = True

    def __init__(self, name):
        super().__init__(name)
        self.reading, self.disconnected = set(), []

    def read(self, peer, reads, notification):
        handle = super().read(peer, reads, notification)
        self.reading.add(handle)
        return handle

    def poll(self, handle):
        if handle in self.reading and isinstance(self.outcome, Exception):
            raise self.outcome
        return handle not in self.reading or self.outcome

    def disconnect(self, peer):
        self.disconnected.append(peer)
        super().disconnect(peer)


@pytest.fixture
def clocks():
    return Clock(), Clock()


@pytest.fixture
def pair(toy, clocks):
    """A sender that offers and a receiver that reads, each with its clock."""
    source = toy.local(Role.PREFILL, seed=1, mode="read", clock=clocks[0])
    target = toy.local(Role.DECODE, seed=2, kind=ReaderTransport, clock=clocks[1])
    source.end.connect(source.info, target.info)
    return source, target


def offered(toy, source, target, grant_id="grant", epoch=1):
    """A grant that is expected and whose rows have been offered; with the source's pages."""
    grant = target.grant(20, grant_id, epoch, lease_s=LEASE_S)
    target.end.expect(grant)
    return grant, toy.deliver(source, grant, [20])


def check_goes_on(toy, source, target):
    """The next request arrives whole."""
    target.transport.outcome = True
    grant, runs = offered(toy, source, target, "next", epoch=99)
    polled = toy.wait_for(
        lambda items: len([i for i in items if i.grant_id == "next"]) == 2, source, target
    )
    assert [item.error for item in polled if item.grant_id == "next"] == [None, None]
    check_rows(source, runs, target, grant)


def check_rows(source, runs, target, grant):
    for spec in target.specs:
        for row in rows_to_receive(spec, grant.num_tokens):
            arrived = target.row(spec.name, grant.pages, row)
            assert torch.equal(arrived, source.row(spec.name, runs, row)), (spec.name, row)


@pytest.mark.parametrize("given_up", ["overdue", "disconnected"])
def test_pages_of_an_offer_without_an_answer_are_kept_until_no_read_can_count(
    toy, pair, clocks, given_up
):
    source, target = pair
    grant, _ = offered(toy, source, target)
    clocks[0].now_s = at = LEASE_S if given_up == "overdue" else 1.0
    if given_up == "disconnected":
        source.end.disconnect(target.info.node_id)
    [failed] = source.end.poll()
    assert isinstance(failed.error, TransferFailed)
    clocks[0].now_s = at + UNHEARD_LEASES * LEASE_S - 0.1
    assert source.end.in_flight(grant.grant_id)
    clocks[0].now_s += 0.1
    assert not source.end.in_flight(grant.grant_id)


def test_an_offer_that_broke_on_its_way_may_have_been_heard(toy, pair):
    source, target = pair
    grant, _ = offered(toy, source, target)

    def broken(handle):
        raise TransferFailed("the cable is cut")

    source.transport.poll = broken
    [failed] = source.end.poll()
    assert "cable" in str(failed.error) and source.end.in_flight(grant.grant_id)


def test_a_read_that_outlasts_the_lease_never_counts_and_its_sender_hears_of_it(toy, pair, clocks):
    source, target = pair
    target.transport.outcome = False
    offered(toy, source, target)
    assert target.end.poll() == []
    clocks[1].now_s = LEASE_S
    target.transport.outcome = True
    [arrival] = target.end.poll()
    assert "within the lease" in arrival.error and arrival.first_token is None
    check_goes_on(toy, source, target)


def test_what_a_frozen_reader_had_queued_is_cut_off_before_anything_moves_on(toy, pair, clocks):
    source, target = pair
    target.transport.outcome = False
    offered(toy, source, target)
    target.end.poll()
    clocks[1].now_s = 60.0
    target.transport.outcome = AssertionError("the transport moved on")
    [arrival] = target.end.poll()
    assert "frozen" in arrival.error


def test_a_read_that_fails_fails_the_grant_at_once_on_both_sides(toy, pair):
    source, target = pair
    target.transport.outcome = TransferFailed("the cable is cut")
    grant, _ = offered(toy, source, target)
    [arrival] = toy.wait_for(bool, target)
    assert "cable" in arrival.error and target.end.failed == 1
    [failed] = source.end.poll()
    assert isinstance(failed.error, Declined) and not source.end.in_flight(grant.grant_id)
    check_goes_on(toy, source, target)


def test_reads_whose_connection_is_lost_once_begin_again_on_a_new_one(toy, pair):
    source, target = pair
    target.transport.outcome = False
    sent = [offered(toy, source, target, f"g{number}", epoch=number) for number in range(3)]
    target.end.poll()
    target.transport.outcome = TransferFailed("the cable is cut")
    assert target.end.poll() == []
    target.transport.outcome = True
    assert [arrival.first_token for arrival in target.end.poll()] == [42] * 3
    check_rows(source, sent[-1][1], target, sent[-1][0])  # the others' pages may be its own, too


def test_a_connection_that_is_found_lost_before_a_read_costs_nothing(toy, pair):
    source, target = pair
    whole, left = target.transport.read, [NothingLeft("lost")]

    def read(*arguments):
        if left:
            raise left.pop()
        return whole(*arguments)

    target.transport.read = read
    check_goes_on(toy, source, target)


def test_a_failure_cuts_off_every_read_from_the_same_sender(toy, pair):
    source, target = pair
    target.transport.outcome = False
    for number in range(3):
        offered(toy, source, target, f"g{number}", epoch=number)
    target.end.poll()
    target.transport.outcome = TransferFailed("the cable is cut")
    arrivals = toy.wait_for(lambda polled: len(polled) == 3, target)
    assert all("cable" in arrival.error for arrival in arrivals)
    assert target.transport.disconnected == [source.transport.name] * 2, "each was begun twice"
    check_goes_on(toy, source, target)


@pytest.mark.parametrize("gone", ["retire", "forget"])
def test_what_is_offered_to_a_grant_given_up_is_declined_at_once_and_not_read(toy, pair, gone):
    source, target = pair
    check_goes_on(toy, source, target)
    grant, _ = offered(toy, source, target)
    before = target.bytes()
    getattr(target.end, gone)(grant.grant_id)
    assert target.end.poll() == [] and target.end.dropped == {"unknown_grant": 1}
    [failed] = source.end.poll()
    assert "unknown_grant; reserve again" in str(failed.error)
    assert not source.end.in_flight(grant.grant_id)
    assert all(torch.equal(pool.tensor, before[name]) for name, pool in target.pools.items())


def test_nobody_is_connected_to_who_does_not_know_a_grants_epoch(toy, pair):
    source, target = pair
    grant, _ = offered(toy, source, target)
    [(sender, message)] = target.transport.notifications()
    offer = Offer.decode(message)
    note = Notification.decode(offer.notification)
    for changes in ({"epoch": 2}, {"grant_id": "other"}):
        forged = dataclasses.replace(note, **changes).encode()
        forged = dataclasses.replace(offer, notification=forged).encode()
        target.transport._inbox.put((sender, forged))
    assert target.end.poll() == [] and target.end.dropped == {"wrong_epoch": 1, "unknown_grant": 1}
    assert not target.transport._peers and source.end.in_flight(grant.grant_id)


def test_a_grant_given_up_during_its_read_never_completes(toy, pair):
    source, target = pair
    target.transport.outcome = False
    grant, _ = offered(toy, source, target)
    target.end.poll()
    target.end.retire(grant.grant_id)
    target.transport.outcome = True
    [arrival] = target.end.poll()
    assert arrival.retired and arrival.first_token is None


def test_what_is_read_for_a_grant_that_is_forgotten_is_cut_off(toy, pair):
    source, target = pair
    target.transport.outcome = False
    grant, _ = offered(toy, source, target)
    target.end.poll()
    target.end.forget(grant.grant_id)
    assert target.transport.disconnected == [source.transport.name]
    target.transport.outcome = True
    assert target.end.poll() == []
    check_goes_on(toy, source, target)


def test_staging_memory_of_an_abandoned_offer_is_not_used_again_while_it_may_be_read(toy, clocks):
    relaid = toy.relaid(toy.SPECS, history=48, index=16)
    source = toy.local(Role.PREFILL, seed=1, mode="read", clock=clocks[0])
    late, other = (toy.local(Role.DECODE, relaid, seed=seed) for seed in (2, 3))
    for side in (late, other):
        source.end.connect(source.info, side.info)
    grant, runs = offered(toy, source, late)
    clocks[0].now_s = LEASE_S
    source.end.poll()
    for number in range(20):  # more than there are bays
        second, _ = offered(toy, source, other, f"g{number}", epoch=number)
        toy.wait_for(lambda _, g=second: not source.end.in_flight(g.grant_id), source, other)
    toy.wait_for(bool, late)
    check_rows(source, runs, late, grant)


def test_an_offer_of_memory_that_does_not_exist_fails_its_grant_alone(toy, pair):
    source, target = pair
    offered(toy, source, target)
    [(sender, message)] = target.transport.notifications()
    offer = Offer.decode(message)
    copies = [dataclasses.replace(copy, source="nowhere") for copy in offer.copies]
    target.transport._inbox.put((sender, dataclasses.replace(offer, copies=copies).encode()))
    target.end.poll()
    [arrival] = target.end.poll()
    assert "no memory is named 'nowhere'" in arrival.error
    check_goes_on(toy, source, target)


def test_an_offer_in_anothers_name_is_not_read_and_costs_the_grant_nothing(toy, pair):
    source, target = pair
    grant, runs = offered(toy, source, target)
    [(sender, message)] = target.transport.notifications()
    target.transport._inbox.put(("somebody", message))
    assert target.end.poll() == [] and target.end.dropped == {"other_address": 1}
    target.transport._inbox.put((sender, message))
    [arrival] = toy.wait_for(bool, target)
    assert arrival.first_token == 42
    check_rows(source, runs, target, grant)


@pytest.mark.parametrize("rest", [b"", b"\xff", b"{}", b"[1]", b'[1,"","",[1]]', b'["a","",[],""]'])
def test_garbage_is_dropped_on_either_side(toy, pair, rest):
    source, target = pair
    target.transport._inbox.put(("nobody", KIND.encode() + b" " + rest))
    assert target.end.poll() == [] and target.end.dropped == {"malformed": 1}
    grant, _ = offered(toy, source, target)
    source.transport._inbox.put((target.transport.name, rest))
    source.transport._inbox.put(("nobody", Answer(1).encode()))
    assert source.end.poll() == [] and source.end.in_flight(grant.grant_id)
    with pytest.raises(Malformed):
        Answer.decode(rest)


def test_a_sender_that_has_long_been_silent_is_forgotten_when_another_comes(toy, pair, clocks):
    source, target = pair
    check_goes_on(toy, source, target)
    clocks[1].now_s = FORGET_AFTER_S + 1
    restarted = toy.local(Role.PREFILL, seed=4, mode="read", clock=clocks[0])
    restarted.end.connect(restarted.info, target.info)
    offered(toy, restarted, target, "other", epoch=2)
    toy.wait_for(bool, target)
    assert target.transport.disconnected == [source.transport.name]
