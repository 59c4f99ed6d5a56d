"""One answer for many: never older than the question, made no more often than it may."""

import asyncio
import time

import pytest

from sluice.router.shared import Shared


class Work:
    def __init__(self):
        self.begun = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def make(self):
        self.begun.append(time.monotonic())
        number = len(self.begun)
        await self.gate.wait()
        if number == 13:
            raise OSError("unlucky")
        return b"%d" % number


async def test_who_asks_while_it_is_made_gets_the_next_one_together():
    work = Work()
    shared = Shared(work.make, interval_s=0.0)
    work.gate.clear()
    first = asyncio.create_task(shared.get())
    while not work.begun:
        await asyncio.sleep(0)
    later = [asyncio.create_task(shared.get()) for _ in range(50)]
    await asyncio.sleep(0)
    work.gate.set()
    assert await first == b"1"
    assert {await each for each in later} == {b"2"}


async def test_it_is_not_made_more_often_than_it_may():
    work = Work()
    shared = Shared(work.make, interval_s=0.05)
    for _ in range(4):
        await shared.get()
    gaps = [b - a for a, b in zip(work.begun, work.begun[1:], strict=False)]
    assert len(gaps) == 3 and min(gaps) >= 0.049


async def test_who_leaves_takes_the_answer_from_nobody_and_a_fault_is_everybodys_once():
    work = Work()
    shared = Shared(work.make, interval_s=0.0)
    work.gate.clear()
    leaving, staying = (asyncio.create_task(shared.get()) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    work.gate.set()
    assert await staying == b"1"
    for _ in range(11):
        await shared.get()
    both = await asyncio.gather(shared.get(), shared.get(), return_exceptions=True)
    assert all(isinstance(each, OSError) for each in both)
    assert await shared.get() == b"14"
    with pytest.raises(asyncio.CancelledError):
        await leaving
