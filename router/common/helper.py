"""A helper process: takes functions over its standard input, a socket, until that closes.

Life:
 1. told its limit of memory and what to do first, it does that and says so
 2. for each job: sets an alarm, calls the function, answers with its value or its error
 3. ends when the socket does, or where a job reaches a limit: the alarm and a failed allocation end
    the process, whatever native code holds the interpreter

So it needs nobody to stop it, and outlives a router that was killed by one job at most.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import resource
import signal
import socket
import struct
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sluice.protocol.messages import SluiceError

LENGTH = struct.Struct("<Q")  # before each message
GARBAGE_THRESHOLDS = (100_000, 20, 20)  # a body of a million lists is no garbage
OUT_OF_MEMORY = 17  # exit status


def main() -> None:
    connection = socket.socket(fileno=os.dup(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the router, which closes us
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # rather we than a router or a node
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    max_bytes, niceness, *first = _receive(connection)
    os.nice(niceness)
    _send(connection, _answer(*first))
    _limit_memory(max_bytes)
    while True:
        limit_s, *job = _receive(connection)
        signal.setitimer(signal.ITIMER_PROF, limit_s)  # CPU time: a busy machine is nobody's fault
        answer = _answer(*job)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(connection, answer)


def _answer(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((function(*args), None, ""))
    except SluiceError as error:
        return pickle.dumps((None, error, ""))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except Exception:  # noqa: BLE001  # the router raises it again and logs it
        return pickle.dumps((None, None, traceback.format_exc()))


def _limit_memory(max_bytes: int) -> None:
    """Allow `max_bytes` more than there are now."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = num_pages * resource.getpagesize() + max_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _receive(connection: socket.socket) -> Any:
    """The next message, from the router, which we trust. Ends the process where there is none."""
    (num_bytes,) = LENGTH.unpack(_read(connection, LENGTH.size))
    return pickle.loads(_read(connection, num_bytes))


def _read(connection: socket.socket, num_bytes: int) -> bytearray:
    content = bytearray(num_bytes)
    view = memoryview(content)
    while view:
        try:
            num_read = connection.recv_into(view)
        except OSError:
            num_read = 0
        if num_read == 0:
            os._exit(0)
        view = view[num_read:]
    return content


def _send(connection: socket.socket, message: bytes) -> None:
    try:
        connection.sendall(LENGTH.pack(len(message)))
        connection.sendall(message)
    except OSError:
        os._exit(0)  # nobody is left to read it
