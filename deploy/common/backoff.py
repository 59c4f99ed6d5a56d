"""Backoff: how long to wait before something that failed is tried again."""

from __future__ import annotations

import asyncio

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 10.0


class Backoff:
    """Doubles the delay with each failure in a row."""

    def __init__(self) -> None:
        self.failures = 0
        self._pauses = 0

    @property
    def pausing(self) -> bool:
        """Whether somebody is inside `pause`: nothing should be tried until it ends."""
        return self._pauses > 0

    async def pause(self) -> None:
        """Count a failure and wait as long as it costs."""
        self.failures += 1
        delay_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (self.failures - 1))
        self._pauses += 1
        try:
            await asyncio.sleep(delay_s)
        finally:
            self._pauses -= 1

    def reset(self) -> None:
        self.failures = 0
