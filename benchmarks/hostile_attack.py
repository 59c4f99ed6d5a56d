"""A hostile client as a process of its own, so that its work does not hold up who measures."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection

from sluice.benchmarks.hostile_bodies import MARK, Requests
from sluice.benchmarks.hostile_inputs import INPUTS, Hostile
from sluice.benchmarks.load_client import allow_many_connections

GRACE_S = 30.0  # for the end of an attack
PREPARE_S = 120.0
UNANSWERED = "unanswered"  # what was still under way when the attack ended


class Attacker:
    """The process while it lives; it has built its requests and waits for the word."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    async def attack(self, seconds: float) -> Mapping[str, int]:
        """Attack for so long; how the attempts ended."""
        self._pipe.send(seconds)
        if not await asyncio.to_thread(self._pipe.poll, seconds + GRACE_S):
            return {f"attacker silent for {GRACE_S:g} s": 1}
        outcomes: Mapping[str, int] = self._pipe.recv()
        return outcomes


@contextmanager
def attacker(name: str, url: str, model: str) -> Iterator[Attacker]:
    """Start the process for one input and wait until it is ready; it ends with the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_main, args=(name, url, model, theirs), daemon=True)
    process.start()
    try:
        if not ours.poll(PREPARE_S):
            raise TimeoutError(f"{name}: the attacker was not ready within {PREPARE_S:g} s")
        ours.recv()
        yield Attacker(ours)
    finally:
        process.kill()
        process.join()


def _main(name: str, url: str, model: str, pipe: Connection) -> None:
    os.nice(10)  # it stands for another machine: what it computes is not to be felt
    allow_many_connections()
    hostile = INPUTS[name]
    requests = hostile.requests(model)
    pipe.send("ready")
    pipe.send(asyncio.run(attack(hostile, requests, url, pipe.recv())))


async def attack(hostile: Hostile, requests: Requests, url: str, seconds: float) -> Counter[str]:
    """Send the requests in turn over the input's connections; how the attempts ended."""
    outcomes: Counter[str] = Counter()

    async def one_after_another() -> None:
        while True:
            number = outcomes.total()
            outcomes[UNANSWERED] += 1
            outcome = await _attempt(
                hostile, numbered(requests[number % len(requests)], number), url
            )
            outcomes[UNANSWERED] -= 1
            outcomes[outcome] += 1
            await asyncio.sleep(hostile.pause_s)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one_after_another()) for _ in range(hostile.num_connections)]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
    return +outcomes


async def _attempt(hostile: Hostile, request: bytes, url: str) -> str:
    try:
        return await hostile.way(url, request)
    except OSError as error:
        return type(error).__name__


def numbered(request: bytes, number: int) -> bytes:
    """The request with its number where it has the mark, so that nothing kept of it helps."""
    return request.replace(MARK.encode(), b"%08d" % number) if MARK.encode() in request else request
