"""Prefill and decode nodes in two processes over NIXL, or in this one; and one that does both."""

import contextlib
import json
import queue
import random
import subprocess
import sys
import uuid
from dataclasses import replace
from multiprocessing.connection import Listener
from pathlib import Path

import httpx
import pytest
import torch

from sluice.decode_node.client import AsyncDecode
from sluice.engine.batch import Chunk
from sluice.engine.choice import choose
from sluice.engine.runner import Runner
from sluice.model.registry import load_model
from sluice.prefill_node.client import AsyncPrefill
from sluice.prefill_node.node import PrefillNode
from sluice.prefill_node.scheduler import WORTH_KEEPING_TOKENS
from sluice.protocol.config import parse_config
from sluice.protocol.messages import ClusterState, GenerateRequest, Role, SamplingParams
from sluice.router.http.app import create_app
from sluice.router.service import RouterService
from sluice.transfer.local_transport import LocalTransport

HOST_SCRIPT = Path(__file__).with_name("decode_host.py")
sys.path.insert(0, str(HOST_SCRIPT.parent))

from attempts import attempt  # noqa: E402
from decode_host import ROUTER, WatchedDecodeNode, live_rows  # noqa: E402


class Single:
    """One process that prefills and decodes: what PD must reproduce, tokens and bytes."""

    def __init__(self, config, wrap=lambda model: model):
        self.runner = runner_of(config, Role.PREFILL, wrap)
        self.chunk_tokens = config.prefill.max_batch_tokens

    def generate(self, request):
        """Output tokens, and each pool's live bytes when the prompt was computed."""
        state = self.runner.take(request, request.request_id)
        manager, prompt = self.runner.manager, len(state.token_ids)
        manager.grant(state.grant_id, num_tokens=0, max_tokens=request.max_total_tokens)
        rows, reason = {}, None
        while reason is None:
            start = state.num_computed_tokens
            end = self._chunk_end(start, prompt if start < prompt else len(state.token_ids))
            manager.extend(state.grant_id, end)
            logits = self.runner.step([Chunk(state, start, end)])
            state.num_computed_tokens = end
            manager.expire(state.grant_id, end)
            if end == prompt:
                rows = live_rows(self.runner, state.grant_id, prompt)
            if end == len(state.token_ids):
                [choice] = choose(logits, [state])
                reason = state.append(choice.token_id)
        manager.release(state.request_id)
        return list(state.token_ids[prompt:]), rows

    def _chunk_end(self, start, num_tokens):
        """Where a node's chunk ends that has nothing cached: the rows' last bits depend on it."""
        manager, end = self.runner.manager, min(num_tokens, start + self.chunk_tokens)
        last_unit = (num_tokens - 1) // manager.unit_tokens * manager.unit_tokens
        is_short = last_unit == 0 and num_tokens > WORTH_KEEPING_TOKENS
        kept = num_tokens - 1 if is_short else last_unit
        return min(end, kept) if manager.prefix_cache and start < kept else end


def runner_of(config, role, wrap=lambda model: model):
    """A role's runner around the checkpoint's model, or around what `wrap` makes of it."""
    model = load_model(config.model.path, cache_path=config.model.cache_path)
    return Runner.around(wrap(model), config, role)


class RemoteDecode:
    """The decode process, as seen from the tests."""

    def __init__(self, config_path):
        with Listener() as listener:
            self._process = subprocess.Popen(
                [sys.executable, str(HOST_SCRIPT), listener.address, str(config_path)]
            )
            self._connection = listener.accept()

    def __getattr__(self, method):
        def call(*arguments):
            self._connection.send((method, arguments))
            ok, value = self._connection.recv()
            if not ok:
                raise value
            return value

        return call

    def close(self):
        self._connection.close()
        self._process.wait(30)


class Pair:
    """A prefill node here and a decode node in another process, joined by NIXL."""

    def __init__(self, config, config_path):
        self.config = config
        self.prefill = PrefillNode.load(config, "prefill-0", "127.0.0.1")
        self.prefill.start()
        self.decode = RemoteDecode(config_path)
        self.prefill.connect(self.decode.info()).result(30)

    def generate(self, request):
        """Output tokens, and each pool's live bytes as they had arrived on decode."""
        request = attempt(request)
        grant = self.decode.reserve(request)
        first = self.prefill.run(request, grant).result(60)
        tokens, rows = [first.token_id], {}
        if first.finish_reason is None:
            more, rows = self.decode.finish(grant)
            tokens += more
        self.decode.release(grant.request_id)
        return tokens, rows

    def generate_together(self, requests):
        """Output tokens of requests that decode in one batch as they arrive."""
        started = []
        for request in map(attempt, requests):
            grant = self.decode.reserve(request)
            started.append((grant, self.prefill.run(request, grant).result(60).token_id))
        for grant, first in started:
            more, _ = self.decode.finish(grant)
            self.decode.release(grant.request_id)
            yield [first, *more]

    def used_pages(self):
        status = self.prefill.status(ROUTER).result(30)
        return sum(p["used"] for p in status.pools.values()) + self.decode.used_pages()

    def close(self):
        self.decode.close()
        self.prefill.stop()


