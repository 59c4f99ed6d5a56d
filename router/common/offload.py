"""Offload: work that a client can make long or large, in helper processes that may die of it.

Threads are no help where native code holds the interpreter, and cannot be given up. A helper can:
it works beside the event loop, within limits of CPU time and memory, and one that reaches a limit
is replaced, at the cost of its own job alone.

Life of an Offload:
 1. start: helpers are there, warm
 2. run, from any number of tasks of one event loop
 3. close, or the end of this process however it comes: no helper is left
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from sluice.protocol.messages import QueueFull, SluiceError, Unavailable
from sluice.router.common.background import Background
from sluice.router.common.events import log_event
from sluice.router.common.helper import LENGTH, OUT_OF_MEMORY

logger = logging.getLogger(__name__)

START_LIMIT_S = 60.0
GRACE_S = 1.0  # from the end of a helper's connection to the end of its process
MAX_ANSWER_BYTES = 64 << 20
COMMAND = (
    "import sys; sys.path[:] = sys.argv[1:]; from sluice.router.common.helper import main; main()"
)

P = ParamSpec("P")
T = TypeVar("T")


class GivenUp(SluiceError):
    """A job reached a limit of its helper: trying it again would end the same way."""

    code = "given_up"


class Overdue(GivenUp):
    """It had its time on the clock without taking its CPU time: the machine may be to blame."""


class Offload:
    """Helper processes for one kind of work.

    setup: called once in each helper before its first job, to import and load what jobs need; it
    counts towards no limit. max_bytes: memory that a job may take on top of that. max_waiting: jobs
    that may wait for a helper. niceness: how far they stand behind on a busy machine.
    """

    def __init__(
        self,
        num_processes: int,
        *,
        max_bytes: int,
        max_waiting: int,
        niceness: int = 0,
        setup: Callable[..., None] | None = None,
        setup_args: tuple[Any, ...] = (),
    ) -> None:
        first = (max_bytes, niceness, setup or _nothing, setup_args)
        self._helpers = [_Helper(pickle.dumps(first), max_bytes) for _ in range(num_processes)]
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._idle: asyncio.Queue[_Helper] = asyncio.Queue()  # they may still have to start
        for helper in self._helpers:
            self._idle.put_nowait(helper)
        self._background = Background(reports=False)  # whoever waits raises it, if anybody does
        self._closed = False

    async def start(self) -> None:
        """Start all helpers, which otherwise start with their first job.

        Raises what `setup` raises; then none is left.
        """
        helpers = [await self._idle.get() for _ in self._helpers]
        try:
            await asyncio.gather(*(helper.start() for helper in helpers))
        except BaseException:
            await self.close()
            raise
        for helper in helpers:
            self._idle.put_nowait(helper)

    async def run(self, function: Callable[P, T], *args: P.args, limit_s: float) -> T:  # type: ignore[valid-type]
        """`function(*args)`, which stops nobody.

        The function is found by its module's name; its value is plain data (numbers, text, bytes
        and lists, tuples, dicts of them). limit_s: of CPU time.
        Raises the SluiceErrors of protocol.messages that it raises; GivenUp if it reached a limit
        or ended its process; QueueFull if too many wait; RuntimeError for any other error in it.
        Cancelled, a waiting job is dropped, and a running one ends unheard.
        """
        if self._closed:
            raise _closed()
        if self._idle.empty() and self._num_waiting >= self._max_waiting:
            raise QueueFull(
                f"{self._num_waiting} requests wait for a helper process, which is as many as may; "
                "try again in a moment"
            )
        self._num_waiting += 1
        try:
            helper = await self._idle.get()
        finally:
            self._num_waiting -= 1
        work = self._background.spawn(self._work(helper, (limit_s, function, args), limit_s))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if work.cancelled():  # by `close`, not by whoever cancels us
                raise _closed() from None
            raise

    async def close(self) -> None:
        """End all helpers, and the jobs in them."""
        self._closed = True
        await self._background.drain(limit_s=0)
        for helper in self._helpers:
            await helper.stop()

    async def _work(self, helper: _Helper, job: tuple[Any, ...], limit_s: float) -> Any:
        if self._closed:
            raise _closed()
        try:
            return await helper.run(pickle.dumps(job), limit_s)
        finally:
            self._background.spawn(self._give_back(helper))

    async def _give_back(self, helper: _Helper) -> None:
        """A dead helper is replaced before the next job comes; if it cannot be, the job tries."""
        try:
            if not self._closed:
                await helper.start()
        except (OSError, SluiceError) as error:
            log_event(logger, "no_helper", level=logging.ERROR, reason=error)
        self._idle.put_nowait(helper)


class _Helper:
    """One helper process at a time, started where there is none. first: its first message."""

    def __init__(self, first: bytes, max_bytes: int) -> None:
        self._first = first
        self._max_bytes = max_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def start(self) -> None:
        """Return once it is ready; at once if it is."""
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.to_thread(_spawned, theirs)
        self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        try:
            async with asyncio.timeout(START_LIMIT_S):
                _value_of(await self._ask(self._first))
        except TimeoutError as error:
            await self.stop()
            raise Unavailable(
                f"a helper process was not ready within {START_LIMIT_S:g} s"
            ) from error
        except (asyncio.IncompleteReadError, OSError) as error:
            status = await self.stop(GRACE_S)
            raise Unavailable(f"a helper process ended as it started, status {status}") from error
        except BaseException:
            await self.stop()
            raise

    async def run(self, message: bytes, limit_s: float) -> Any:
        await self.start()
        try:
            async with asyncio.timeout(_patience_s(limit_s)):
                answer = await self._ask(message)
        except TimeoutError as error:
            await self.stop()
            raise Overdue(f"it was not done within {_patience_s(limit_s):g} s") from error
        except (asyncio.IncompleteReadError, OSError) as error:
            raise GivenUp(self._cause(await self.stop(GRACE_S), limit_s)) from error
        except BaseException:  # cancelled: nobody knows where it stands
            await self.stop()
            raise
        return _value_of(answer)

    async def stop(self, grace_s: float = 0.0) -> int | None:
        """End the process, if there is one. Its exit status, if it ends by itself in `grace_s`."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(AttributeError):  # cancelled before it was connected
            self._writer.close()
        try:
            return await asyncio.to_thread(process.wait, grace_s) if grace_s else None
        except subprocess.TimeoutExpired:
            return None
        finally:
            process.kill()
            await asyncio.shield(asyncio.to_thread(process.wait))

    async def _ask(self, message: bytes) -> bytes:
        self._writer.write(LENGTH.pack(len(message)))
        self._writer.write(message)
        await self._writer.drain()
        (num_bytes,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        if num_bytes > MAX_ANSWER_BYTES:
            raise OSError(f"an answer of {num_bytes} bytes")
        return await self._reader.readexactly(num_bytes)

    def _cause(self, status: int | None, limit_s: float) -> str:
        if status == -signal.SIGPROF:
            return f"it took more than {limit_s:g} s of CPU time"
        if status in (OUT_OF_MEMORY, -signal.SIGABRT, -signal.SIGKILL):
            return f"it took more than {self._max_bytes >> 20} MB of memory"
        if status is None:
            return f"its result is larger than {MAX_ANSWER_BYTES >> 20} MB"
        return f"it ended its process, status {status}"


def _spawned(connection: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *sys.path],
        stdin=connection.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # native code writes clients' texts there
    )


def _patience_s(limit_s: float) -> float:
    """How long to wait for `limit_s` of CPU time, in case something stands still."""
    return 10 * limit_s + 5


def _value_of(answer: bytes) -> Any:
    value, error, trace = _Plain(io.BytesIO(answer)).load()
    if error is not None:
        raise error
    if trace:
        raise RuntimeError(f"in a helper process:\n{trace}")
    return value


class _Plain(pickle.Unpickler):
    """Plain data and our own errors: code in a helper that was led astray gets no further."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "sluice.protocol.messages" and name.isidentifier():
            found = super().find_class(module, name)
            if isinstance(found, type) and issubclass(found, SluiceError):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} in the answer of a helper process")


def _closed() -> Unavailable:
    return Unavailable("the router is closing its helper processes; try another one, or later")


def _nothing() -> None:
    """Where there is nothing to set up."""
