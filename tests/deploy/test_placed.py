"""A deployment on hosts that offer just enough: what has no place says so, what runs may finish."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import pytest

from sluice.deploy.common import state

pytestmark = pytest.mark.live

HOST = Path(__file__).parent / "ray_host.py"
OFFERS = {"prefill": 1, "decode": 1, "router": 1}


@pytest.fixture
def ray_address(monkeypatch):
    """A Ray on which one process of each kind has a place."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    files = tempfile.mkdtemp(prefix="sluice-", dir="/tmp")  # short, for the sockets below it
    command = [sys.executable, HOST, "3", json.dumps(OFFERS), files]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process.stdout.readline().strip()
        process.stdin.close()
    shutil.rmtree(files, ignore_errors=True)


@contextlib.contextmanager
def started(*arguments):
    """A command of ours that runs during the block; it is ended after it."""
    command = [sys.executable, "-m", "sluice.deploy.cli", *map(str, arguments)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def run(*arguments, may_fail=False):
    command = [sys.executable, "-m", "sluice.deploy.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert may_fail or done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_node_without_a_place_says_so_and_a_stream_outlasts_the_order_to_end(
    ray_address, config_file, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    name = f"placed-{os.getpid()}"
    config = config_file({("ray", "address"): ray_address, ("router", "port"): 0})
    run("up", config, "--detach", "--namespace", name)
    try:
        with started("scale", "decode", "2", "--namespace", name) as scaling:
            words = scaling.stderr.readline()
        assert words.startswith("decode-1 starting: no host has room for it")
        assert "needs 1 CPU and 1 decode" in words and "0 of 1 decode free" in words
        nodes = json.loads(run("status", "--json", "--namespace", name))["nodes"]
        assert next(n for n in nodes if n["id"] == "decode-1")["detail"] in words
        events = stream(state.find(name).url, on_first=lambda: end(name))
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
    finally:
        run("down", "--namespace", name, may_fail=True)  # it may have ended by now
    assert not state.is_held(name)


def end(name):
    """Have the deployment end, as `sluice down` begins it."""
    os.kill(state.find(name).pid, 15)


def stream(url, on_first):
    """The events of a long streamed answer."""
    body = {"model": "tiny-v4", "prompt": [0, 301, 302], "max_tokens": 600, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True}
    events = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if line:
                if not events:
                    on_first()
                events.append(line.removeprefix("data: "))
    return events
