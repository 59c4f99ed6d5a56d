"""The queue's promises, over random clusters and requests, and what a look at it costs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from ledgers import promised_pages

from sluice.cache.spec import Full, PoolSpec
from sluice.protocol.messages import GenerateRequest, NodeInfo, Role, SamplingParams, Unavailable
from sluice.router.common.background import Background
from sluice.router.dispatch.nodes import Nodes
from sluice.router.dispatch.policy import COMMON, Policy
from sluice.router.dispatch.prompt import Need, Prompt
from sluice.router.dispatch.queue import Pair, WaitingQueue
from sluice.router.dispatch.routed_node import RoutedNode

PAGE = 16
SPEC = PoolSpec("pages", (0,), (1,), "float32", 1, PAGE, Full())
POLICIES = [*COMMON, "cache_aware"]
RANDOM = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    max_examples=60,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # making them small takes minutes
)


@dataclass(frozen=True)
class Size:
    """Of a node: what it can hold, and for prefill how many tokens a step computes."""

    num_pages: int
    max_requests: int
    step_tokens: int = PAGE


class Silent:
    """A node that says nothing: what counts here is what the router has promised of it."""

    def __init__(self, role: Role, number: int, size: Size) -> None:
        self.info = NodeInfo(
            f"{role.value}-{number}", "1", role, "here", "model", (SPEC,), 10_000,
            size.max_requests, size.step_tokens, {SPEC.table: size.num_pages},
        )  # fmt: skip

    async def status(self, *_, **__):
        await asyncio.Event().wait()

    async def tokens(self, _, number=0):
        await asyncio.Event().wait()
        yield []


class Asked:
    """A request and its wait. `at`: its place among all that ever came."""

    def __init__(self, cluster: Cluster, at: int, num_tokens: int, max_tokens: int, local: bool):
        token_ids = tuple(range(at * 1000, at * 1000 + num_tokens))  # nothing in common
        request = GenerateRequest(f"r{at}", token_ids, SamplingParams(max_tokens), local=local)
        self.at, self.local, self.prompt = at, local, Prompt(request)
        ticket = cluster.queue.ticket()
        self.waiting = asyncio.create_task(cluster.queue.pair_for(request, ticket))

    @property
    def pair(self) -> Pair:
        return self.waiting.result()

    def fits_wherever(self, other: Asked) -> bool:
        """Whether it needs no more than the other, of anything."""
        return (
            self.local == other.local
            and self.prompt.num_tokens <= other.prompt.num_tokens
            and self.prompt.on_decode.start_tokens <= other.prompt.on_decode.start_tokens
            and self.prompt.on_decode.max_tokens <= other.prompt.on_decode.max_tokens
        )


class Cluster:
    """A queue over silent nodes, and a client who knows what waits and what runs, in order."""

    def __init__(
        self,
        prefill: list[Size],
        decode: list[Size],
        policies: tuple[str, str],
        max_waiting: int,
    ) -> None:
        self.nodes = Nodes(
            router_id="router",
            lease_s=1000,
            shared=False,
            background=Background(),
            on_change=lambda: self.queue.wake(),
        )
        policy = Policy(*policies, seed=0)
        self.queue = WaitingQueue(self.nodes, policy, max_waiting=max_waiting, patience_s=1000)
        self._clients = (
            [Silent(Role.PREFILL, number, size) for number, size in enumerate(prefill)],
            [Silent(Role.DECODE, number, size) for number, size in enumerate(decode)],
        )
        self.draining: set[str] = set()
        self.publish()
        self.num_asked = 0
        self.waiting: list[Asked] = []
        self.running: list[Asked] = []

    def publish(self) -> None:
        self.nodes.update(*self._clients, self.draining)

    def ask(self, num_tokens: int, max_tokens: int, *, local: bool = False) -> Asked:
        asked = Asked(self, self.num_asked, num_tokens, max_tokens, local)
        self.num_asked += 1
        self.waiting.append(asked)
        return asked

    def hand_over(self, asked: Asked) -> None:
        """Its prompt is computed and on decode."""
        if asked.pair.prefill is not None:
            asked.pair.prefill.give_back(asked.prompt.request.request_id)

    def end(self, asked: Asked) -> None:
        self.running.remove(asked)
        for node in asked.pair.nodes:
            node.give_back(asked.prompt.request.request_id)

    async def cancel_all(self) -> None:
        for asked in self.waiting:
            asked.waiting.cancel()
        await asyncio.gather(*(a.waiting for a in self.waiting), return_exceptions=True)

    async def settle(self) -> None:
        """Every change has been looked at; who could start runs, in order."""
        for _ in range(3):
            await asyncio.sleep(0)
            while not self.queue.settled:
                await asyncio.sleep(0)
        over, self.waiting = self.waiting, []
        for asked in over:
            if not asked.waiting.done():
                self.waiting.append(asked)
            elif not asked.waiting.cancelled() and self._started(asked):
                self.running.append(asked)
                assert not [a for a in self.waiting if a.fits_wherever(asked)], "overtaken"

    def _started(self, asked: Asked) -> bool:
        """Else it was turned away, for which there has to be a reason."""
        error = asked.waiting.exception()
        if error is not None:
            assert isinstance(error, Unavailable)
            needs = {Role.DECODE: asked.prompt.on_decode}
            needs |= {} if asked.local else {Role.PREFILL: asked.prompt.on_prefill}
            assert not all(
                any(node.max_tokens >= need.max_tokens for node in self._of(role))
                for role, need in needs.items()
            )
        return error is None

    def with_room(self, role: Role, need: Need) -> int:
        return sum(
            node.max_tokens >= need.max_tokens and node.room_tokens() >= need.start_tokens
            for node in self._of(role)
        )

    def _of(self, role: Role) -> Sequence[RoutedNode]:
        return self.nodes.prefill if role is Role.PREFILL else self.nodes.decode

    def check(self) -> None:
        """Who waits, waits because those before have claimed what there is, one node each."""
        for num_before, asked in enumerate(self.waiting):
            free = self.with_room(Role.DECODE, asked.prompt.on_decode)
            if not asked.local:
                free = min(free, self.with_room(Role.PREFILL, asked.prompt.on_prefill))
            assert free <= num_before, f"{asked.at} waits without need"
        for node in self.nodes:
            assert all(
                0 <= n <= node.info.num_pages[t] for t, n in promised_pages(node.ledger).items()
            )
            names = [a.prompt.request.request_id for a in self.running if node in a.pair.nodes]
            assert node.ledger.running <= min(len(names), node.info.max_running_requests)


@contextlib.asynccontextmanager
async def cluster_of(
    prefill: list[Size],
    decode: list[Size],
    policies: tuple[str, str] = ("cache_aware", "cache_aware"),
    max_waiting: int = 10_000,
) -> AsyncIterator[Cluster]:
    cluster = Cluster(prefill, decode, policies, max_waiting)
    try:
        yield cluster
        await cluster.cancel_all()
        for asked in list(cluster.running):
            cluster.end(asked)
        for node in cluster.nodes:
            assert node.ledger.running == 0 and not any(promised_pages(node.ledger).values())
            assert node.ledger.outstanding_tokens == 0
    finally:
        await cluster.cancel_all()
        cluster.nodes.close("the test is over")
        await asyncio.sleep(0)


PREFILL_SIZES = st.lists(
    st.builds(Size, st.integers(4, 8), st.integers(1, 3), st.integers(PAGE, 3 * PAGE)),
    min_size=1,
    max_size=4,
)
DECODE_SIZES = st.lists(
    st.builds(Size, st.integers(4, 12), st.integers(1, 4)), min_size=1, max_size=4
)
TWO_POLICIES = st.tuples(st.sampled_from(POLICIES), st.sampled_from(POLICIES))


@given(PREFILL_SIZES, DECODE_SIZES, TWO_POLICIES, st.data())
@RANDOM
async def test_nobody_waits_without_need_or_is_overtaken_and_no_credit_is_lost(
    prefill, decode, policies, data
):
    async with cluster_of(prefill, decode, policies) as cluster:
        for _ in range(data.draw(st.integers(20, 40))):
            act(cluster, data.draw)
            await cluster.settle()
            cluster.check()


def act(cluster: Cluster, draw) -> None:
    """One thing that happens."""
    kinds = ["ask"] * 5 + ["drain"]
    kinds += ["leave"] * bool(cluster.waiting) + ["end", "end", "hand over"] * bool(cluster.running)
    match draw(st.sampled_from(kinds)):
        case "ask":
            length = st.integers(1, PAGE) | st.integers(2 * PAGE, 5 * PAGE)
            cluster.ask(draw(length), draw(length), local=draw(st.integers(0, 4)) == 0)
        case "leave":
            draw(st.sampled_from(cluster.waiting)).waiting.cancel()
        case "end":
            cluster.end(draw(st.sampled_from(cluster.running)))
        case "hand over":
            cluster.hand_over(draw(st.sampled_from(cluster.running)))
        case "drain":
            cluster.draining ^= {draw(st.sampled_from([node.node_id for node in cluster.nodes]))}
            cluster.publish()


@given(PREFILL_SIZES, DECODE_SIZES, TWO_POLICIES, st.lists(st.booleans(), min_size=1))
@RANDOM
async def test_a_large_request_starts_however_many_small_ones_follow(
    prefill, decode, policies, local
):
    """It starts by the time that all have ended who ran or waited when it came, some times over."""
    num_tokens = min(PAGE * max(size.num_pages for size in decode), PAGE * 8)
    async with cluster_of(prefill, decode, policies) as cluster:
        for _ in range(20):
            cluster.ask(1, 1)
        large = cluster.ask(num_tokens // 2, num_tokens // 2)
        await cluster.settle()
        for num_ended in itertools.count():
            if large.waiting.done():
                return
            assert num_ended < 5 * 21, "starved"
            for asked in cluster.running:
                cluster.hand_over(asked)
            cluster.end(cluster.running[0])
            for _ in range(2):
                cluster.ask(1, PAGE, local=local[num_ended % len(local)])
            await cluster.settle()


async def cost(cluster: Cluster, change) -> int:
    """The router's calls until the change has been looked at: as seconds, without the noise."""
    num_calls = 0

    def count(frame, event, _) -> None:
        nonlocal num_calls
        code = frame.f_code
        num_calls += (
            event == "call" and "/router/" in code.co_filename and code.co_filename != __file__
            and code.co_name != "settled"
        )  # fmt: skip

    sys.setprofile(count)
    try:
        change()
        while not cluster.queue.settled:
            await asyncio.sleep(0)
    finally:
        sys.setprofile(None)
    return num_calls


