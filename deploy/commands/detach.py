"""Starts a supervisor in a session of its own and waits until it is ready; ends it by signal."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from sluice.deploy.common import state
from sluice.deploy.common.reporting import EXIT_CONFIG
from sluice.protocol.messages import ConfigError, NodeError

POLL_S = 0.1
AT_ONCE_LIMIT_S = 45.0  # for a supervisor that was told to end everything at once
KILL_LIMIT_S = 10.0  # for the kernel to end it

Say = Callable[[str], None]


def start(
    namespace: str, up_arguments: Sequence[str], say: Say = lambda _: None
) -> state.Deployment:
    """Run `sluice up` with these arguments in the background; returns once it is ready.

    say: gets what processes wait for that cannot be started for now. Raises ConfigError or
    NodeError with what it said if it ends instead.
    """
    state.own_folder(namespace)
    log = state.log_file(namespace)
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "sluice.deploy.cli", "up", *up_arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        said = ""
        while process.poll() is None:
            found = state.find(namespace)
            if found is not None and found.pid == process.pid:
                if found.ready:
                    return found
                if found.waits_for != said:
                    say(said := found.waits_for)
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(AT_ONCE_LIMIT_S)
        process.kill()  # if it is there still; Ray ends what it had started
        raise
    last_words = log.read_text(errors="replace").rpartition("error: ")[2].strip()
    raise (ConfigError if process.returncode == EXIT_CONFIG else NodeError)(last_words)


def stop(deployment: state.Deployment, timeout_s: float, say: Say = lambda _: None) -> None:
    """End the deployment: running streams may finish for `timeout_s`, then all ends at once.

    say: gets a line for each harder step. Raises NodeError if even the kernel cannot end it.
    """
    where = f"deployment {deployment.namespace!r} (pid {deployment.pid})"
    steps = (
        (signal.SIGTERM, timeout_s, ""),
        (
            signal.SIGTERM,  # its second: it stops waiting for anything
            AT_ONCE_LIMIT_S,
            f"{where} did not end within {timeout_s:g} s; its processes are ended at once",
        ),
        (
            signal.SIGKILL,
            KILL_LIMIT_S,
            f"{where} does not end by itself; it is killed, and Ray ends what it had started",
        ),
    )
    for number, limit_s, words in steps:
        if words:
            say(words)
        if _ended(deployment, number, limit_s):
            return
    raise NodeError(
        f"{where} did not end when it was killed; the machine may be short of memory or wait for a "
        "disk: look at the process, then try `sluice down` again"
    )


def _ended(deployment: state.Deployment, number: signal.Signals, limit_s: float) -> bool:
    """Signal the supervisor; whether it has ended within the limit."""
    if state.is_held(deployment.namespace):
        with contextlib.suppress(ProcessLookupError):  # it has ended just now
            os.kill(deployment.pid, number)
    deadline = time.monotonic() + limit_s
    while state.is_held(deployment.namespace):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
