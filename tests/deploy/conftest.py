"""Scripted processes for the controller, and one real deployment for the live tests."""

import asyncio
import contextlib
import copy
import json
import os
import random
import secrets
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from sluice.cache.spec import Full, PoolSpec
from sluice.deploy.cluster import environment as ray_environment
from sluice.deploy.common import state
from sluice.protocol.config import parse_config
from sluice.protocol.messages import NodeInfo, NodeLost, Role, RouterStatus

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).parent / "ray_driver.py"


class ScriptedClient:
    def __init__(self, info):
        self.info = info


class ScriptedProcess:
    """What the handles of nodes and routers have in common; a test decides what it does.

    `frozen`: calls are not answered. `error`: calls raise it.
    """

    def __init__(self):
        self.frozen = False
        self.error = None
        self.missing = ""
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.died = asyncio.Event()
        self.killed = False

    async def answer(self):
        if self.frozen:
            await asyncio.Event().wait()
        if self.died.is_set():
            raise NodeLost("it is gone: killed by the test")
        if self.error is not None:
            raise self.error

    async def unplaced(self):
        return self.missing

    async def kill(self):
        self.killed = True
        self.died.set()


class ScriptedNode(ScriptedProcess):
    """A NodeHandle whose start, death and peers a test decides."""

    def __init__(self, launcher, role, node_id):
        super().__init__()
        self.launcher, self.role, self.node_id = launcher, role, node_id
        self.told_to_end = asyncio.Event()
        self.stopped = False
        self.peers, self.version, self.num_told = set(), 0, 0
        if launcher.hold_starts:
            self.may_start.clear()

    async def start(self):
        await self.may_start.wait()
        if self.launcher.start_error is not None:
            raise self.launcher.start_error
        spec = PoolSpec("toy", (0,), (4,), "float32", 1, 4, Full())
        self.info = NodeInfo(
            self.node_id, "1", self.role, "here", "same", (spec,), 64, 4, 16, {spec.table: 8}
        )
        return self.info

    def client(self):
        return ScriptedClient(self.info)

    async def meet(self, version, peers):
        await self.answer()
        assert version > self.version, "each telling has a higher version"
        self.version = version
        self.num_told += 1
        ids = {peer.node_id for peer in peers}
        failed = {name: error for name, error in self.launcher.unmet.items() if name in ids}
        self.peers = ids - failed.keys()
        return failed

    async def watch(self, on_leaving):
        dying = asyncio.ensure_future(self.died.wait())
        asked = asyncio.ensure_future(self.told_to_end.wait())
        try:
            await asyncio.wait({dying, asked}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                on_leaving()
            await dying
        finally:
            dying.cancel()
            asked.cancel()
        raise NodeLost(f"{self.node_id} is gone: killed by the test")

    async def stop(self):
        self.stopped = True


class ScriptedRouter(ScriptedProcess):
    """A RouterHandle that remembers what it was told; nodes in `busy` are not idle."""

    def __init__(self, router_id):
        super().__init__()
        self.router_id = router_id
        self.told = asyncio.Condition()
        self.prefill, self.decode, self.draining = set(), set(), set()
        self.version = 0
        self.busy = {}

    async def start(self):
        await self.may_start.wait()
        return "http://router"

    async def set_nodes(self, version, prefill, decode, draining):
        await self.answer()
        assert version > self.version, "each telling has a higher version"
        self.version = version
        async with self.told:
            self.prefill = {client.info.node_id for client in prefill}
            self.decode = {client.info.node_id for client in decode}
            self.draining = set(draining)
            self.told.notify_all()

    async def until(self, condition):
        async with asyncio.timeout(5), self.told:
            await self.told.wait_for(lambda: condition(self))

    def make_busy(self, node_id):
        self.busy[node_id] = asyncio.Event()
        return self.busy[node_id]

    async def wait_idle(self, node_id, limit_s):
        await self.answer()
        assert node_id in self.draining, "the router must know that the node takes nothing new"
        if node_id in self.busy:
            await self.busy[node_id].wait()
        return True

    async def status(self):
        await self.answer()
        return RouterStatus(self.router_id, ())

    async def watch(self):
        await self.died.wait()
        raise NodeLost("the router is gone")

    async def stop(self):
        await self.answer()
        self.died.set()


class ScriptedLauncher:
    def __init__(self):
        self.hold_starts = False
        self.start_error = None
        self.unmet = {}  # decode nodes that no prefill node can connect, and why
        self.nodes = {}
        self.routers = []

    def node(self, role, node_id):
        self.nodes[node_id] = ScriptedNode(self, role, node_id)
        return self.nodes[node_id]

    def router(self):
        self.routers.append(ScriptedRouter(f"router-{len(self.routers)}"))
        return self.routers[-1]


@pytest.fixture
def launcher():
    return ScriptedLauncher()


@pytest.fixture
def config():
    """Builds a config with the given numbers of replicas and role options."""

    def build(prefill=1, decode=1, routers=1, **limits):
        sections = {"model": {"path": "unused"}, "router": {"replicas": routers}}
        for role, replicas in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
            sections[role.value] = {"replicas": replicas, "max_replicas": 4, **limits}
        return parse_config(sections)

    return build


@pytest.fixture
def config_file(tmp_path):
    """Writes a config like local.yaml with changes given as {(section, key): value}."""
    base = yaml.safe_load((ROOT / "deploy/configs/local.yaml").read_text())
    base["model"]["path"] = str(ROOT / "deploy/models/tiny-v4")

    def write(changes):
        data = copy.deepcopy(base)
        for (section, key), value in changes.items():
            data.setdefault(section, {})[key] = value
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(data))
        return path

    return write


