"""Real nodes and the real dispatcher, with a post office and a clock in between that tests hold.

Everything runs in one thread: the event loop's time and the nodes' clocks are `World.now`, nodes
turn when they are told to, and every call, answer, list of tokens and write waits in `mail` until
somebody delivers, repeats or loses it.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import selectors

from sums_model import SumsModel, expected_tokens

from sluice.decode_node.client import AsyncDecode
from sluice.decode_node.node import DecodeNode
from sluice.engine.runner import Runner
from sluice.prefill_node.client import AsyncPrefill
from sluice.prefill_node.node import PrefillNode
from sluice.protocol.config import parse_config
from sluice.protocol.messages import (
    GenerateRequest,
    Role,
    SamplingParams,
    SluiceError,
    TransferFailed,
)
from sluice.router.common.background import Background
from sluice.router.dispatch.dispatcher import Dispatcher
from sluice.router.dispatch.nodes import Nodes
from sluice.router.dispatch.policy import Policy
from sluice.router.dispatch.queue import WaitingQueue
from sluice.transfer.local_transport import LocalTransport
from sluice.transfer.notification import Notification

LEASE_S = 4.0
SLICE_S = 0.05  # in which a node turns once
CONFIG = parse_config(
    {
        "model": {"path": "nowhere", "max_model_len": 256},
        "prefill": {"cache_bytes": 14_000, "max_running_requests": 3, "max_batch_tokens": 24},
        "decode": {"cache_bytes": 14_000, "max_running_requests": 3},
        "transfer": {"backend": "local", "lease_s": LEASE_S, "checksum": "full"},
    }
)
TAGS = itertools.count()


class _Selector(selectors.SelectSelector):
    """Ends the loop's run where it would wait: time passes only in `World.pass_time`."""

    loop = None

    def select(self, timeout=None):
        if timeout is None or timeout > 0:
            self.loop.stop()
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self):
        selector = _Selector()
        super().__init__(selector)
        selector.loop = self
        self.now = 100.0

    def time(self):
        return self.now


@dataclasses.dataclass(eq=False)
class Letter:
    """Something on its way. `deliver` may be called more than once."""

    what: str
    deliver: object


class Remote:
    """What both kinds of node look like through the mail."""

    def __init__(self, world, node, face):
        self.world, self.node, self.face = world, node, face
        self.info = node.info
        self.frozen = False

    async def _call(self, what, function):
        """Send a letter; wait for the answer, which is another letter."""
        answer = self.world.loop.create_future()

        def arrive():
            self.world.loop.create_task(work())

        async def work():
            try:
                value, error = await function(), None
            except Exception as raised:  # noqa: BLE001 - the answer
                value, error = None, raised
            self.world.send(f"answer to {what}", lambda: settle(value, error))

        def settle(value, error):
            if not answer.done():
                answer.set_exception(error) if error else answer.set_result(value)

        self.world.send(f"{what} -> {self.info.node_id}", arrive)
        return await answer

    def status(self, router_id, cache_version=None, *, with_metrics=True):
        return self._call(
            "status",
            lambda: self.face.status(router_id, cache_version, with_metrics=with_metrics),
        )


class RemotePrefill(Remote):
    def run(self, request, grant):
        return self._call(f"run {request.request_id}", lambda: self.face.run(request, grant))

    def abort(self, request_id):
        return self._call(f"abort {request_id}", lambda: self.face.abort(request_id))


class RemoteDecode(Remote):
    def reserve(self, request):
        return self._call(f"reserve {request.request_id}", lambda: self.face.reserve(request))

    def release(self, request_id, *, in_flight):
        return self._call(
            f"release {request_id} {in_flight}",
            lambda: self.face.release(request_id, in_flight=in_flight),
        )

    async def tokens(self, router_id, number=0):
        arrived = asyncio.Queue()

        async def follow():
            async for step in self.face.tokens(router_id, number):
                self.world.send(
                    f"tokens {[(c.request_id, c.position) for c in step]}",
                    lambda step=step: arrived.put_nowait(step),
                )
            self.world.send("end of tokens", lambda: arrived.put_nowait(None))

        following = self.world.loop.create_task(follow())
        try:
            while (step := await arrived.get()) is not None:
                yield step
        finally:
            following.cancel()


