"""Tasks that must outlive whoever started them, such as giving a grant back after a cancel."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger(__name__)


class Background:
    """Keeps tasks referenced until they end and reports the ones that failed.

    reports: not where whoever waits for a task is told of its failure.
    """

    def __init__(self, *, reports: bool = True) -> None:
        self._reports = reports
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and self._reports:
            logger.error("event=background_task_failed", exc_info=error)

    async def drain(self, limit_s: float) -> None:
        """Wait for what runs; what takes longer than `limit_s` is cancelled."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(set(self._tasks), timeout=limit_s)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