@pytest.fixture
def rng():
    """A random generator whose seed is printed, so that a failure can be repeated."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    return random.Random(seed)


@dataclass(frozen=True)
class Live:
    """A real deployment: its URL, its command line, and a Ray driver's view of its actors."""

    url: str
    namespace: str
    driver: subprocess.Popen
    pid: int  # of its supervisor

    def sluice(self, *arguments):
        """Run a command on this deployment; returns its stdout."""
        return sluice(*arguments, "--namespace", self.namespace)

    def inside(self, what, *arguments):
        """Do something inside the deployment's actors; see ray_driver.py."""
        self.driver.stdin.write(json.dumps([what, *arguments]) + "\n")
        self.driver.stdin.flush()
        return json.loads(self.driver.stdout.readline())

    def status(self):
        return httpx.get(f"{self.url}/admin/status").json()

    def nodes(self, role):
        """Ids of the ready nodes of a role."""
        nodes = self.status()["nodes"]
        return [n["id"] for n in nodes if (n["role"], n["state"]) == (role, "ready")]

    def metrics(self):
        """Every sample of /metrics as {(name, sorted labels): value}."""
        families = text_string_to_metric_families(httpx.get(f"{self.url}/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        return {(s.name, tuple(sorted(s.labels.items()))): s.value for s in samples}


@pytest.fixture(scope="session")
def live(tmp_path_factory):
    """One prefill node, one decode node and a router on a free port, for the whole session."""
    namespace = f"test-{os.getpid()}"
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))  # for the driver, which joins
        up = ["up", str(ROOT / "deploy/configs/local.yaml"), "--detach", "--port", "0"]
        sluice(*up, "--namespace", namespace)
        stack.callback(sluice, "down", "--namespace", namespace)
        record = json.loads((state.folder(namespace) / "deployment.json").read_text())
        driver = stack.enter_context(
            subprocess.Popen(
                [sys.executable, DRIVER, record["ray_address"], namespace],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "RAY_AUTH_MODE": "token", ray_environment.ONE_HOST: "0"},
            )
        )
        stack.callback(driver.kill)  # Ray's own way out of a driver may take for ever
        yield Live(record["url"], namespace, driver, record["pid"])


def sluice(*arguments):
    """Run the command line in a process of its own; returns its stdout."""
    command = [sys.executable, "-m", "sluice.deploy.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
