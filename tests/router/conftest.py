"""A router over scripted nodes: real HTTP app, real service, nodes that follow a token function.

The scripted nodes implement the client protocols of sluice.protocol.messages; they count pages as
real ones do and fail on command. Output depends on every token before it, so a lost, repeated or
reordered token changes all that follows.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sluice.cache.journal import Journal
from sluice.cache.spec import Full, PoolSpec, Window
from sluice.protocol.config import SluiceConfig, parse_config
from sluice.protocol.messages import (
    ClusterState,
    FinishReason,
    GenerateRequest,
    InvalidRequest,
    Logprobs,
    MetricFamily,
    NodeEntry,
    NodeInfo,
    NodeLost,
    NodeState,
    NodeStatus,
    PageGrant,
    PageRun,
    PrefillResult,
    Refused,
    Role,
    RouterStatus,
    SluiceError,
    TokenChunk,
)
from sluice.router.http.app import create_app
from sluice.router.service import RouterService
from sluice.router.text.v4.words import BOS as V4_BOS
from sluice.router.text.v4.words import CONTROL_TOKENS
from sluice.router.text.v4.words import EOS as V4_EOS

sys.path.insert(0, str(Path(__file__).parent))  # as tests in folders of one name are imported
from ledgers import promised_pages
from v4_answers import write_config

BOS, EOS, PAD, USER, ASSISTANT = range(5)
SPECIAL = ["<bos>", "<eos>", "<pad>", "<user>", "<assistant>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECS = (
    PoolSpec("pages", (0, 1), (4,), "float32", 4, 16, Full()),
    PoolSpec("recent", (0, 1), (4,), "float32", 1, 8, Window(8)),
)
FULL, WINDOW = (spec.table for spec in SPECS)


def write_checkpoint(folder: Path, *, chat_template: str | None = TEMPLATE) -> Path:
    folder.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat and the hat and the naïve café ☕ of the 🐈"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": 256,
        "eos_token_id": EOS,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer_config = {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}}
    if chat_template is not None:
        tokenizer_config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


class Script:
    """The model: `plan` gives the first output tokens, arithmetic over all tokens the rest."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.plan: tuple[int, ...] = ()

    def next(self, prompt: tuple[int, ...], output: tuple[int, ...]) -> int:
        if len(output) < len(self.plan):
            return self.plan[len(output)]
        state = 17
        for token_id in prompt + output:
            state = (state * 31 + token_id + 7) % 1_000_003
        return len(SPECIAL) + state % (self.vocab_size - len(SPECIAL))

    def finish(self, request: GenerateRequest, output: tuple[int, ...]) -> FinishReason | None:
        if output[-1] in request.sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(output) == request.sampling.max_tokens else None

    def logprobs(self, request: GenerateRequest, token: int) -> Logprobs | None:
        """Made up from the token, so that an entry can be told from its neighbour's."""
        if request.sampling.num_top_logprobs is None:
            return None
        top = [((token + rank) % self.vocab_size, -0.5 - token - rank) for rank in range(20)]
        return Logprobs(top[0][1], tuple(top[: request.sampling.num_top_logprobs]))

    def reference(self, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
        """Output tokens as they must come, up to and without eos."""
        output: tuple[int, ...] = ()
        while len(output) < max_tokens and (token := self.next(prompt, output)) != EOS:
            output += (token,)
        return output


class ScriptedNode:
    """`alive` cleared: frozen. `dead`: every call raises NodeLost. `faults`: raised one by one."""

    role: Role

    def __init__(self, world: World, node_id: str, *, num_pages: int, **limits: int) -> None:
        self.world = world
        self.info = NodeInfo(
            node_id=node_id,
            incarnation=f"{node_id}-{next(world.counter)}",
            role=self.role,
            host="here",
            fingerprint="f",
            specs=SPECS,
            max_model_len=limits.get("max_model_len", 256),
            max_running_requests=limits.get("max_running_requests", 4),
            max_batch_tokens=limits.get("max_batch_tokens", 64),
            num_pages={FULL: num_pages, WINDOW: 64},
        )
        self.alive = asyncio.Event()
        self.alive.set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.dead = False
        self.faults: list[Exception] = []
        self.calls: list[str] = []
        self.journal = Journal()  # what it says it has cached

    async def enter(self, call: str) -> None:
        await asyncio.sleep(0)
        await self.alive.wait()
        if self.dead:
            raise NodeLost(f"{self.info.node_id} is dead")
        if call != "status":
            self.calls.append(call)
            self.world.changed()

    def raise_fault(self) -> None:
        if self.faults:
            raise self.faults.pop(0)

    def running(self) -> int:
        raise NotImplementedError

    async def status(
        self, router_id: str, cache_version: int | None = None, *, with_metrics: bool = True
    ) -> NodeStatus:
        await self.enter("status")
        pools = {"pages": {"free": self.info.num_pages[FULL], "used": 0, "cached": 0}}
        sample = ("sluice:transfer_bytes_total", {"pool": "pages"}, 7.0)
        family = MetricFamily("sluice:transfer_bytes", "counter", "Bytes moved.", (sample,))
        cached = self.journal.since(cache_version or 0)
        now = asyncio.get_running_loop().time()
        return NodeStatus(
            self.info.node_id,
            self.running(),
            0,
            pools,
            (family,) if with_metrics else (),
            cached,
            now,
            self.held(router_id),
        )

    def held(self, router_id: str) -> tuple[str, ...]:
        """Attempts that it tells the router it holds for it."""
        raise NotImplementedError


class ScriptedPrefill(ScriptedNode):
    role = Role.PREFILL

    def __init__(self, *args, **limits) -> None:
        super().__init__(*args, **limits)
        self.at_work: dict[str, GenerateRequest] = {}
        self.num_cached_tokens = 0

    def running(self) -> int:
        return len(self.at_work)

    def held(self, router_id: str) -> tuple[str, ...]:
        return tuple(r for r, work in self.at_work.items() if work.router_id == router_id)

    async def run(self, request: GenerateRequest, grant: PageGrant) -> PrefillResult:
        await self.enter("run")
        self.at_work[request.request_id] = request
        self.world.changed()
        try:
            await self.gate.wait()
            self.raise_fault()
            token = self.world.script.next(request.prompt_token_ids, request.emitted_token_ids)
            output = (*request.emitted_token_ids, token)
            finish = self.world.script.finish(request, output)
            if finish is None:
                self.world.decodes[grant.node_id].deliver(grant, request, output)
            logprobs = self.world.script.logprobs(request, token)
            return PrefillResult(
                request.request_id, token, finish, self.num_cached_tokens, logprobs
            )
        finally:
            self.at_work.pop(request.request_id, None)

    async def abort(self, request_id: str) -> None:
        await self.enter("abort")
        self.at_work.pop(request_id, None)


class ScriptedDecode(ScriptedNode):
    """`tokens_per_chunk` at a time. `die_after`, `error_after`, `preempt_after`: tokens of one."""

    role = Role.DECODE

    def __init__(self, *args, **limits) -> None:
        super().__init__(*args, **limits)
        self.free_pages = self.info.num_pages[FULL]
        self.grants: dict[str, int] = {}
        self.voided: list[str] = []  # grants released while a write could be in flight
        self.confirmed: list[str] = []  # those of them of which nothing is in flight any more
        self.streams: dict[str, asyncio.Queue] = {}
        self.owners: dict[str, str] = {}
        self.requests: dict[str, str] = {}  # request id -> grant id
        self.generating: dict[str, asyncio.Task] = {}
        self.tokens_per_chunk = 1
        self.die_after: int | None = None
        self.error_after: int | None = None
        self.preempt_after: int | None = None
        self.error_cause: SluiceError | None = None
        self.max_seen = 0
        self.computed_here: list[GenerateRequest] = []  # prompts that prefill never saw

    def running(self) -> int:
        return len(self.grants)

    def held(self, router_id: str) -> tuple[str, ...]:
        return tuple(
            request_id
            for request_id, grant_id in self.requests.items()
            if grant_id in self.grants and self.owners[grant_id] == router_id
        )

    async def reserve(self, request: GenerateRequest) -> PageGrant:
        await self.enter("reserve")
        self.raise_fault()
        need = len(FULL.pages(0, request.max_total_tokens))
        if need > self.free_pages or len(self.grants) >= self.info.max_running_requests:
            raise Refused(f"{need} pages needed, {self.free_pages} free")
        grant_id = f"grant-{next(self.world.counter)}"
        self.free_pages -= need
        self.grants[grant_id] = need
        self.owners[grant_id] = request.router_id
        self.requests[request.request_id] = grant_id
        self.max_seen = max(self.max_seen, len(self.grants))
        run = PageRun(0, tuple(range(need)))
        info = self.info
        grant = PageGrant(
            grant_id, 1, info.node_id, info.incarnation, request.request_id,
            len(request.token_ids), {FULL: run}, 1.0,
        )  # fmt: skip
        if request.local:
            self.computed_here.append(request)
            self.deliver(grant, request, request.emitted_token_ids)
        return grant

    async def release(self, request_id: str, *, in_flight: bool) -> None:
        await self.enter("release")
        grant_id = self.requests.get(request_id, "none")
        if in_flight:
            self.voided.append(grant_id)
        elif grant_id in self.voided:
            self.confirmed.append(grant_id)
        if (task := self.generating.pop(grant_id, None)) is not None:
            task.cancel()
        self.free_pages += self.grants.pop(grant_id, 0)
        self.world.changed()

    def deliver(self, grant: PageGrant, request: GenerateRequest, output: tuple[int, ...]) -> None:
        assert grant.grant_id in self.grants, "prefill wrote into pages that were given back"
        steps = self._generate(grant.grant_id, request, output)
        self.generating[grant.grant_id] = asyncio.create_task(steps)

    async def _generate(self, grant_id, request, output) -> None:
        num_new, finish = 0, None
        while finish is None:
            await asyncio.sleep(0)
            await self.alive.wait()
            await self.gate.wait()
            new: tuple[int, ...] = ()
            while finish is None and len(new) < self.tokens_per_chunk:
                token = self.world.script.next(request.prompt_token_ids, output)
                output, new = (*output, token), (*new, token)
                finish = self.world.script.finish(request, output)
            stream = self.streams.setdefault(self.owners[grant_id], asyncio.Queue())
            scored = [self.world.script.logprobs(request, token) for token in new]
            logprobs = tuple(entry for entry in scored if entry is not None)
            position = len(output) - len(new)
            stream.put_nowait(
                [TokenChunk(request.request_id, new, finish, logprobs=logprobs, position=position)]
            )
            num_new += len(new)
            if num_new == self.error_after:
                self.error_after = None
                failure = TokenChunk(request.request_id, (), error="step failed")
                stream.put_nowait([failure._replace(cause=self.error_cause)])
                return
            if num_new == self.preempt_after:
                self.preempt_after = None
                stream.put_nowait(
                    [TokenChunk(request.request_id, (), error="no page", preempted=True)]
                )
                return
            if self.die_after is not None and num_new >= self.die_after:
                self.die()
                return

    def die(self) -> None:
        """Like kill -9: all calls and the token stream break, the grants are gone."""
        self.dead = True
        for stream in self.streams.values():
            stream.put_nowait(NodeLost(f"{self.info.node_id} died"))
        for task in self.generating.values():
            task.cancel()
        self.grants.clear()
        self.free_pages = self.info.num_pages[FULL]

    async def tokens(self, router_id: str, number: int = 0) -> AsyncIterator[list[TokenChunk]]:
        stream = self.streams.setdefault(router_id, asyncio.Queue())
        while True:
            step = await stream.get()
            if isinstance(step, Exception):
                raise step
            yield step


class ScriptedCluster:
    def __init__(self, world: World) -> None:
        self.world = world
        self.targets = {Role.PREFILL: 1, Role.DECODE: 1}

    async def state(self) -> ClusterState:
        nodes = [*self.world.prefills.values(), *self.world.decodes.values()]
        entries = [
            NodeEntry(node.info.node_id, node.role, NodeState.READY, "here") for node in nodes
        ]
        return ClusterState(dict(self.targets), tuple(entries))

    async def routers(self) -> list[RouterStatus]:
        return [self.world.service.status(), *self.world.other_routers]

    async def scale(self, role: Role, replicas: int) -> None:
        if replicas > 8:
            raise InvalidRequest(f"replicas is {replicas}, expected at most 8", param="replicas")
        self.targets[role] = replicas

    async def drain(self, node_id: str) -> None:
        if node_id not in {**self.world.prefills, **self.world.decodes}:
            raise InvalidRequest(f"node: no node {node_id!r}", param="node")
        self.world.draining.add(node_id)
        self.world.publish()


class RawRequest:
    """One HTTP request into the app, whose client can leave at any moment.

    max_unread: messages that the server can send before it has to wait for the client; 0: all.
    """

    def __init__(self, app, path: str, body: dict, max_unread: int) -> None:
        self.messages: asyncio.Queue = asyncio.Queue(max_unread)
        self._left = asyncio.Event()
        self._body: bytes | None = json.dumps(body).encode()
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
            "path": path, "raw_path": path.encode(), "query_string": b"", "scheme": "http",
            "headers": [(b"content-type", b"application/json")], "client": ("test", 1),
            "server": ("test", 80), "root_path": "",
        }  # fmt: skip
        self.task = asyncio.create_task(app(scope, self._receive, self.messages.put))

    async def _receive(self) -> dict:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def leave(self) -> None:
        self._left.set()
        await self.task