class OneCluster:
    async def state(self):
        return ClusterState({})


class LocalPair:
    """A prefill and a decode node in this process, joined by the in-process transport.

    `send_through` makes prefill's transport, for tests that break it.
    """

    def __init__(self, config, wrap=lambda model: model, send_through=LocalTransport):
        self.config = config
        tag = uuid.uuid4().hex
        self.prefill = PrefillNode(
            runner_of(config, Role.PREFILL, wrap), send_through(f"p-{tag}"), config, "p", "here"
        )
        self.decode = WatchedDecodeNode(
            runner_of(config, Role.DECODE, wrap), LocalTransport(f"d-{tag}"), config, "d", "here"
        )
        self.prefill.start()
        self.decode.start()
        self.prefill.connect(self.decode.info).result(30)
        self.chunks = queue.Queue()
        self.decode.subscribe(ROUTER, self.chunks.put)

    def reserve(self, request):
        return self.decode.reserve(replace(request, router_id=ROUTER)).result(30)

    def finish(self, grant):
        """Tokens until the request's end or its error, and the error."""
        tokens = []
        while True:
            for chunk in self.chunks.get(timeout=30):
                if chunk.request_id == grant.request_id:
                    tokens += chunk.token_ids
                    if chunk.finish_reason is not None or chunk.error is not None:
                        return tokens, chunk.error

    def generate(self, request):
        request = attempt(request)
        grant = self.reserve(request)
        first = self.prefill.run(request, grant).result(30)
        tokens, error = self.finish(grant)
        assert error is None, error
        return [first.token_id, *tokens], self.decode.arrived.pop(grant.grant_id)

    def statuses(self):
        return self.prefill.status(ROUTER).result(30), self.decode.status(ROUTER).result(30)

    def used_pages(self):
        return sum(p["used"] for status in self.statuses() for p in status.pools.values())

    def close(self):
        self.decode.stop()
        self.prefill.stop()


@pytest.fixture(scope="session")
def make_request():
    """A request with a random prompt; the seed is in the id, so a failure names it."""

    def make(num_tokens, *, vocab_size, max_tokens=8, seed=0, **sampling):
        rng = random.Random(seed)
        prompt = tuple(rng.randrange(3, vocab_size) for _ in range(num_tokens))
        params = SamplingParams(max_tokens=max_tokens, **({"temperature": 0.0} | sampling))
        return GenerateRequest(f"n{num_tokens}-seed{seed}", prompt, params)

    return make


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def config_of():
    """A config for a checkpoint with small chunks, so that prompts straddle them."""

    def config(checkpoint, **changes):
        common = {"max_running_requests": 4, "cache_bytes": 64 << 20, "prefix_cache": False}
        data = {
            "model": {"path": str(checkpoint), "max_model_len": 1024},
            "prefill": {"max_batch_tokens": 48} | common,
            "decode": {"max_batch_tokens": 48} | common,
            "transfer": {"lease_s": 300},  # no router gives a sign of life here
        }
        for section, values in changes.items():
            data[section] = data.get(section, {}) | values
        return parse_config(data)

    return config


@pytest.fixture(scope="session")
def start_pair(tmp_path_factory):
    """Starts PD pairs over NIXL; they end with the test session."""
    pairs = []

    def start(config):
        path = tmp_path_factory.mktemp("pair") / "config.json"
        path.write_text(json.dumps(config.model_dump(mode="json")))
        pairs.append(Pair(config, path))
        return pairs[-1]

    yield start
    for pair in pairs:
        pair.close()


@pytest.fixture(scope="session")
def single_of():
    return Single


@pytest.fixture
def router_over():
    """A router's service over a pair in this process; whoever serves it starts and stops it."""

    def over(pair):
        service = RouterService(pair.config, OneCluster())
        service.set_nodes([AsyncPrefill(pair.prefill)], [AsyncDecode(pair.decode)])
        return service

    return over


@pytest.fixture
def http_over(router_over):
    """An HTTP client of such a router, for a block."""

    @contextlib.asynccontextmanager
    async def over(pair):
        service = router_over(pair)
        await service.start()
        transport = httpx.ASGITransport(app=create_app(service))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://test", timeout=60
        ) as client:
            yield client
        await service.stop(limit_s=5)

    return over


@pytest.fixture
def start_local():
    """Starts PD pairs in this process; they end with the test."""
    pairs = []

    def start(config, **parts):
        pairs.append(LocalPair(config, **parts))
        return pairs[-1]

    yield start
    for pair in pairs:
        pair.close()
