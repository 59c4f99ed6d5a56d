"""A race of asyncio tasks: the first to end decides."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def first_of(*work: Coroutine[Any, Any, Any]) -> int:
    """Run all until one ends; cancel the others. Returns its index, or raises what it raised."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        winner = next(task for task in tasks if task in done)
        winner.result()
        return tasks.index(winner)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
