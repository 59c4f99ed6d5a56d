"""What nodes and waiting requests cost the router: looks at its queue, a burst, and heartbeats.

    python -m sluice.benchmarks.router_scale [--nodes 8 25 50 100]

Each figure is for so many prefill and as many decode nodes, simulated in the router's process: they
compute nothing, answer when they are told to, and nothing goes over a wire. CPU time is of the
whole process, the simulation included.

    look       milliseconds of CPU time for one look at 200 waiting requests of 4,096 tokens, with
               every prefill node busy
    start      for one request that a node has room for, from its arrival to its pair
    burst      400 requests of 8,192 tokens at once, then 25 a second, to nodes that compute 100 a
               second whatever their number: seconds until nobody waits (5.3 would be perfect), and
               the part of a core that is taken from the burst on
    idle       part of a core that the heartbeats of all nodes take, and the bytes of one, pickled,
               with metrics and without; over Ray, making and reading them comes on top

Exit code 1 if a burst takes 10 s, or 30 % of a core, up to 50 nodes of each role.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import logging
import pickle
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from sluice.benchmarks.provenance import RESULTS, print_provenance, provenance, write_csv
from sluice.cache.spec import tables_of
from sluice.engine.metrics import NodeMetrics
from sluice.model.presets import preset_pools
from sluice.protocol.messages import (
    FinishReason,
    GenerateRequest,
    NodeInfo,
    NodeStatus,
    PageGrant,
    PrefillResult,
    Role,
    SamplingParams,
    TokenChunk,
)
from sluice.router.common.background import Background
from sluice.router.dispatch.dispatcher import Dispatcher
from sluice.router.dispatch.nodes import Nodes
from sluice.router.dispatch.policy import Policy
from sluice.router.dispatch.queue import WaitingQueue

SPECS = preset_pools("v4-flash")
NUM_WAITING, WAITING_TOKENS = 200, 4_096
BURST, BURST_TOKENS = 400, 8_192
OFFERED_PER_S, CAPACITY_PER_S = 25, 100
COMPUTING_S = 1.0  # of a prompt, and then of its output
MAX_DRAIN_S, MAX_CPU, GOAL_NODES = 10.0, 0.3, 50
NUM_OUTPUT_TOKENS = 16


@dataclass(frozen=True)
class Scale:
    """A line of the CSV. nodes: of each role."""

    nodes: int
    look_ms: float
    start_ms: float
    burst_drained_s: float
    burst_cpu: float
    idle_cpu: float
    heartbeat_bytes: int
    heartbeat_with_metrics_bytes: int


class SimulatedNode:
    """A node that has pages for everything and computes for COMPUTING_S."""

    def __init__(self, role: Role, number: int, num_at_once: int) -> None:
        prefill = role is Role.PREFILL
        self.info = NodeInfo(
            node_id=f"{role.value}-{number}",
            incarnation="1",
            role=role,
            host="here",
            fingerprint="simulated",
            specs=SPECS,
            max_model_len=1 << 20,
            max_running_requests=64 if prefill else 256,
            # Prompts are sent while fewer than two such batches are there.
            max_batch_tokens=num_at_once * BURST_TOKENS // 2,
            num_pages=dict.fromkeys(tables_of(SPECS), 1 << 20),
        )
        self._pools = {spec.name: {"free": 1, "used": 1, "cached": 1} for spec in SPECS}
        self._metrics = NodeMetrics()
        for spec in SPECS:
            self._metrics.count_sent(spec.name, pages=1, num_bytes=1, descriptors=1)

    async def status(
        self, router_id: str, cache_version: int | None = None, *, with_metrics: bool = True
    ) -> NodeStatus:
        metrics = self._metrics.families() if with_metrics else ()
        return NodeStatus(self.info.node_id, 1, 0, self._pools, metrics, clock_s=time.monotonic())


class SimulatedDecode(SimulatedNode):
    """Grants everything; gives all tokens at once, when it has computed them."""

    def __init__(self, number: int, num_at_once: int) -> None:
        super().__init__(Role.DECODE, number, num_at_once)
        self._grants = itertools.count(1)
        self._steps: asyncio.Queue[list[TokenChunk]] = asyncio.Queue()

    async def reserve(self, request: GenerateRequest) -> PageGrant:
        number, num_tokens = next(self._grants), len(request.token_ids)
        return PageGrant(
            f"{self.info.node_id}-{number}", number, self.info.node_id, "1", request.request_id,
            num_tokens, {}, 60.0,
        )  # fmt: skip

    async def release(self, request_id: str, *, in_flight: bool) -> None:
        """Nothing is kept."""

    def begin(self, request: GenerateRequest) -> None:
        """The prompt's pages have come."""
        tokens = tuple(range(1, NUM_OUTPUT_TOKENS))
        chunk = TokenChunk(request.request_id, tokens, FinishReason.LENGTH, position=1)
        asyncio.get_running_loop().call_later(COMPUTING_S, self._steps.put_nowait, [chunk])

    async def tokens(self, router_id: str, number: int = 0) -> AsyncIterator[list[TokenChunk]]:
        while True:
            yield await self._steps.get()


