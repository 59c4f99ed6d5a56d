"""A deployment over several hosts, with everything that a network between them does.

Host a has the router, a prefill node and the client, host b the decode node, host c another prefill
node. Whatever happens, an answer is the undisturbed one of a single process, or its beginning with
an error after it.
"""

import asyncio
import contextlib
import json
import os
import random
import secrets
import shutil
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml

from sluice.benchmarks.in_process import InProcess
from sluice.protocol.config import load_config
from sluice.router.http.app import create_app

sys.path.insert(0, str(Path(__file__).parent))

from network import Host, Hub, why_unavailable

pytestmark = [pytest.mark.live, pytest.mark.hosts]

ROOT = Path(__file__).parents[2]
MODEL = "tiny-v4"
LEASE_S = 2
LIMIT_S = 60
PAYLOAD_BYTES = 600_000  # less than what the pages of 2,000 tokens of this model take


@dataclass(frozen=True)
class Answer:
    """What a client got of a streamed answer; `error` is what ended it early, if anything did."""

    text: str = ""
    error: dict | None = None


def completion(seed, num_tokens, max_tokens):
    prompt = [0, *(random.Random(seed).randrange(300, 2000) for _ in range(num_tokens))]
    return "/v1/completions", {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}


def chat(text):
    return "/v1/chat/completions", {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 24,
    }


def brief(seed):
    return completion(seed, num_tokens=20, max_tokens=8)


def long_answer(seed):
    return completion(seed, num_tokens=20, max_tokens=200)


def long_prompt(seed):
    return completion(seed, num_tokens=2000, max_tokens=30)


class Cluster:
    """The deployment on its hosts, as a client on host a sees it."""

    def __init__(self, a, b, c, hub, url):
        self.a, self.b, self.c, self.hub = a, b, c, hub
        self.http = httpx.Client(base_url=url, timeout=LIMIT_S)
        self._client = a.threads(max_workers=16)

    def send(self, request, on_piece=lambda: None):
        """Start a streamed request; returns the future of its Answer."""
        return self._client.submit(self._stream, *request, on_piece)

    def answer(self, request):
        return self.send(request).result()

    def ready(self, role):
        """The nodes of a role that are ready, as /admin/status has them."""
        status = self._client.submit(self.http.get, "/admin/status").result()
        return [n for n in status.json()["nodes"] if (n["role"], n["state"]) == (role, "ready")]

    def quiescent(self):
        """Whether all nodes serve, nothing runs, and no page is used."""
        nodes = [*self.ready("prefill"), *self.ready("decode")]
        busy = sum(node["running"] + node["waiting"] for node in nodes)
        return len(nodes) == 3 and not used_pages(nodes) and not busy

    def _stream(self, path, body, on_piece):
        body = {"model": MODEL, "temperature": 0, "stream": True, **body}
        text = ""
        with self.http.stream("POST", path, json=body) as answer:
            if answer.status_code != 200:
                return Answer(error=json.loads(answer.read())["error"])
            for event in events(answer.iter_lines()):
                if "error" in event:
                    return Answer(text, event["error"])
                text += piece(event)
                on_piece()
        return Answer(text)


def used_pages(nodes):
    return sum(pages["used"] for node in nodes for pages in node["pools"].values())


def events(lines):
    return (json.loads(line[6:]) for line in lines if line.startswith("data: {"))


def piece(event):
    choice = event["choices"][0]
    return choice["text"] if "text" in choice else choice["delta"].get("content") or ""


