"""Several routers over the same nodes, at one port: every answer right, one picture of all."""

import asyncio
import dataclasses

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sluice.router.http.app import create_app
from sluice.router.http.server import serve
from sluice.router.service import RouterService

TWO = {"router": {"replicas": 2}}


@pytest.fixture
async def both(make_world, checkpoint):
    """A world of two routers whose decode node runs two requests at once; and the second router."""
    world = await make_world(**TWO)
    world.add_prefill()
    world.add_decode(max_running_requests=2)
    other = RouterService(world.config, world.service.cluster, "router-b")
    await other.start()
    other.set_nodes(list(world.prefills.values()), list(world.decodes.values()))
    yield world, other
    await other.stop(limit_s=0)


async def test_two_routers_never_overfill_a_node_and_lose_nothing(both):
    world, other = both
    transport = httpx.ASGITransport(app=create_app(other))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        clients = [world.http, http] * 6
        prompts = [f"the cat {number}" for number in range(len(clients))]
        answers = await asyncio.gather(
            *(
                client.post(
                    "/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 8}
                )
                for client, prompt in zip(clients, prompts, strict=True)
            )
        )
    texts = [answer.json()["choices"][0]["text"] for answer in answers]
    assert texts == [world.expected(prompt) for prompt in prompts]
    assert world.decodes["decode-0"].max_seen == 2
    await world.until(world.quiescent)
    assert other.nodes.find("decode-0").ledger.running == 0


async def test_a_router_waits_for_slots_that_another_one_has_rather_than_be_refused(both):
    world, other = both
    decode = world.decodes["decode-0"]
    decode.gate.clear()
    transport = httpx.ASGITransport(app=create_app(other))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        body = {"model": "tiny", "prompt": "the cat", "max_tokens": 8}
        theirs = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(2)]
        await world.until(lambda: len(decode.generating) == 2)
        await world.service.refresh()
        ours = world.raw()
        await world.until(lambda: len(world.service.queue) == 1)
        decode.gate.set()
        await asyncio.gather(*theirs)
    await world.until(lambda: decode.calls.count("release") == 2)
    await world.service.refresh()
    await ours.task
    assert decode.calls.count("reserve") == 3


async def test_metrics_of_all_routers_are_told_by_whichever_is_asked(both):
    world, other = both
    await world.complete()
    theirs = other.status()
    world.other_routers = [theirs, dataclasses.replace(theirs, router_id="router-c")]
    text = (await world.http.get("/metrics")).text
    found = {
        (sample.name, sample.labels.get("router")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    mine = world.service.router_id
    assert found["sluice:generation_tokens_total", mine] == 8
    assert found["sluice:generation_tokens_total", "router-b"] == 0
    assert found["sluice:num_requests_running", "router-c"] == 0
    assert found["sluice:transfer_bytes_total", None] == 7.0  # a node's, once


async def test_two_servers_share_a_port_and_one_goes_on_without_the_other(both):
    world, other = both
    first = await serve(world.service, "127.0.0.1", 0)
    second = await serve(other, "127.0.0.1", first.port)
    await first.stop(limit_s=0)
    async with httpx.AsyncClient(base_url=second.url, trust_env=False) as http:
        answer = await http.post(
            "/v1/completions", json={"model": "tiny", "prompt": "the cat", "max_tokens": 8}
        )
    assert answer.json()["choices"][0]["text"] == world.expected()
    await second.stop(limit_s=0)
