"""A network card that is down for seconds: real NIXL over TCP, in a network of the test's own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sluice.transfer.nixl_transport")
OWN_NETWORK = ["unshare", "--net"]
RESULT = "result: "  # UCX writes its own lines between ours


def has_own_network():
    try:
        return subprocess.run([*OWN_NETWORK, "ip", "link"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def runs():
    """Both modes at the same time, each in a network of its own: most of it is waiting."""
    script = str(Path(__file__).with_name("link_host.py"))
    started = {
        mode: subprocess.Popen(
            [*OWN_NETWORK, sys.executable, script, mode],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for mode in ("write", "read")
    }
    yield started
    for run in started.values():
        run.kill()
        run.communicate()


@pytest.mark.skipif(not has_own_network(), reason="a network namespace needs root, unshare and ip")
@pytest.mark.parametrize("mode", ["write", "read"])
def test_after_a_link_was_down_the_next_request_succeeds_and_nobody_was_stopped(runs, mode):
    printed, errors = runs[mode].communicate(timeout=60)
    assert runs[mode].returncode == 0, errors
    before, meanwhile, after, longest_s = json.loads(printed.split(RESULT)[1].splitlines()[0])
    assert before == [42, 42] and after == [42, 42, 42], errors
    assert meanwhile and 42 not in meanwhile
    assert longest_s < 1.5, "connecting to a host that does not answer takes a lease of 3 s"
