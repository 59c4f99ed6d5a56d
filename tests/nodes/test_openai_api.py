"""The OpenAI API over real nodes in this process: what clients ask for is what the model does."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

MODEL = Path(__file__).parents[2] / "deploy/models/tiny-v4"  # small, trained, with a tokenizer
SCHEMA = {
    "type": "object",
    "properties": {"code": {"type": "integer", "maximum": 99}, "mood": {"enum": ["calm", "wild"]}},
    "required": ["code", "mood"],
    "additionalProperties": False,
}


@pytest.fixture
async def api(config_of, start_local, http_over):
    """Posts a body to an endpoint of a router over one real pair of nodes."""
    config = config_of(MODEL, prefill={"prefix_cache": True}, decode={"prefix_cache": True})
    pair = start_local(config)

    async def post(path="completions", **body):
        fields = {"model": config.model.served_name, "temperature": 0, "max_tokens": 12}
        answer = await client.post(f"/v1/{path}", json=fields | body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async with http_over(pair) as client:
        post.pair = pair
        yield post


async def test_logprobs_come_from_both_nodes_and_belong_to_the_text(api):
    [choice] = (await api(prompt="The sea was", logprobs=2))["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"] and len(logprobs["tokens"]) == 12
    for chosen, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert chosen == max(top.values()) <= 0


async def test_penalties_and_biases_change_the_answer(api):
    plain = (await api(prompt="The sea was the sea was", max_tokens=12))["choices"][0]["text"]
    for fields in (
        {"frequency_penalty": 2.0, "presence_penalty": 2.0},
        {"repetition_penalty": 2.0},
        {"logit_bias": {"300": 100}},
    ):
        [choice] = (await api(prompt="The sea was the sea was", max_tokens=12, **fields))["choices"]
        assert choice["text"] != plain


async def test_n_answers_are_those_of_their_seeds_alone(api):
    fields = {"prompt": "The sea was", "temperature": 1.0}
    together = (await api(**fields, n=3, seed=5))["choices"]
    alone = [(await api(**fields, seed=5 + i))["choices"][0]["text"] for i in range(3)]
    assert [choice["text"] for choice in together] == alone and len(set(alone)) > 1


@pytest.mark.parametrize("temperature", [0, 1.5])
async def test_a_json_answer_follows_its_schema_from_the_first_token_on(api, temperature):
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    messages = [{"role": "user", "content": "Tell me something."}]
    fields = {"messages": messages, "response_format": form, "temperature": temperature}
    answers = await asyncio.gather(
        *(api("chat/completions", **fields, seed=seed, max_tokens=60) for seed in range(3))
    )
    for answer in answers:
        [choice] = answer["choices"]
        value = json.loads(choice["message"]["content"])
        assert set(value) == {"code", "mood"} and choice["finish_reason"] == "stop"


async def test_decode_never_computes_a_prompt_whichever_endpoint_asks(api):
    await api(prompt="The sea was", n=2)
    await api("chat/completions", messages=[{"role": "user", "content": "The sea"}])
    await api(prompt="The sea was calm", response_format={"type": "json_object"})
    families = api.pair.statuses()[1].metrics
    computed = {
        labels["kind"]: value
        for family in families
        for name, labels, value in family.samples
        if name == "sluice:computed_tokens_total"
    }
    assert computed.get("decode", 0) > 20 and computed.get("prefill", 0) == 0


async def test_a_cached_prompt_is_found_under_its_own_salt_only(api):
    prompt = list(range(5, 5 + 600))

    async def cached(**salt):
        usage = (await api(prompt=prompt, max_tokens=1, **salt))["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert await cached(cache_salt="a") == 0
    assert await cached(cache_salt="a") > 0
    assert await cached(cache_salt="b") == await cached() == 0
