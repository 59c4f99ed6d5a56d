"""The pump turns while there is something to move on, and sleeps otherwise."""

import threading

import pytest

from sluice.transfer.pump import Pump

WAIT_S = 10.0


class Turns:
    """Turns so many times for each wake-up, and tells when the last is done."""

    def __init__(self, num_turns):
        self.num_turns, self.left, self.total = num_turns, num_turns, 0
        self.done = threading.Event()

    def __call__(self):
        self.left, self.total = self.left - 1, self.total + 1
        if self.left <= 0:
            self.left = self.num_turns
            self.done.set()
            return False
        return True


@pytest.fixture
def start():
    pumps = []

    def make(turn):
        pumps.append(Pump("test", turn))
        pumps[-1].start()
        return pumps[-1]

    yield make
    for pump in pumps:
        pump.stop()


def test_it_turns_until_nothing_is_left_and_again_when_woken(start):
    turns = Turns(5)
    pump = start(turns)
    for total in (5, 10):
        pump.wake()
        assert turns.done.wait(WAIT_S)
        turns.done.clear()
        assert turns.total == total


def test_a_wake_up_during_a_turn_is_not_lost(start):
    entered, leave, again = threading.Event(), threading.Event(), threading.Event()

    def turn():
        if entered.is_set():
            again.set()
        entered.set()
        leave.wait(WAIT_S)
        return False

    pump = start(turn)
    pump.wake()
    assert entered.wait(WAIT_S)
    pump.wake()
    leave.set()
    assert again.wait(WAIT_S)


def test_it_stops_in_the_middle_and_twice_and_before_its_start(start):
    pump = start(lambda: True)
    pump.wake()
    pump.stop()
    pump.stop()
    Pump("never", lambda: True).stop()


def test_a_turn_that_raises_is_logged_and_ends_it(start, caplog):
    pump = start(lambda: 1 // 0)
    pump.wake()
    pump._thread.join(WAIT_S)
    assert "event=pump_failed" in caplog.text
