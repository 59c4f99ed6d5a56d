"""Pump: a thread that moves a transport on while nobody polls it.

Over TCP bytes move, and a notification leaves, only when somebody calls the transport, and a node's
loop does so between two steps, which may take a second. The pump calls it every millisecond, and
only while something is in flight or expected; torch gives the interpreter to it within a step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

PUMP_S = 0.001


class Pump:
    """Calls `turn` every `PUMP_S` from `wake` on, until it returns False."""

    def __init__(self, name: str, turn: Callable[[], bool]) -> None:
        self._turn = turn
        self._awake, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{name}.pump", daemon=True)

    def wake(self) -> None:
        """There may be something to move on. May be called from any thread, and at any time."""
        if not self._awake.is_set():
            self._awake.set()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; stopping twice, or before the start, is allowed."""
        self._stopping.set()
        self._awake.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._awake.wait()
                self._awake.clear()
                while not self._stopping.is_set() and self._turn():
                    self._stopping.wait(PUMP_S)
        except Exception:
            log.exception("event=pump_failed thread=%s", self._thread.name)
