"""Intake: requests checked, and their matchers made, before a node's loop sees them.

Making a matcher takes as long as the client's schema has it, so requests with one go through a
thread of their own, one after the other; all others come at once. The thread gives way to the step
loop: it has a lower priority, and llguidance lets go of the interpreter while it works.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from sluice.engine.loop import LoopThread, promise
from sluice.engine.request import Request
from sluice.engine.runner import Runner
from sluice.protocol.messages import GenerateRequest, NodeLost

log = logging.getLogger(__name__)

NICENESS = 10  # on top of the process's own

T = TypeVar("T")


class Intake:
    """Between a node's callers and its loop. `take` may be called from any thread."""

    def __init__(self, runner: Runner, loop: LoopThread, name: str) -> None:
        self._runner = runner
        self._loop = loop
        self._compiler = ThreadPoolExecutor(1, f"{name}-intake", initializer=_give_way)

    def take(
        self, request: GenerateRequest, grant_id: str, work: Callable[[Request], T]
    ) -> Future[T]:
        """Run `work` on the loop thread with the request as the node will work on it.

        The future has what it returns or raises, or InvalidRequest for what the request asks.
        """
        result: Future[T] = promise()

        def prepare() -> None:
            try:
                state = self._runner.take(request, grant_id)
            except Exception as error:  # noqa: BLE001 - delivered to the caller
                result.set_exception(error)
            else:
                self._loop.call(lambda: work(state)).add_done_callback(_pass_to(result))

        if not (request.sampling.json_schema or request.sampling.grammar):
            prepare()
            return result
        try:
            self._compiler.submit(prepare)
        except RuntimeError:  # closed
            result.set_exception(NodeLost("the node is stopping"))
        return result

    def close(self) -> None:
        """Take no more; what waits still gets its answer, from a loop that has ended."""
        self._compiler.shutdown(wait=False)


def _pass_to(target: Future[T]) -> Callable[[Future[T]], None]:
    def done(source: Future[T]) -> None:
        if (error := source.exception()) is not None:
            target.set_exception(error)
        else:
            target.set_result(source.result())

    return done


def _give_way() -> None:
    """Lower the priority of this thread alone: on Linux each has its own."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    except OSError as error:  # not ours to set: it works all the same
        log.warning("event=no_priority thread=%s reason=%s", threading.current_thread().name, error)
