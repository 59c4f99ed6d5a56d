"""LoopThread: work runs between turns, failures reach the caller, nothing hangs at the end."""

import threading

import pytest

from sluice.engine.loop import LoopThread
from sluice.protocol.messages import NodeLost


def test_work_runs_on_the_loop_thread_and_wakes_it():
    loop = LoopThread("loop", lambda: 60.0)
    loop.start()
    assert loop.call(lambda: threading.current_thread().name).result(5) == "loop"
    loop.stop()


def test_an_exception_goes_to_the_caller_and_the_loop_goes_on():
    loop = LoopThread("loop", lambda: 60.0)
    loop.start()
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda: 1 // 0).result(5)
    assert loop.call(lambda: 7).result(5) == 7
    loop.stop()


def test_calls_after_the_end_fail_at_once():
    loop = LoopThread("loop", lambda: 60.0)
    loop.start()
    loop.stop()
    with pytest.raises(NodeLost):
        loop.call(lambda: 7).result(5)


def test_a_turn_that_raises_ends_the_loop_and_fails_later_calls():
    broken = threading.Event()

    def turn():
        broken.set()
        raise RuntimeError("bug")

    loop = LoopThread("loop", turn)
    loop.start()
    assert broken.wait(5)
    with pytest.raises(NodeLost):
        loop.call(lambda: 7).result(5)