def until(condition):
    """Poll the deployment until the condition holds."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.05)


@pytest.fixture(scope="module", params=["write", "read"])
def cluster(request):
    if reason := why_unavailable():
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        # Short, for the sockets below it; not under a folder that Ray would share with others.
        files = Path(tempfile.mkdtemp(prefix="sluice-", dir="/tmp"))
        stack.callback(shutil.rmtree, files, ignore_errors=True)
        hosts = [stack.enter_context(contextlib.closing(Host(*named))) for named in HOSTS]
        hub = stack.enter_context(contextlib.closing(Hub(*hosts)))
        start_ray(hosts, files)
        a = hosts[0]
        config = write_config(a, files, mode=request.param)
        sluice = (sys.executable, "-m", "sluice.deploy.cli")
        a.run(*sluice, "up", config, "--detach", env=environment(files))
        stack.callback(a.run, *sluice, "down", env=environment(files))
        yield Cluster(*hosts, hub, f"http://{a.address}:8000")


HOSTS = (("a", "10.77.0.1"), ("b", "10.77.0.2"), ("c", "10.77.0.3"))
ROLES = ({"prefill": 1, "router": 1}, {"decode": 1}, {"prefill": 1})
TOKEN = secrets.token_hex(16)


def environment(files):
    return {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "XDG_STATE_HOME": str(files),
    }


def start_ray(hosts, files):
    """Ray as an operator starts it on several machines."""
    start = [Path(sys.executable).with_name("ray"), "start", "--num-cpus", "4"]
    start += ["--disable-usage-stats", "--object-store-memory", 100 << 20]
    head = ["--head", "--port", 6379, "--include-dashboard", "false", "--temp-dir", files]
    join = ["--address", f"{hosts[0].address}:6379"]
    for host, where, roles in zip(hosts, (head, join, join), ROLES, strict=True):
        options = ["--node-ip-address", host.address, "--resources", json.dumps(roles)]
        host.run(*start, *where, *options, env=environment(files))


def write_config(a, files, mode):
    config = yaml.safe_load((ROOT / "deploy/configs/local.yaml").read_text())
    config["model"]["path"] = str(ROOT / "deploy/models/tiny-v4")
    config["prefill"]["replicas"] = 2
    config["prefill"]["max_batch_tokens"] = 256  # several chunks, hence several writes, a prompt
    # So few pages that they are soon used again: 8 for the history, of 256 tokens.
    config["decode"] |= {
        "cache_bytes": 1_700_000, "max_running_requests": 4, "max_batch_tokens": 16,
    }  # fmt: skip
    config["router"]["prefill_policy"] = "round_robin"
    config["router"]["host"] = a.address
    config["transfer"] = {
        "mode": mode,
        "lease_s": LEASE_S,
        "checksum": "full",
        # These hosts share a kernel; without it UCX would find their memory shared too.
        "backend_params": {"engine_config": "TLS=tcp,NET_DEVICES=eth0"},
    }
    config["ray"] = {"address": f"{a.address}:6379"}
    path = files / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module")
def expected():
    """Gives the answers that one process gives, nodes and router in it, to these requests."""
    known = {}

    async def ask(requests):
        config = load_config(ROOT / "deploy/configs/local.yaml")
        async with InProcess(config) as system:
            transport = httpx.ASGITransport(app=create_app(system.service))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                return [await one(http, *request) for request in requests]

    def answers(requests):
        names = [json.dumps(request) for request in requests]
        new = {n: r for n, r in zip(names, requests, strict=True) if n not in known}
        if new:
            known.update(zip(new, asyncio.run(ask(new.values())), strict=True))
        return [known[name] for name in names]

    async def one(http, path, body):
        body = {"model": MODEL, "temperature": 0, "stream": True, **body}
        answer = await http.post(path, json=body, timeout=LIMIT_S)
        assert answer.status_code == 200, answer.text
        return Answer("".join(map(piece, events(answer.text.splitlines()))))

    return answers


def check(answer, expected):
    """The whole answer, or a true beginning of it and a plain word on why it ends there."""
    if answer.error is None:
        assert answer == expected
    else:
        assert expected.text.startswith(answer.text)
        assert answer.error["code"] == "unavailable", answer.error


def test_answers_are_those_of_one_process_and_their_pages_cross_the_network(cluster, expected):
    requests = [chat("Define love."), long_answer(1), long_prompt(2)]
    before = cluster.b.received_bytes()
    assert [cluster.answer(request) for request in requests] == expected(requests)
    assert cluster.b.received_bytes() - before > PAYLOAD_BYTES
    until(cluster.quiescent)


def test_a_slow_and_lossy_network_only_costs_time(cluster, expected):
    requests = [chat("What is pride?"), long_prompt(3), long_answer(4)]
    cluster.hub.delay_s, cluster.hub.loss = 0.1, 0.01
    try:
        answers = [future.result() for future in [cluster.send(r) for r in requests]]
    finally:
        cluster.hub.delay_s, cluster.hub.loss = 0.0, 0.0
    assert answers == expected(requests)
    until(cluster.quiescent)


def unplug(cluster):
    cluster.b.unplugged = True


def plug_in(cluster):
    cluster.b.unplugged = False


def freeze(cluster):
    cluster.b.freeze()


def thaw(cluster):
    cluster.b.thaw()


FAULTS = {"unplugged": (unplug, plug_in), "frozen": (freeze, thaw)}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_decode_host_that_vanishes_and_returns_in_mid_stream_alters_no_answer(
    cluster, expected, fault
):
    begin, end = FAULTS[fault]
    requests = [long_answer(seed) for seed in (5, 6)]
    flowing = threading.Semaphore(0)
    futures = [cluster.send(request, flowing.release) for request in requests]
    for _ in range(40):
        assert flowing.acquire(timeout=LIMIT_S)
    meet(cluster, begin, end)
    for future, answer in zip(futures, expected(requests), strict=True):
        check(future.result(), answer)
    recover(cluster, expected)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_decode_host_that_vanishes_and_returns_in_mid_transfer_alters_no_answer(
    cluster, expected, fault
):
    begin, end = FAULTS[fault]
    number = 20 * (1 + list(FAULTS).index(fault))
    requests, future = strike_in_transfer(cluster, cluster.a, number, lambda: begin(cluster))
    meet(cluster, lambda _: None, end)
    check(future.result(), expected(requests)[-1])
    recover(cluster, expected)


def test_a_write_that_the_network_delays_lands_in_no_other_requests_pages(cluster, expected):
    """The prefill host c is cut off; it is back when others have the pages it was writing to."""
    c = cluster.c
    victims, future = strike_in_transfer(cluster, c, 60, lambda: setattr(c, "unplugged", True))
    try:
        check(future.result(), expected(victims)[-1])  # usually by the other prefill node
        until(lambda: cluster.ready("decode") and not used_pages(cluster.ready("decode")))
        requests = [completion(seed, num_tokens=1200, max_tokens=150) for seed in (81, 82, 83)]
        flowing = threading.Semaphore(0)
        futures = [cluster.send(request, flowing.release) for request in requests]
        for _ in range(30):
            assert flowing.acquire(timeout=LIMIT_S)
    finally:
        c.unplugged = False
    answers = [future.result() for future in futures]
    for answer, true in zip(answers, expected(requests), strict=True):
        check(answer, true)
    assert any(answer.error is None for answer in answers)
    recover(cluster, expected)


def strike_in_transfer(cluster, host, number, act):
    """Act when a prompt's pages are half way out of the host; its request is the last returned."""
    struck = threading.Event()

    def strike():
        act()
        struck.set()

    requests = []
    while not struck.is_set():  # the other prefill node may take it
        requests.append(long_prompt(number + len(requests)))
        host.after(PAYLOAD_BYTES // 2, strike)
        future = cluster.send(requests[-1])
        until(lambda sent=future: struck.is_set() or sent.done())
    return requests, future


def meet(cluster, begin, end):
    """Let the fault last until the lease of everything on the host has ended."""
    begin(cluster)
    try:
        until(lambda: not cluster.ready("decode"))
        time.sleep(LEASE_S)
    finally:
        end(cluster)


def recover(cluster, expected):
    """No page stays used, and the next request is served."""
    until(cluster.quiescent)
    requests = [brief(11), long_prompt(12)]
    assert [cluster.answer(request) for request in requests] == expected(requests)
