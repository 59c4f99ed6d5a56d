"""The clock that leases run on, in prefill nodes and decode nodes alike."""

from __future__ import annotations

import sys
import time


def lease_clock() -> float:
    """Seconds since some moment; they pass while the host is suspended, too.

    `time.monotonic` stands still then (on Linux), so that a node would wake up believing leases
    that the others have long given up. Where there is no such clock this is `time.monotonic`.
    """
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()
