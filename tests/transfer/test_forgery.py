"""Forged, doubled and damaged messages: no exception, no byte outside the grant, no completion."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.protocol.messages import Role
from sluice.transfer.envelope import seal
from sluice.transfer.notification import KIND, MAX_CHUNKS, Notification
from sluice.transfer.offer import KIND as OFFER
from sluice.transfer.offer import Answer, Offer
from sluice.transfer.plan import ByteRuns, Copy, rows_to_receive

NUM_TOKENS = 37
FUZZ = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


class World:
    """A pair, and what a genuine request between the two puts on the wire."""

    def __init__(self, toy, mode, layout):
        self.toy, self.number = toy, 0
        self.source, self.target = toy.pair(toy.relaid(toy.SPECS, **layout), mode=mode)

    def request(self):
        """A grant that is expected, the pages sent from, and the message of its only chunk."""
        self.number += 1
        grant = self.target.grant(NUM_TOKENS, f"g{self.number:06}", self.number)
        self.target.end.expect(grant)
        pages = self.toy.deliver(self.source, grant, [NUM_TOKENS])
        [(sender, message)] = self.target.transport.notifications()
        return grant, pages, sender, message

    def hear(self, sender, *messages):
        """What decode makes of them, reads that follow included."""
        for message in messages:
            self.target.transport._inbox.put((sender, message))
        return [*self.target.end.poll(), *self.target.end.poll()]

    def check_completes(self, grant, pages, sender, message):
        """The genuine message still does what it should."""
        [arrival] = self.hear(sender, message)
        assert arrival.first_token == 42 and arrival.error is None
        for spec in self.target.specs:
            for row in rows_to_receive(spec, NUM_TOKENS):
                arrived = self.target.row(spec.name, grant.pages, row)
                assert torch.equal(arrived, self.source.row(spec.name, pages, row)), spec.name
        self.source.end.poll()


@pytest.fixture(params=[{}, {"history": 48, "index": 16}], ids=["equal", "packed"])
def reading(toy, request):
    return World(toy, "read", request.param)


@pytest.fixture
def writing(toy):
    return World(toy, "write", {})


def same_bytes(side, before):
    return all(torch.equal(pool.tensor, before[name]) for name, pool in side.pools.items())


def pick(data, length):
    """An index; what is drawn does not depend on the length, which depends on where pages lie."""
    return data.draw(st.integers(0, 1 << 20)) % length


def shifted(copies, data):
    """One run lands elsewhere, or is longer or shorter."""
    index = pick(data, len(copies))
    numbers = np.stack([*vars(copies[index].runs).values()])
    column = pick(data, numbers.shape[1])
    field = data.draw(st.sampled_from([1, 2]))
    delta = data.draw(st.sampled_from([-1, 1, -64, 64, 4096]) | st.integers(1, 1 << 20))
    numbers[field, column] = max(field - 1, numbers[field, column] + delta)
    copies[index] = dataclasses.replace(copies[index], runs=ByteRuns(*numbers))


def dropped(copies, data):
    copies.pop(pick(data, len(copies)))


def doubled(copies, data):
    copies.append(copies[pick(data, len(copies))])


def added(copies, data):
    """A run of its own into any pool."""
    targets = [*(copy.target for copy in copies), "nowhere"]
    target = targets[pick(data, len(targets))]
    numbers = [[data.draw(st.integers(0, 1 << 14))] for _ in range(3)]
    numbers[2][0] += 1
    copies.append(Copy(copies[0].source, target, ByteRuns(*np.array(numbers))))


def exchanged(copies, data):
    """Two pools' runs land in each other's."""
    one, other = (pick(data, len(copies)) for _ in range(2))
    names = copies[one].target, copies[other].target
    copies[other] = dataclasses.replace(copies[other], target=names[0])
    copies[one] = dataclasses.replace(copies[one], target=names[1])


@FUZZ
@given(st.data())
def test_an_offer_that_does_not_lie_just_in_its_grant_is_declined_and_changes_nothing(
    reading, data
):
    grant, pages, sender, message = reading.request()
    offer = Offer.decode(message)
    copies = list(offer.copies)
    change = data.draw(st.sampled_from([shifted, dropped, doubled, added, exchanged]))
    change(copies, data)
    before, dropped_before = reading.target.bytes(), sum(reading.target.end.dropped.values())
    forged = dataclasses.replace(offer, copies=copies).encode()
    if forged != message:  # as it is where a pool is exchanged with itself
        assert reading.hear(sender, forged) == [] and same_bytes(reading.target, before)
        assert sum(reading.target.end.dropped.values()) == dropped_before + 1
    reading.check_completes(grant, pages, sender, message)


def test_an_offer_of_the_whole_pool_beside_its_rows_writes_nothing(reading):
    _, _, sender, message = reading.request()
    offer = Offer.decode(message)
    everything = ByteRuns(*np.array([[0], [0], [reading.source.pools["history"].num_bytes // 2]]))
    forged = dataclasses.replace(
        offer, copies=[*offer.copies, Copy("history", "history", everything)]
    )
    before = reading.target.bytes()
    assert reading.hear(sender, forged.encode()) == []
    assert same_bytes(reading.target, before)
    assert reading.target.end.dropped == {"misplaced": 1}


def test_rows_beyond_the_grants_are_not_read(reading):
    grant, pages, sender, message = reading.request()
    offer = Offer.decode(message)
    note = Notification.decode(offer.notification)
    rows = {**note.rows, "history": range(1 << 30)}
    forged = dataclasses.replace(offer, notification=dataclasses.replace(note, rows=rows).encode())
    before = reading.target.bytes()
    assert reading.hear(sender, forged.encode()) == [] and same_bytes(reading.target, before)
    reading.check_completes(grant, pages, sender, message)


def test_runs_outside_the_offered_memory_are_refused(reading):
    _, _, sender, message = reading.request()
    offer = Offer.decode(message)
    copies = list(offer.copies)
    numbers = np.stack([*vars(copies[0].runs).values()])
    numbers[0] += 1 << 40
    copies[0] = dataclasses.replace(copies[0], runs=ByteRuns(*numbers))
    before = reading.target.bytes()
    forged = dataclasses.replace(offer, copies=copies).encode()
    [arrival] = reading.hear(sender, forged)
    assert arrival.first_token is None and arrival.error is not None
    assert same_bytes(reading.target, before)


def test_an_offer_that_comes_twice_is_read_once_and_answered_once(reading):
    _, _, sender, message = reading.request()
    arrivals = reading.hear(sender, message, message)
    assert [arrival.first_token for arrival in arrivals] == [42]
    assert reading.target.end.dropped == {"duplicate": 1}
    assert [transfer.error for transfer in reading.source.end.poll()] == [None]


def test_nobody_answers_an_offer_that_he_was_not_sent(reading):
    grant, _, _, _ = reading.request()
    for number in range(100):
        answer = (reading.target.transport.name, Answer(number).encode())
        reading.source.transport._inbox.put(answer)
    assert reading.source.end.poll() == [] and reading.source.end.in_flight(grant.grant_id)


@FUZZ
@given(st.data())
def test_arbitrary_and_damaged_bytes_change_nothing(writing, data):
    grant, pages, sender, message = writing.request()
    damaged = bytearray(message)
    damaged[pick(data, len(message))] ^= data.draw(st.integers(1, 255))
    noise = data.draw(st.binary(max_size=200))
    head = data.draw(st.sampled_from([b"", f"{KIND} ".encode(), f"{OFFER} ".encode()]))
    before = writing.target.bytes()
    assert writing.hear(sender, bytes(damaged), head + noise, message[:-1], message * 2) == []
    assert same_bytes(writing.target, before)
    writing.check_completes(grant, pages, sender, message)


@FUZZ
@given(st.data())
def test_a_sealed_notification_with_other_fields_never_completes_a_grant(writing, data):
    grant, _, sender, message = writing.request()
    note = Notification.decode(message)
    other = data.draw(
        st.fixed_dictionaries(
            {},
            optional={
                "grant_id": st.text(max_size=3),
                "epoch": st.integers(-1, 1 << 64),
                "chunk": st.integers(-1, 1 << 40),
                "last": st.booleans(),
                "first_token": st.none() | st.integers(-1, 1 << 40),
                "rows": st.dictionaries(
                    st.sampled_from([*note.rows, "x"]),
                    st.tuples(st.integers(-1, 50), st.integers(-1, 50)).map(lambda r: range(*r)),
                ),
            },
        )
    )
    forged = dataclasses.replace(note, **other)
    same = forged.rows == note.rows and forged.chunk == 0 and forged.grant_id == grant.grant_id
    arrivals = writing.hear(sender, forged.encode())
    completed = [arrival for arrival in arrivals if arrival.first_token is not None]
    assert not completed or (same and forged.epoch == note.epoch)


def test_a_huge_chunk_number_costs_nothing(writing):
    _, _, sender, message = writing.request()
    huge = dataclasses.replace(Notification.decode(message), chunk=MAX_CHUNKS - 1)
    assert [arrival.first_token for arrival in writing.hear(sender, huge.encode())] == [None]
    beyond = seal(KIND, {"chunk": 1 << 200})
    assert writing.hear(sender, beyond) == []


@pytest.mark.parametrize("mode", ["write", "read"])
def test_chunks_of_a_second_sender_never_complete_a_grant(toy, mode):
    source, target = toy.pair(mode=mode)
    intruder = toy.local(Role.PREFILL, seed=9, mode=mode)
    intruder.end.connect(intruder.info, target.info)
    grant = target.grant(40)
    target.end.expect(grant)
    pages = source.page_runs(40)
    source.end.open(grant)
    source.end.send(grant, pages, 0, 16)
    toy.wait_for(bool, target)
    toy.deliver(intruder, grant, [16, 40])
    assert [*target.end.poll(), *target.end.poll()] == []
    assert target.end.dropped == {"other_sender": 2}
    source.end.send(grant, pages, 16, 40, first_token=42)
    [arrival] = toy.wait_for(bool, target)
    assert arrival.first_token == 42


@pytest.mark.parametrize("mode", ["write", "read"])
def test_what_another_sender_says_without_the_epoch_neither_completes_nor_fails_a_grant(toy, mode):
    source, target = toy.pair(mode=mode)
    intruder = toy.local(Role.PREFILL, seed=9)
    intruder.end.connect(intruder.info, target.info)
    grant = target.grant(40)
    target.end.expect(grant)
    for epoch in (0, 2, (1 << 63) - 1):
        guess = dataclasses.replace(grant, epoch=epoch, pages=target.page_runs(40, start=40))
        toy.deliver(intruder, guess, [16, 40])
        intruder.end.poll()
        intruder.end.close_grant(grant.grant_id)
    assert target.end.poll() == [] and target.end.dropped == {"wrong_epoch": 6}
    toy.deliver(source, grant, [40])
    [arrival] = toy.wait_for(bool, target)
    assert arrival.first_token == 42


def test_chunks_with_a_gap_fail_the_grant_although_all_rows_are_here(toy):
    source, target = toy.pair()
    grant = target.grant(NUM_TOKENS)
    target.end.expect(grant)
    toy.deliver(source, grant, [16, NUM_TOKENS])
    [(sender, first), (_, last)] = target.transport.notifications()
    renumbered = dataclasses.replace(Notification.decode(first), chunk=5).encode()
    for message in (renumbered, last):
        target.transport._inbox.put((sender, message))
    [progress, failed] = target.end.poll()
    assert progress.error is None and "chunk 5 arrived of 2" in failed.error
