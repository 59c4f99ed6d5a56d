"""LoopThread: a node's step loop and the one queue into it.

Everything a node owns (manager, pools, transfers) is touched by its loop thread only. Other
threads hand it work with `call` and get a future; the loop runs that work between two steps.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from sluice.protocol.messages import NodeLost

T = TypeVar("T")
log = logging.getLogger(__name__)


def promise() -> Future[T]:
    """A future that its waiter cannot cancel: the loop will always be able to fulfil it."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    return future


def pass_failure(source: Future[None], target: Future[T]) -> None:
    """Done-callback that hands an exception of `source` on to `target`."""
    if (error := source.exception()) is not None:
        target.set_exception(error)


class LoopThread:
    """Runs `turn()` until stopped. `turn` returns how long it may wait for work, in seconds.

    0 means that there is more to do at once. An exception from `turn` is a bug: it is logged, the
    loop ends, and every later call fails with NodeLost.
    """

    def __init__(self, name: str, turn: Callable[[], float]) -> None:
        self._turn = turn
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the loop after its current step; pending calls fail with NodeLost."""
        self._stopping.set()
        self._inbox.put(lambda: None)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._drain()

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` on the loop thread; its result or exception arrives in the future."""
        future: Future[T] = promise()

        def run() -> None:
            if self._stopping.is_set():
                future.set_exception(NodeLost("the node is stopping"))
                return
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001 - delivered to the caller
                future.set_exception(error)

        self._inbox.put(run)
        if self._stopping.is_set():
            self._drain()
        return future

    def turn_here(self) -> float:
        """One turn in the caller's thread, of a loop that was never started: for tests."""
        assert self._thread.ident is None, "a started loop turns in its own thread"
        self._take(0.0)
        return self._turn()

    def _run(self) -> None:
        try:
            wait_s = 0.0
            while not self._stopping.is_set():
                self._take(wait_s)
                wait_s = self._turn()
        except Exception:
            log.exception("event=loop_failed thread=%s", self._thread.name)
            self._stopping.set()
        self._drain()

    def _take(self, wait_s: float) -> None:
        """Run what is in the inbox; wait up to `wait_s` for the first piece."""
        try:
            work = self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait()
            while True:
                work()
                work = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _drain(self) -> None:
        self._take(0.0)
