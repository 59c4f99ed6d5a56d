"""One real deployment: Ray, NIXL, HTTP, the trained model, and what a person does with them."""

import asyncio
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import httpx
import openai
import pytest

from sluice.benchmarks import load
from sluice.benchmarks.load_client import bad_clients
from sluice.deploy.commands.recall import recall_task

pytestmark = pytest.mark.live

MODEL = "tiny-v4"
CHAT = [{"role": "user", "content": "Define love."}]
GAUGES = ("sluice:pool_pages", "sluice:num_requests_running", "sluice:num_requests_waiting")
WORDS_AT_DISTANCE = {64: 32, 512: 300, 2048: 1240}  # a word has about 1.7 tokens


def client(live):
    return httpx.AsyncClient(base_url=live.url, timeout=120)


def chat(live, **options):
    answer = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none").chat.completions.create(
        model=MODEL, messages=CHAT, temperature=0, max_tokens=24, **options
    )
    if not options.get("stream"):
        return answer.choices[0].message.content
    return "".join(chunk.choices[0].delta.content or "" for chunk in answer)


def test_curl_streams_a_chat_answer_as_the_openai_client_reads_it(live):
    body = {"model": MODEL, "messages": CHAT, "temperature": 0, "max_tokens": 24, "stream": True}
    curl = ["curl", "-sN", f"{live.url}/v1/chat/completions", "-d", json.dumps(body)]
    done = subprocess.run(
        [*curl, "-H", "content-type: application/json"], capture_output=True, text=True, check=True
    )
    events = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line]
    assert events.pop() == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert text == chat(live, stream=True) == chat(live)
    assert len(choices) > 5, "tokens come as they are made; a busy router may join some"


def test_the_command_line_streams_the_same_answer(live):
    assert live.sluice("chat", CHAT[0]["content"], "--max-tokens", "24") == chat(live) + "\n"


def test_status_as_json_has_the_promised_shape(live):
    status = json.loads(live.sluice("status", "--json"))
    assert status["targets"] == {"prefill": 1, "decode": 1}
    for node in status["nodes"]:
        assert {"id", "role", "state", "host", "running", "waiting", "pools"} <= set(node)
        assert node["state"] == "ready"
        assert all(set(pages) == {"free", "used", "cached"} for pages in node["pools"].values())


def test_the_routers_process_has_no_torch(live):
    assert live.inside("has_torch", "router-0") is False


def test_a_router_ignores_a_list_of_nodes_that_comes_late(live):
    live.inside("tell_late", "router-0")
    assert chat(live)


async def complete(http, prompt, **options):
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, **options}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


async def test_gauges_return_to_their_start_after_a_thousand_requests(live, rng):
    start = await quiet_gauges(live)
    limit = asyncio.Semaphore(32)

    async def one(http):
        async with limit:
            prompt = [0, *(rng.randrange(300, 2000) for _ in range(rng.randrange(2, 12)))]
            await complete(http, prompt, max_tokens=rng.randrange(1, 5), ignore_eos=True)

    async with client(live) as http:
        await asyncio.gather(*(one(http) for _ in range(1000)))
    assert await quiet_gauges(live) == start


async def quiet_gauges(live):
    """The gauges once no request is anywhere; releases end just after the answer."""
    async with asyncio.timeout(10):
        while True:
            metrics = await asyncio.to_thread(live.metrics)
            gauges = {
                (name, labels): value
                for (name, labels), value in metrics.items()
                if name in GAUGES and ("state", "free") not in labels
                if ("state", "cached") not in labels  # what is cached is free to whoever needs it
            }
            if not any(value for (name, _), value in gauges.items() if "requests" in name):
                return gauges


async def finish(http, messages):
    """How the chat's last message, an answer that has begun, goes on."""
    body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 8}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("distance", WORDS_AT_DISTANCE)
async def test_codes_are_recalled_from_far_outside_the_window(live, distance):
    assert await num_recalled(live, distance) >= 9


async def num_recalled(live, distance, seed=0, words_before=40):
    """How many of ten codes, stated `distance` tokens back, come out right.

    The texts are the same in every run: the model itself misses three of a hundred.
    """
    rng = random.Random(distance + seed)
    words = WORDS_AT_DISTANCE[distance]
    tasks = [recall_task(rng, words_before=words_before, words_after=words) for _ in range(10)]
    async with client(live) as http:
        answers = await asyncio.gather(*(finish(http, t.messages) for t in tasks))
    return sum(task.is_right(answer) for task, answer in zip(tasks, answers, strict=True))


@pytest.mark.parametrize(
    ("pool", "distance"), [("c4_kv", 64), ("c4_kv", 2048), ("c4_index_k", 512)]
)
async def test_nothing_is_recalled_while_a_pool_that_carries_it_reads_as_zeros(
    live, pool, distance
):
    nodes = [*live.nodes("prefill"), *live.nodes("decode")]
    seed = WORDS_AT_DISTANCE[distance] + len(pool)  # texts that are not cached
    live.inside("deaden", pool, *nodes)
    try:
        # Far from the beginning too: an indexer that sees zeros picks the lowest rows.
        assert await num_recalled(live, distance, seed=seed, words_before=200) == 0
    finally:
        live.inside("revive", pool, *nodes)
    assert await num_recalled(live, distance) >= 9