class World:
    """Scripted nodes and a router over them. Call `await world.open()` once nodes are added."""

    def __init__(self, folder: Path, **settings: dict) -> None:
        self.counter = itertools.count()
        self.prefills: dict[str, ScriptedPrefill] = {}
        self.decodes: dict[str, ScriptedDecode] = {}
        self.draining: set[str] = set()
        self.other_routers: list[RouterStatus] = []
        self.config = self.configure(folder, **settings)
        self.service = RouterService(self.config, ScriptedCluster(self))
        self.tokenizer = self.service.checkpoint.tokenizer
        self.script = Script(self.service.checkpoint.vocab_size)
        self.app = create_app(self.service)
        self._change = asyncio.Event()
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=30)

    @staticmethod
    def configure(folder: Path, **settings: dict) -> SluiceConfig:
        return parse_config({"model": {"path": str(folder), "name": "tiny"}, **settings})

    def add_prefill(self, node_id: str = "prefill-0", num_pages: int = 64, **limits):
        node = ScriptedPrefill(self, node_id, num_pages=num_pages, **limits)
        self.prefills[node_id] = node
        self.publish()
        return node

    def add_decode(self, node_id: str = "decode-0", num_pages: int = 64, **limits):
        node = ScriptedDecode(self, node_id, num_pages=num_pages, **limits)
        self.decodes[node_id] = node
        self.publish()
        return node

    def remove(self, node_id: str) -> None:
        self.prefills.pop(node_id, None)
        self.decodes.pop(node_id, None)
        self.publish()

    def publish(self) -> None:
        self.service.set_nodes(
            list(self.prefills.values()), list(self.decodes.values()), self.draining
        )

    def changed(self) -> None:
        self._change.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once the condition holds; the loop turns in between."""
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0)

    async def turns(self, count: int = 50) -> None:
        """Let the loop turn: whatever is about to happen has happened."""
        for _ in range(count):
            await asyncio.sleep(0)

    async def complete(self, prompt="the cat", **fields) -> httpx.Response:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, **fields}
        return await self.http.post("/v1/completions", json=body)

    async def chat(self, content="the cat", **fields) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 8, **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    def raw(self, path: str = "/v1/completions", *, max_unread: int = 0, **fields) -> RawRequest:
        body = {"model": "tiny", "prompt": "the cat", "max_tokens": 8, **fields}
        return RawRequest(self.app, path, body, max_unread)

    def ids(self, prompt: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(prompt).ids)

    def expected(self, prompt="the cat", max_tokens: int = 8) -> str:
        """The text of an undisturbed answer, decoded in one go."""
        ids = self.ids(prompt) if isinstance(prompt, str) else tuple(prompt)
        return self.tokenizer.decode(list(self.script.reference(ids, max_tokens)))

    def seen_requests(self) -> list[GenerateRequest]:
        """The requests that reach the first prefill node, from now on."""
        node, seen = next(iter(self.prefills.values())), []
        run = node.run

        async def noted(request: GenerateRequest, grant: PageGrant) -> PrefillResult:
            seen.append(request)
            return await run(request, grant)

        node.run = noted
        return seen

    def quiescent(self) -> bool:
        """Nobody waits, no node does anything, every page and credit is back."""
        live_decodes = [node for node in self.decodes.values() if not node.dead]
        return (
            len(self.service.queue) == 0
            and all(node.ledger.running == 0 for node in self.service.nodes)
            and all(sum(promised_pages(node.ledger).values()) == 0 for node in self.service.nodes)
            and not any(node.at_work for node in self.prefills.values())
            and not any(node.grants for node in live_decodes)
            and all(node.free_pages == node.info.num_pages[FULL] for node in live_decodes)
        )


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny")


@pytest.fixture
async def make_world(checkpoint):
    """A World; keyword arguments are sections of the config. Closed at the end of the test."""
    worlds = []

    async def make(*, folder: Path = checkpoint, **settings: dict) -> World:
        worlds.append(world := World(folder, **settings))
        await world.service.start()
        return world

    yield make
    for world in worlds:
        await world.http.aclose()
        await world.service.stop(limit_s=0)


@pytest.fixture
async def world(make_world) -> World:
    """One prefill and one decode node."""
    world = await make_world()
    world.add_prefill()
    world.add_decode()
    return world


@pytest.fixture(scope="session")
def checkpoint_writer():
    return write_checkpoint


@pytest.fixture
def events():
    """Parse a server-sent event stream: the JSON events, and whether it ended with [DONE]."""

    def parse(text: str) -> tuple[list[dict], bool]:
        lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        done = lines[-1:] == ["[DONE]"]
        return [json.loads(line) for line in (lines[:-1] if done else lines)], done

    return parse


@pytest.fixture(scope="session")
def v4_folder(tmp_path_factory) -> Path:
    """A checkpoint without a template, whose small tokenizer has DeepSeek-V4's control tokens."""
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "v4", chat_template=None)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([V4_BOS, V4_EOS])
    tokenizer.add_tokens(list(CONTROL_TOKENS))  # as in the real one, most are not marked special
    tokenizer.save(str(folder / "tokenizer.json"))
    write_config(folder, tokenizer.get_vocab_size(), tokenizer.token_to_id(V4_EOS))
    return folder


@pytest.fixture
async def v4(make_world, v4_folder):
    world = await make_world(folder=v4_folder)
    world.add_prefill(num_pages=256, max_model_len=4096)
    world.add_decode(num_pages=256, max_model_len=4096)
    return world
