"""The garbage collector's pauses stop every stream of a process: keep them few and short."""

from __future__ import annotations

import atexit
import gc

# Objects made before the youngest are looked at. A step of 256 requests makes a thousand that live
# for one turn: Python's 700 would look at them several times, and find nothing.
YOUNG_OBJECTS = 50_000


def spare_streams() -> None:
    """Leave what lives by now out of all collections. Call it when all is loaded."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
    atexit.register(gc.unfreeze)  # at the end libraries look whether all they made is gone
