"""What SIGTERM does to a process of ours: it is asked to leave, and gone within a limit, for sure.

Ray's own handler begins a way out that waits for the actor's pending calls. Some of ours never end,
so such a process took no calls and did not go.
"""

from __future__ import annotations

import asyncio
import signal
from typing import Any, Self

from ray.actor import ActorClass

LIMIT_S = 30  # from SIGTERM to the end; Kubernetes waits for as long


class Leaving:
    """Base of our actors. SIGTERM sets `leaving`; a second one, or `limit_s`, ends the process."""

    limit_s = LIMIT_S
    _loop: asyncio.AbstractEventLoop | None = None

    def __new__(cls, *_: Any, **__: Any) -> Self:
        # Ray makes an actor on the process's main thread, the only one that may set handlers, and
        # runs everything else of it, __init__ too, on the actor's event loop. Who starts actors
        # makes an ActorClass of the class, which is derived from it.
        actor = super().__new__(cls)
        if not issubclass(cls, ActorClass):
            signal.signal(signal.SIGTERM, actor._on_sigterm)
        return actor

    def __init__(self) -> None:
        self.leaving = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def _on_sigterm(self, *_: object) -> None:
        # By the kernel, whatever the process is busy with then.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(self.limit_s)
        if self._loop is None:
            signal.raise_signal(signal.SIGTERM)  # there is nothing to finish yet
        else:
            self._loop.call_soon_threadsafe(self.leaving.set)