@contextlib.asynccontextmanager
async def busy_cluster(num_nodes: int, num_waiting: int) -> AsyncIterator[Cluster]:
    """No prefill node has any room; decode has plenty."""
    sizes = [Size(2, 1)] * num_nodes, [Size(200, 100)] * num_nodes
    async with cluster_of(*sizes) as cluster:
        for _ in range(num_nodes + num_waiting):
            cluster.ask(PAGE, PAGE)
        await cluster.settle()
        assert (len(cluster.running), len(cluster.waiting)) == (num_nodes, num_waiting)
        yield cluster


async def test_all_changes_of_a_turn_are_one_look():
    async with busy_cluster(10, 50) as cluster:
        once = await cost(cluster, cluster.queue.wake)
        often = await cost(cluster, lambda: [cluster.queue.wake() for _ in range(100)])
    assert often < once + 100 * 10


@pytest.mark.parametrize(
    "change", [lambda c: c.queue.wake(), lambda c: c.hand_over(c.running[0])], ids=["none", "one"]
)
async def test_a_look_costs_nodes_not_nodes_times_requests(change):
    costs = []
    for num_nodes, num_waiting in ((10, 20), (40, 20), (40, 320)):
        async with busy_cluster(num_nodes, num_waiting) as cluster:
            costs.append(await cost(cluster, lambda of=cluster: change(of)))
    assert costs[1] < 5 * costs[0]  # four times the nodes
    assert costs[2] < 2 * costs[1]  # sixteen times the requests


async def test_a_look_at_a_burst_is_cut_short_and_nobody_is_refused_meanwhile():
    sizes = [Size(50, 50, 1000)] * 20, [Size(200, 100)] * 20
    async with cluster_of(*sizes, max_waiting=0) as cluster:
        burst = [cluster.ask(PAGE, PAGE) for _ in range(600)]
        num_started = [0]
        while num_started[-1] < len(burst):
            await asyncio.sleep(0)
            num_started.append(sum(node.ledger.running for node in cluster.nodes.decode))
        steps = [after - before for before, after in itertools.pairwise(num_started)]
        assert max(steps) < len(burst) / 2
        await cluster.settle()
        assert cluster.running == burst
