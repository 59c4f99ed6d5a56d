"""merged: several streams as one, in the order in which their items come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def merged(
    streams: Sequence[AsyncGenerator[T, None]],
) -> AsyncGenerator[tuple[int, T], None]:
    """Items with the index of their stream; the first error ends all.

    Each stream is at most one item ahead of the reader. All are closed at the end, whatever it is.
    """
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as stream:
            async for item in stream:
                yield 0, item
        return
    waiting = {_next(stream): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                waiting[_next(streams[index])] = index
                yield index, item
    finally:
        for task in waiting:
            task.cancel()
        if waiting:
            await asyncio.wait(waiting)
        await asyncio.gather(*(stream.aclose() for stream in streams), return_exceptions=True)


def _next(stream: AsyncGenerator[T, None]) -> asyncio.Task[T]:
    return asyncio.create_task(_first(stream))


async def _first(stream: AsyncGenerator[T, None]) -> T:
    return await anext(stream)
