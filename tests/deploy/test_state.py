"""A deployment's record is found while its supervisor lives, and never after."""

import os
import signal
import subprocess
import sys

import pytest

from sluice.deploy.common import state
from sluice.protocol.messages import ConfigError

HOLDER = """
import sys, time
from sluice.deploy.common import state
with state.hold("box"):
    state.write(state.Deployment("box", 1, "config.yaml", "m", "http://there", ready=True))
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_state_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.fixture
def supervisor():
    """Another process that holds the namespace `box`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.stdin.close()
    process.stdout.close()
    process.wait()


def test_a_living_supervisor_is_found(supervisor):
    assert state.find("box").url == "http://there"
    assert state.running() == ["box"]
    assert state.find("another") is None


def test_a_second_supervisor_of_the_same_name_is_refused(supervisor):
    with (
        pytest.raises(ConfigError, match=r"already running .*http://there.*sluice down"),
        state.hold("box"),
    ):
        raise AssertionError("held twice")


def test_the_record_of_a_killed_supervisor_counts_as_none(supervisor):
    os.kill(supervisor.pid, signal.SIGKILL)
    supervisor.wait()
    assert (state.folder("box") / "deployment.json").exists()
    assert state.find("box") is None
    assert state.running() == []


def test_leaving_takes_the_record_along():
    with state.hold("box"):
        state.write(state.Deployment("box", os.getpid(), "config.yaml", "m"))
        assert state.find("box") is not None
    assert not (state.folder("box") / "deployment.json").exists()
