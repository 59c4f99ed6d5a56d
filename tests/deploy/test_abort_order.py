"""Clients that leave before their long prompt has reached prefill, on two raylets, harm nobody.

    ABORTS=200 pytest -m hosts -o timeout=0 -s tests/deploy/test_abort_order.py

Ray fetches large arguments before it runs a call, so an abort overtakes its `run`. A request of
131,072 tokens is cancelled once its `run` is on its way, and its pages go to a short request, whose
answer is compared with the one it got alone. Router and decode are on one raylet, prefill on the
other.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os

import pytest
from tqdm import tqdm

from sluice.deploy.cluster import environment as ray_environment
from sluice.model.make_checkpoint import TINY, make_checkpoint
from sluice.protocol.config import parse_config
from sluice.protocol.messages import GenerateRequest, SamplingParams

NUM_ABORTS = int(os.environ.get("ABORTS", "40"))
NUM_TOKENS = 131_072
MOMENTS_S = (0.0, 0.001, 0.002, 0.005, 0.01)  # from the run's departure to the cancel
QUIET_LIMIT_S = 120.0


def config_of(checkpoint, num_tokens):
    """One slot on decode, so that the next request gets the pages of the one that left."""
    role = {"cache_bytes": 512 << 20, "prefix_cache": False}
    return parse_config(
        {
            "model": {"path": str(checkpoint), "max_model_len": num_tokens + 1024},
            "prefill": role,
            "decode": role | {"max_running_requests": 1},
            "transfer": {"lease_s": 10},
        }
    )


@contextlib.asynccontextmanager
async def deployment(config):
    """The dispatcher here, and the actors of a prefill and a decode node."""
    import ray
    from ray.cluster_utils import Cluster

    from sluice.deploy.actors.clients import RayDecodeClient, RayPrefillClient
    from sluice.deploy.actors.node_actors import DecodeActor, PrefillActor
    from sluice.router.common.background import Background
    from sluice.router.dispatch.dispatcher import Dispatcher
    from sluice.router.dispatch.nodes import Nodes
    from sluice.router.dispatch.policy import Policy
    from sluice.router.dispatch.queue import WaitingQueue

    class Counting(PrefillActor):
        """Knows which aborts came before their run."""

        def __init__(self, *args):
            super().__init__(*args)
            self._seen = set()
            self._overtaken = 0

        async def call(self, verb, first, *more, **named):
            if verb == "run":
                self._seen.add(first.request_id)
            if verb == "abort":
                self._overtaken += first not in self._seen
            return await super().call(verb, first, *more, **named)

        async def overtaken(self):
            return self._overtaken

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 256 << 20}
    )
    cluster.add_node(num_cpus=2, resources={"far": 1}, object_store_memory=256 << 20)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        common = {"max_concurrency": 100, "num_cpus": 0}
        prefill = ray.remote(Counting).options(resources={"far": 1}, **common)
        prefill = prefill.remote(config, "prefill-0", 1)
        decode = ray.remote(DecodeActor).options(**common).remote(config, "decode-0", 1)
        infos = await asyncio.gather(prefill.start.remote(), decode.start.remote())
        await prefill.call.remote("meet", 1, [infos[1]])
        background = Background()
        nodes = Nodes(
            router_id="router",
            lease_s=config.transfer.lease_s,
            shared=False,
            background=background,
            on_change=lambda: queue.wake(),
        )
        policy = Policy("cache_aware", "cache_aware")
        queue = WaitingQueue(nodes, policy, max_waiting=99, patience_s=60)
        dispatcher = Dispatcher(
            queue, router_id="router", background=background, on_retry=lambda reason: None
        )
        nodes.update([RayPrefillClient(prefill, infos[0])], [RayDecodeClient(decode, infos[1])], ())
        yield dispatcher, prefill, nodes
        nodes.close("the benchmark is over")
        await background.drain(5)
    finally:
        ray.shutdown()
        cluster.shutdown()


async def answer(dispatcher, request):
    tokens = []
    async with contextlib.aclosing(dispatcher.generate(request)) as stream:
        async for new in stream:
            tokens += new.token_ids
    return tokens


async def measure(config, times, num_tokens):
    async with deployment(config) as (dispatcher, prefill, nodes):
        vocab = TINY.vocab_size - 8
        victim = GenerateRequest(
            "victim", tuple(5 + i * 7 % vocab for i in range(120)), SamplingParams(24, 0.0)
        )
        leaver = GenerateRequest(
            "leaver", tuple(5 + i * 11 % vocab for i in range(num_tokens)), SamplingParams(8, 0.0)
        )
        alone = await answer(dispatcher, victim)
        harmed = 0
        for number in tqdm(range(times), desc="leaving clients", unit="client"):
            request = dataclasses.replace(leaver, request_id=f"leaver-{number}")
            leaving = asyncio.create_task(answer(dispatcher, request))
            view = nodes.prefill[0]
            while not view.held._expected.get(f"leaver-{number}.1"):  # until its run is on its way
                await asyncio.sleep(0)
            await asyncio.sleep(MOMENTS_S[number % len(MOMENTS_S)])
            leaving.cancel()
            again = dataclasses.replace(victim, request_id=f"victim-{number}")
            harmed += await answer(dispatcher, again) != alone
            await asyncio.wait({leaving})
        used = await _used_pages(nodes)
        overtaken = await prefill.overtaken.remote()
    return {"times": times, "overtaken": overtaken, "harmed": harmed, "used_pages": used}


async def _used_pages(nodes):
    """Pages in use once everything has had time to come back."""
    deadline = asyncio.get_running_loop().time() + QUIET_LIMIT_S
    while True:
        await nodes.refresh(5.0)
        used = sum(p["used"] for node in nodes for p in node.status.pools.values())
        if not used or asyncio.get_running_loop().time() > deadline:
            return used
        await asyncio.sleep(0.5)


@pytest.mark.hosts
def test_aborts_that_overtake_their_run_harm_nobody(tmp_path):
    ray_environment.prepare(joining=False)
    checkpoint = tmp_path / "tiny"
    make_checkpoint(
        checkpoint, config=dataclasses.replace(TINY, max_model_len=NUM_TOKENS + 1024), seed=7
    )
    found = asyncio.run(measure(config_of(checkpoint, NUM_TOKENS), NUM_ABORTS, NUM_TOKENS))
    print(found)
    assert found["harmed"] == found["used_pages"] == 0
