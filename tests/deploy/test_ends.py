"""A process that is told to end does end, whatever it is busy with, and says what it takes."""

import signal
import subprocess
import sys

import pytest

from sluice.deploy.commands import detach
from sluice.deploy.common import state

SUPERVISOR = """
import os, signal, sys
from sluice.deploy.common import state
num_deaf = int(sys.argv[1])  # signals that it does not heed
def on_signal(*_):
    global num_deaf
    num_deaf -= 1
    if num_deaf < 0:
        os._exit(0)
signal.signal(signal.SIGTERM, on_signal)
with state.hold("box"):
    state.write(state.Deployment("box", os.getpid(), "config.yaml", "m"))
    print("up", flush=True)
    while True:
        signal.pause()
"""

ACTOR = """
import asyncio, threading, time
from sluice.deploy.common.termination import Leaving

class Busy(Leaving):
    limit_s = 1

async def work(actor):
    actor.__init__()
    print("up", flush=True)
    await actor.leaving.wait()
    print("leaving", flush=True)
    await asyncio.Event().wait()

actor = Busy.__new__(Busy)
threading.Thread(target=asyncio.run, args=(work(actor),)).start()
while True:
    time.sleep(0.001)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a script until it says that it is up; it is killed after the test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    processes = []

    def start(script, *arguments):
        command = [sys.executable, "-c", script, *arguments]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert processes[-1].stdout.readline() == "up\n"
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    ("num_deaf", "steps"),
    [("0", []), ("1", ["ended at once"]), ("9", ["ended at once", "it is killed"])],
)
def test_down_ends_a_supervisor_that_heeds_no_signal_and_says_what_it_took(
    run, monkeypatch, num_deaf, steps
):
    monkeypatch.setattr(detach, "AT_ONCE_LIMIT_S", 0.2)
    supervisor = run(SUPERVISOR, num_deaf)
    said = []
    detach.stop(state.find("box"), 5.0 if not steps else 0.2, said.append)
    supervisor.wait(5)
    assert not state.is_held("box")
    assert len(said) == len(steps)
    assert all(step in words for step, words in zip(steps, said, strict=True))


def test_a_frozen_supervisor_is_ended(run, monkeypatch):
    monkeypatch.setattr(detach, "AT_ONCE_LIMIT_S", 0.2)
    supervisor = run(SUPERVISOR, "0")
    supervisor.send_signal(signal.SIGSTOP)
    detach.stop(state.find("box"), 0.2)
    assert supervisor.wait(5) == -signal.SIGKILL


def test_the_first_sigterm_asks_a_process_to_leave_and_its_limit_ends_it(run):
    process = run(ACTOR)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "leaving\n"
    assert process.wait(10) == -signal.SIGALRM


def test_the_second_sigterm_ends_a_process(run):
    process = run(ACTOR)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "leaving\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == -signal.SIGTERM
