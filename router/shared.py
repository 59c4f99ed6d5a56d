"""Shared: an answer that takes work and is asked for by many, made for all of them at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Shared(Generic[T]):
    """Calls `make` for all who ask, at most once in `interval_s`.

    Nobody gets what was begun before they asked: they wait for their turn, together. In one event
    loop; whoever stops waiting takes the answer from nobody.
    """

    def __init__(self, make: Callable[[], Awaitable[T]], interval_s: float) -> None:
        self._make = make
        self._interval_s = interval_s
        self._next: asyncio.Task[T] | None = None  # of those who ask now
        self._last: asyncio.Task[T] | None = None
        self._begun = -interval_s

    async def get(self) -> T:
        """Raises what `make` raises."""
        if self._next is None:
            self._next = asyncio.create_task(self._turn(self._last))
        return await asyncio.shield(self._next)

    async def _turn(self, before: asyncio.Task[T] | None) -> T:
        if before is not None:
            await asyncio.wait({before})
        await asyncio.sleep(self._begun + self._interval_s - time.monotonic())
        self._begun = time.monotonic()
        self._last, self._next = self._next, None
        return await self._make()