async def test_nodes_added_while_it_runs_serve_and_leave_without_cutting_a_stream(live):
    before = chat(live)
    live.sluice("scale", "decode", "2")
    async with client(live) as http:
        scaled = await http.post("/admin/scale", json={"role": "prefill", "replicas": 2})
        assert scaled.status_code == 200, scaled.text
        await asyncio.to_thread(until, lambda: len(live.nodes("prefill")) == 2)
        streams = [asyncio.create_task(stream(http, seed)) for seed in range(8)]
        await asyncio.to_thread(until, lambda: all_at_work(live))
        leaving = live.nodes("decode")[-1]
        await asyncio.to_thread(live.sluice, "drain", leaving)
        texts = await asyncio.gather(*streams)
    assert leaving not in live.nodes("decode")
    assert all(reason == "length" for _, reason in texts)
    live.sluice("scale", "prefill", "1")
    assert chat(live) == before
    assert json.loads(live.sluice("status", "--json"))["targets"] == {"prefill": 1, "decode": 1}


async def test_a_stream_survives_the_death_of_its_decode_node(live):
    async with client(live) as http:
        expected = await stream(http, seed=99)
        [node] = live.nodes("decode")
        pid, begun = live.inside("pid", node), asyncio.Event()
        dying = asyncio.create_task(stream(http, seed=99, begun=begun))
        await asyncio.wait_for(begun.wait(), 60)
        os.kill(pid, signal.SIGKILL)
        assert await dying == expected
    dead = next(n for n in live.status()["nodes"] if n["id"] == node)
    assert dead["state"] == "dead"
    assert "gone" in dead["detail"]


async def test_a_killed_router_comes_back_under_its_url(live):
    pid, begun = live.inside("pid", "router-0"), asyncio.Event()
    cut = asyncio.create_task(stream(client(live), seed=98, begun=begun))
    await asyncio.wait_for(begun.wait(), 60)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(httpx.TransportError):
        await cut
    await asyncio.to_thread(until, lambda: answers(live), every_s=0.1)
    assert chat(live)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_node_whose_process_is_asked_to_end_is_replaced_without_a_gap(live, role):
    async with client(live) as http:
        expected, retries = await stream(http, seed=97), retried(live)
        [node] = live.nodes(role)
        pid, begun = live.inside("pid", node), asyncio.Event()
        running = asyncio.create_task(stream(http, seed=97, begun=begun))
        await asyncio.wait_for(begun.wait(), 60)
        os.kill(pid, signal.SIGTERM)
        while await asyncio.to_thread(live.nodes, role) in ([node], []):
            assert (await stream(http, seed=96))[1] == "length"
        assert await running == expected
    until(lambda: not is_running(pid))
    assert node not in live.nodes(role)
    assert retried(live) == retries


async def test_a_router_that_is_asked_to_end_finishes_its_streams_and_another_keeps_the_nodes(live):
    [router] = live.inside("routers")
    pid, begun = live.inside("pid", router), asyncio.Event()
    running = asyncio.create_task(stream(client(live), seed=95, begun=begun))
    await asyncio.wait_for(begun.wait(), 60)
    os.kill(pid, signal.SIGTERM)
    assert (await running)[1] == "length"
    await asyncio.to_thread(until, lambda: not is_running(pid) and answers(live), every_s=0.1)
    [node] = live.nodes("decode")
    os.kill(live.inside("pid", node), signal.SIGKILL)
    await asyncio.to_thread(until, lambda: live.nodes("decode") not in ([node], []))
    assert chat(live)


def retried(live):
    return sum(v for (name, _), v in live.metrics().items() if name == "sluice:retries_total")


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def answers(live):
    try:
        return httpx.get(f"{live.url}/ready").status_code == 200
    except httpx.TransportError:
        return False


def until(condition, every_s=0.02):
    """Poll the deployment until the condition holds."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(every_s)


def all_at_work(live):
    metrics = live.metrics()
    computed = {
        dict(labels)["node"]
        for (name, labels), value in metrics.items()
        if name == "sluice:computed_tokens_total" and value
    }
    return {*live.nodes("prefill"), *live.nodes("decode")} <= computed


async def stream(http, seed, begun=None):
    """A long completion: its text and finish reason. `begun` is set with its first text."""
    prompt = [0, *(random.Random(seed).randrange(300, 2000) for _ in range(20))]
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 400}
    text, reason = "", None
    async with http.stream(
        "POST", "/v1/completions", json={**body, "stream": True, "ignore_eos": True}
    ) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += event["choices"][0]["text"]
                if begun is not None:
                    begun.set()
                reason = event["choices"][0]["finish_reason"] or reason
    return text, reason


async def test_streams_get_their_text_beside_clients_that_say_or_read_nothing(live):
    expected = await load.references(live.url, MODEL)
    unread = load.body(MODEL, load.PROMPTS[0], 64) | {"logprobs": 20}
    async with bad_clients(live.url, unread, num_idle=100, num_unread=4):
        phase, problems = await load.load(
            live.url, MODEL, expected, name="load", num_streams=20, seconds=3
        )
    assert phase.num_answers >= 20 and not problems
    assert await load.unused(live.url) == ""