class MailTransport(LocalTransport):
    """Writes are letters too. One that was given up may land for a lease, as over TCP."""

    world = None

    def __init__(self, name):
        super().__init__(name)
        self._pending = {}  # handle -> "flying", "landed" or "failed"
        self._abandoned = {}  # handle -> until when it may land
        self._landed = set()

    def post(self, peer, writes, notification):
        handle = next(self._handles)
        self._pending[handle] = "flying"
        self.world.send(
            f"write {handle}", lambda: self._land(handle, peer, tuple(writes), notification)
        )
        return handle

    def _land(self, handle, peer, writes, notification):
        if self.world.loop.now > self._abandoned.get(handle, float("inf")):
            return
        if handle not in self._landed:
            self._landed.add(handle)
            self.world.check_inside_grant(peer, writes, notification)
            with contextlib.suppress(TransferFailed):  # its peer was forgotten meanwhile
                super().post(peer, writes, notification)
            if self._pending.get(handle) == "flying":
                self._pending[handle] = "landed"
        else:  # again: what a transport may repeat is the notification
            with contextlib.suppress(TransferFailed):
                super().post(peer, (), notification)

    def fail(self):
        """Let a write that is in flight fail, though its bytes may still land."""
        for handle, state in self._pending.items():
            if state == "flying":
                self._pending[handle] = "failed"
                return

    def poll(self, handle):
        state = self._pending[handle]
        if state == "failed":
            self.abandon(handle)
            raise TransferFailed("the mail has lost a write")
        if state == "landed":
            del self._pending[handle]
        return state == "landed"

    def abandon(self, handle):
        if self._pending.pop(handle, None) is not None:
            self._abandoned[handle] = self.world.loop.now + LEASE_S