class SimulatedPrefill(SimulatedNode):
    def __init__(self, number: int, num_at_once: int, decode: dict[str, SimulatedDecode]) -> None:
        super().__init__(Role.PREFILL, number, num_at_once)
        self._decode = decode

    async def run(self, request: GenerateRequest, grant: PageGrant) -> PrefillResult:
        await asyncio.sleep(COMPUTING_S)
        self._decode[grant.node_id].begin(request)
        return PrefillResult(request.request_id, 0, None)

    async def abort(self, request_id: str) -> None:
        """Nothing is under way."""


class Router:
    """The router behind its border, over simulated nodes."""

    def __init__(self, num_nodes: int) -> None:
        self.background = Background()
        self.nodes = Nodes(
            router_id="router",
            lease_s=30.0,
            shared=False,
            background=self.background,
            on_change=lambda: self.queue.wake(),
        )
        policy = Policy("cache_aware", "cache_aware", seed=0)
        self.queue = WaitingQueue(self.nodes, policy, max_waiting=10_000, patience_s=30.0)
        self.dispatcher = Dispatcher(
            self.queue,
            router_id="router",
            background=self.background,
            on_retry=lambda reason: sys.exit(f"nothing fails here, but: {reason}"),
        )
        at_once = max(1, CAPACITY_PER_S // num_nodes)
        decode = {f"decode-{i}": SimulatedDecode(i, at_once) for i in range(num_nodes)}
        prefill = [SimulatedPrefill(i, at_once, decode) for i in range(num_nodes)]
        self.nodes.update(prefill, [*decode.values()], ())

    async def settle(self) -> None:
        while not self.queue.settled:
            await asyncio.sleep(0.001)

    async def answer(self, request: GenerateRequest) -> None:
        async with contextlib.aclosing(self.dispatcher.generate(request)) as stream:
            async for tokens in stream:
                if tokens.finish_reason is not None:
                    return


class Requests:
    """Prompts whose first token differs from all others."""

    def __init__(self, num_tokens: int) -> None:
        draw = random.Random(0)
        self._numbers = itertools.count()
        self._bodies = [
            tuple(draw.randrange(100_000) for _ in range(num_tokens - 1)) for _ in range(20)
        ]

    def next(self) -> GenerateRequest:
        number = next(self._numbers)
        token_ids = (number, *self._bodies[number % len(self._bodies)])
        return GenerateRequest(f"r{number}", token_ids, SamplingParams(NUM_OUTPUT_TOKENS))


@contextlib.asynccontextmanager
async def router_over(num_nodes: int) -> AsyncIterator[Router]:
    router = Router(num_nodes)
    try:
        await asyncio.sleep(0.1)  # the first heartbeats
        yield router
    finally:
        router.nodes.close("the benchmark is over")
        await router.background.drain(5.0)


async def cost_of_looks(num_nodes: int) -> tuple[float, float]:
    """Milliseconds of CPU time: of a look at those who wait, and of a request's start."""
    requests = Requests(WAITING_TOKENS)
    async with router_over(num_nodes) as router:
        queue = router.queue
        for node in router.nodes.prefill:
            node.ledger.take("busy", 2 * node.info.max_batch_tokens)
        tasks = [
            asyncio.create_task(queue.pair_for(requests.next(), queue.ticket()))
            for _ in range(NUM_WAITING)
        ]
        await asyncio.sleep(0)
        await router.settle()
        looks_s = 0.0
        for _ in range(num_looks := 50):
            began = time.thread_time()
            queue.wake()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            looks_s += time.thread_time() - began
            await router.settle()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for node in router.nodes.prefill:
            node.ledger.give_back("busy")
        starts_s = 0.0
        for _ in range(num_starts := 50):
            request = requests.next()
            began = time.thread_time()
            pair = await queue.pair_for(request, queue.ticket())
            starts_s += time.thread_time() - began
            for given in pair.nodes:
                given.give_back(request.request_id)
            await asyncio.sleep(0.03)
    return 1e3 * looks_s / num_looks, 1e3 * starts_s / num_starts


async def drain_burst(num_nodes: int) -> tuple[float, float]:
    """Seconds until nobody waits after a burst, and the part of a core taken meanwhile."""
    requests = Requests(BURST_TOKENS)
    async with router_over(num_nodes) as router, asyncio.TaskGroup() as answers:
        for _ in range(BURST):
            answers.create_task(router.answer(requests.next()))
        began, cpu_s = time.monotonic(), time.process_time()
        next_at = began
        while (
            (now := time.monotonic()) < began + 2 or len(router.queue) or not router.queue.settled
        ):
            while next_at <= now:
                answers.create_task(router.answer(requests.next()))
                next_at += 1 / OFFERED_PER_S
            await asyncio.sleep(0.005)
        seconds = now - began
        return seconds, (time.process_time() - cpu_s) / seconds


async def cost_of_heartbeats(num_nodes: int) -> tuple[float, int, int]:
    """Part of a core with nothing to do, and the bytes of a heartbeat without metrics and with."""
    async with router_over(num_nodes) as router:
        await asyncio.sleep(1.0)
        cpu_s = time.process_time()
        await asyncio.sleep(3.0)
        cpu = (time.process_time() - cpu_s) / 3.0
        client = router.nodes.decode[0].client
        without = len(pickle.dumps(await client.status("router", 0, with_metrics=False)))
        with_metrics = len(pickle.dumps(await client.status("router", 0)))
    return cpu, without, with_metrics


def measure(num_nodes: int) -> Scale:
    look_ms, start_ms = asyncio.run(cost_of_looks(num_nodes))
    drained_s, burst_cpu = asyncio.run(drain_burst(num_nodes))
    idle_cpu, without, with_metrics = asyncio.run(cost_of_heartbeats(num_nodes))
    return Scale(
        nodes=num_nodes,
        look_ms=round(look_ms, 3),
        start_ms=round(start_ms, 3),
        burst_drained_s=round(drained_s, 2),
        burst_cpu=round(burst_cpu, 3),
        idle_cpu=round(idle_cpu, 3),
        heartbeat_bytes=without,
        heartbeat_with_metrics_bytes=with_metrics,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 25, 50, 100])
    given = parser.parse_args(arguments)
    logging.getLogger("sluice").setLevel(logging.ERROR)
    console = Console()
    numbers = " ".join(map(str, given.nodes))
    origin = provenance(f"python -m sluice.benchmarks.router_scale --nodes {numbers}")
    print_provenance(console, origin)
    lines = [measure(num_nodes) for num_nodes in given.nodes]
    table = Table(*(name.replace("_", " ") for name in asdict(lines[0])))
    for line in lines:
        table.add_row(*(str(value) for value in asdict(line).values()))
    console.print(table)
    write_csv(RESULTS / "router_scale.csv", origin, [asdict(line) for line in lines])
    missed = [
        line
        for line in lines
        if line.nodes <= GOAL_NODES
        and (line.burst_drained_s >= MAX_DRAIN_S or line.burst_cpu >= MAX_CPU)
    ]
    for line in missed:
        console.print(f"{line.nodes} nodes of each role: a goal is missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
