"""Waiting that ends: for an answer within a limit, for news within a limit."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable
from typing import NoReturn, TypeVar

from sluice.protocol.messages import NodeLost

T = TypeVar("T")


class News:
    """Wakes everybody who waits for a change.

    Take `next` first, then look, then wait for what you took: no change in between is missed.
    """

    def __init__(self) -> None:
        self.next = asyncio.Event()

    def spread(self) -> None:
        self.next.set()
        self.next = asyncio.Event()


async def within(limit_s: float, who: str, answer: Awaitable[T]) -> T:
    """Await an answer of another process. Raises NodeLost if it takes longer than `limit_s`.

    math.inf: for what takes as long as it takes, while something else watches the process.
    """
    try:
        async with asyncio.timeout(None if limit_s == math.inf else limit_s) as timeout:
            return await answer
    except TimeoutError:
        if not timeout.expired():
            raise
        raise NodeLost(f"{who} has not answered for {limit_s:g} s") from None


async def until(event: asyncio.Event, limit_s: float) -> None:
    """Return when the event is set, or after `limit_s`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await event.wait()


async def forever() -> NoReturn:
    """Never return: for what is run beside something else, whose end decides."""
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")