class World:
    def __init__(self, num_prefill=1, num_decode=1):
        self.loop = _Loop()
        asyncio.set_event_loop(self.loop)
        self.mail: list[Letter] = []
        self.violations: list[str] = []
        self.tasks: dict[str, asyncio.Task] = {}
        self.got: dict[str, list[int]] = {}
        self.requests: dict[str, GenerateRequest] = {}
        self.whole: set[str] = set()
        self.errors: dict[str, SluiceError] = {}
        self._transports = {}
        self.prefills = [self._prefill(f"prefill-{i}") for i in range(num_prefill)]
        self.decodes = [self._decode(f"decode-{i}") for i in range(num_decode)]
        self.run(self._start_router)
        for prefill, decode in itertools.product(self.prefills, self.decodes):
            met = prefill.node.connect(decode.info)
            prefill.node.turn_here()
            met.result(0)

    @property
    def nodes(self):
        return [*self.prefills, *self.decodes]

    def _transport(self, node_id):
        transport = MailTransport(f"{node_id}.{next(TAGS)}")
        transport.world = self
        self._transports[transport.name] = transport
        return transport

    def _runner(self, role):
        section = CONFIG.role(role)
        tokens = section.max_batch_tokens + section.max_running_requests
        return Runner(
            SumsModel(),
            section,
            max_step_tokens=tokens,
            max_model_len=256,
            resumes=role is Role.PREFILL,
        )

    def _clock(self):
        return self.loop.now

    def _prefill(self, node_id):
        return self._remote(node_id, Role.PREFILL, PrefillNode, AsyncPrefill, RemotePrefill)

    def _decode(self, node_id):
        return self._remote(node_id, Role.DECODE, DecodeNode, AsyncDecode, RemoteDecode)

    def _remote(self, node_id, role, node_of, face_of, remote_of):
        transport = self._transport(node_id)
        node = node_of(self._runner(role), transport, CONFIG, node_id, "", clock=self._clock)
        remote = remote_of(self, node, face_of(node))
        remote.transport = transport
        return remote

    def _start_router(self):
        self.background = Background()
        self.view = Nodes(
            router_id="router",
            lease_s=LEASE_S,
            shared=False,
            background=self.background,
            on_change=lambda: self.queue.wake(),
        )
        self.queue = WaitingQueue(
            self.view, Policy("cache_aware", "cache_aware", 1), max_waiting=99, patience_s=LEASE_S
        )
        self.dispatcher = Dispatcher(
            self.queue,
            router_id="router",
            background=self.background,
            on_retry=lambda reason: None,
        )
        self.view.update(self.prefills, self.decodes, ())

    def run(self, function):
        """Call it inside the event loop, then let everything go on that need not wait."""
        self.loop.call_soon(function)
        self.settle()

    def settle(self):
        self.loop.run_forever()

    def send(self, what, deliver):
        self.mail.append(Letter(what, deliver))

    def deliver(self, letter, *, keep=False):
        if not keep:
            self.mail.remove(letter)
        self.run(letter.deliver)

    def begin(self, name, prompt, max_tokens, *, local=False):
        request = GenerateRequest(name, tuple(prompt), SamplingParams(max_tokens, temperature=0.0))
        self.requests[name], self.got[name] = request, []

        async def follow():
            try:
                async with contextlib.aclosing(self.dispatcher.generate(request)) as stream:
                    async for tokens in stream:
                        self.got[name] += tokens.token_ids
                self.whole.add(name)
            except SluiceError as error:  # what the client would be told
                self.errors[name] = error

        def start():
            self.dispatcher._local_below_tokens = 256 if local else 0
            self.tasks[name] = self.loop.create_task(follow())

        self.run(start)

    def cancel(self, name):
        self.run(self.tasks[name].cancel)

    def pass_time(self, seconds, *, calm=False):
        """Let nodes work and timers fire; calm: the mail is delivered at once, and in order."""
        end = self.loop.now + seconds
        while self.loop.now < end:
            self.loop.now += SLICE_S
            self.settle()
            for node in self.nodes:
                if not node.frozen:
                    self.turn(node)
            for letter in list(self.mail) if calm else ():
                self.deliver(letter)

    def turn(self, node):
        node.node.turn_here()
        self.settle()

    def check_inside_grant(self, peer, writes, notification):
        """Every byte must land in a page that the grant holds at this moment."""
        grant_id = Notification.decode(notification).grant_id
        decode = next(d for d in self.decodes if d.transport.name == peer)
        manager, pools = decode.node.runner.manager, decode.node.runner.pools
        try:
            held = manager.page_tables(grant_id)
        except KeyError:
            held = {}
        for copy in writes:
            spec = pools[copy.target].spec
            own = set(held[spec.table].pages) if spec.table in held else set()
            starts, sizes = copy.runs.target_offset, copy.runs.num_bytes
            for first, last in zip(starts, starts + sizes - 1, strict=True):
                for page in range(first // spec.page_bytes, last // spec.page_bytes + 1):
                    if page not in own:
                        self.violations.append(f"{grant_id}: {copy.target} page {page}")

    def check_answers(self):
        """Whatever was told is right, and an answer that has ended without an error is whole."""
        assert not self.violations, self.violations
        for name, request in self.requests.items():
            expected = expected_tokens(request.prompt_token_ids, request.sampling.max_tokens)
            got = tuple(self.got[name])
            assert got == expected[: len(got)], f"{name}: {got}, expected {expected}"
            if name in self.whole:
                assert got == expected, f"{name} ended after {len(got)} of {len(expected)} tokens"

    def calm_down(self):
        """Let everything arrive, work and run out."""
        for node in self.nodes:
            node.frozen = False
        for _ in range(60):
            self.pass_time(LEASE_S / 4, calm=True)
            if all(task.done() for task in self.tasks.values()):
                break
        self.pass_time(8 * LEASE_S, calm=True)

    def check_quiescent(self):
        open_requests = [name for name, task in self.tasks.items() if not task.done()]
        assert not open_requests, f"{open_requests} never ended; in the mail: {self.mail}"
        assert len(self.queue) == 0
        for node in self.nodes:
            used = {pool: pages["used"] for pool, pages in node.node.runner.manager.usage().items()}
            assert not any(used.values()), f"{node.info.node_id} still holds {used}"
            node.node.runner.manager.check()
            assert self.view.find(node.info.node_id).ledger.running == 0

    def close(self):
        self.run(lambda: self.view.close("the world ends"))
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.settle()
        for transport in self._transports.values():
            transport.close()
        self.loop.close()
