"""Starts a supervisor in a session of its own and waits until it is ready; ends it by signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from sluice.deploy import state
from sluice.deploy.reporting import EXIT_CONFIG
from sluice.engine.protocol import ConfigError, NodeError

POLL_S = 0.1


def start(namespace: str, up_arguments: Sequence[str]) -> state.Deployment:
    """Run `sluice up` with these arguments in the background; returns once it is ready.

    Raises ConfigError or NodeError with what it said if it ends instead.
    """
    log = state.log_file(namespace)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "sluice.deploy.cli", "up", *up_arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while process.poll() is None:
            found = state.find(namespace)
            if found is not None and found.ready and found.pid == process.pid:
                return found
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise
    last_words = log.read_text(errors="replace").rpartition("error: ")[2].strip()
    raise (ConfigError if process.returncode == EXIT_CONFIG else NodeError)(last_words)


def stop(deployment: state.Deployment, timeout_s: float) -> None:
    """Ask the supervisor to end and wait until it has. Raises NodeError after `timeout_s`."""
    os.kill(deployment.pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while state.is_held(deployment.namespace):
        if time.monotonic() > deadline:
            raise NodeError(
                f"deployment {deployment.namespace!r} (pid {deployment.pid}) did not end within "
                f"{timeout_s:g} s; running streams may be long, try `sluice down --timeout`"
            )
        time.sleep(POLL_S)
