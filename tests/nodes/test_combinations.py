"""Whatever a chat asks for together: streamed as whole, no markup, schemas kept, no 500.

    COMBINATIONS=10000 pytest -o timeout=0 tests/nodes/test_combinations.py     once, with a bar

A combination is drawn by its number: an order of roles, thinking, stop strings, a schema, tools,
and after how many tokens it is cut. Both answers come from real nodes in this process, over a tiny
checkpoint that speaks DeepSeek-V4's own chat format.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from pathlib import Path

import httpx
import jsonschema
import pytest
from tokenizers import Tokenizer
from tqdm import tqdm

from sluice.router.text.v4.words import CONTROL_TOKENS, DSML, END_THINK

MODEL = Path(__file__).parents[2] / "deploy/models/tiny-v4-chat"
NUM_COMBINATIONS = int(os.environ.get("COMBINATIONS", "60"))
NUM_AT_ONCE = 8
END_THINK_ID = Tokenizer.from_file(str(MODEL / "tokenizer.json")).token_to_id(END_THINK)
# The token alone may come in any text: the weights know it as the merge whose place it has.
MARKUP = (set(CONTROL_TOKENS) - {DSML}) | {f"<{DSML}", f"</{DSML}"}
MOODS = {"$defs": {"mood": {"enum": ["calm", "wild"]}}}
SCHEMAS = (
    {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]},
    {
        "type": "object",
        "properties": {"m": {"$ref": "#/$defs/mood"}, "n": {"type": ["null", "boolean"]}},
        "required": ["m", "n"],
        "additionalProperties": False,
        **MOODS,
    },
    {"type": "array", "items": {"anyOf": [{"type": "null"}, {"const": "x"}]}, "maxItems": 2},
    {"type": "string", "pattern": "^[ab]{1,3}$"},
)
PARAMETERS = (
    {"type": "object", "properties": {}, "additionalProperties": False},
    *SCHEMAS[:2],
    {
        "type": "object",
        "properties": {
            "who": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
            "how": {"allOf": [{"$ref": "#/$defs/mood"}]},
        },
        "required": ["who", "how"],
        **MOODS,
    },
)


def drawn(number: int) -> dict:
    """The body of combination `number`, without how it is to be sent."""
    rng = random.Random(number)
    body = {
        "messages": conversation(rng),
        "max_tokens": rng.choice([1, 2, 3, 5, 8, 13, 21, 34, 60, 150]),
        "temperature": rng.choice([0, 1]),
        "seed": number,
    }
    if (thinking := rng.choice(["enabled", "disabled", "disabled", ""])) != "":
        body["thinking"] = {"type": thinking}
    if rng.random() < 0.2:
        body["reasoning_effort"] = rng.choice(["none", "high", "max"])
    if rng.random() < 0.4:
        body["stop"] = rng.sample(["e", "the", " a", "</think>", '"', "}", "\n"], 2)
    if rng.random() < 0.4:
        schema = {"name": "s", "schema": rng.choice(SCHEMAS)}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if rng.random() < 0.5:
        body["tools"] = [
            tool(f"tool_{i}", rng.choice(PARAMETERS)) for i in range(rng.randint(1, 2))
        ]
        named = {"type": "function", "function": {"name": "tool_0"}}
        body["tool_choice"] = rng.choice(["auto", "none", "required", "required", named])
        body["parallel_tool_calls"] = rng.random() < 0.5
        body["max_tokens"] *= rng.choice([1, 4])  # a call takes a hundred
    if rng.random() < 0.5:  # or it would seldom come to an end of its reasoning
        body["logit_bias"] = {str(END_THINK_ID): rng.choice([14, 15, 16, 17])}
    if rng.random() < 0.2:
        body["n"] = 2
    if rng.random() < 0.2:
        body |= {"logprobs": True, "top_logprobs": 1}
    return body


def conversation(rng: random.Random) -> list[dict]:
    """Roles in any order."""
    messages = []
    for _ in range(rng.randint(1, 5)):
        role = rng.choice(["system", "developer", "user", "user", "assistant", "tool"])
        message = {"role": role, "content": rng.choice(["Hi", "The sea was", "", "Who <think> so"])}
        if role == "assistant" and rng.random() < 0.5:
            function = {"name": "tool_0", "arguments": '{"a": 1}'}
            message["tool_calls"] = [{"id": "1", "type": "function", "function": function}]
        if role == "assistant" and rng.random() < 0.3:
            message["reasoning_content"] = "hm"
        if role == "tool":
            message["tool_call_id"] = "1"
        messages.append(message)
    if messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        messages[-1]["prefix"] = True
    return messages


def tool(name: str, parameters: dict) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def check_choice(body: dict, choice: dict) -> None:
    """One whole output keeps what its request asks for."""
    message, reason = choice["message"], choice["finish_reason"]
    calls = message.get("tool_calls", [])
    for said in (message["content"] or "", message.get("reasoning_content", "")):
        assert not any(token in said for token in MARKUP - _wanted(body)), said
        assert not said.startswith(END_THINK)
    if reason == "length":
        return
    must_call = body.get("tool_choice") not in (None, "auto", "none")
    assert bool(calls) == (reason == "tool_calls") and not (must_call and not calls)
    schemas = {t["function"]["name"]: t["function"]["parameters"] for t in body.get("tools", [])}
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        jsonschema.validate(arguments, schemas[call["function"]["name"]])
    if "response_format" in body and not calls and not body.get("stop"):
        schema = body["response_format"]["json_schema"]["schema"]
        jsonschema.validate(json.loads(message["content"]), schema)


def _wanted(body: dict) -> set[str]:
    """What the model was made to say more often: within a text it is part of it."""
    return {END_THINK} if "logit_bias" in body else set()


def put_together(events: list[dict], num_choices: int) -> list[dict]:
    """The choices of a whole answer from those of a stream."""
    choices = [
        {"content": "", "reasoning_content": "", "tool_calls": []} for _ in range(num_choices)
    ]
    for event in events:
        for piece in event["choices"]:
            whole, delta = choices[piece["index"]], piece["delta"]
            for field in ("content", "reasoning_content"):
                whole[field] += delta.get(field) or ""
            for call in delta.get("tool_calls", []):
                if call["index"] == len(whole["tool_calls"]):
                    whole["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
                whole["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            whole["finish_reason"] = piece["finish_reason"] or whole.get("finish_reason")
    return choices


def plain(choice: dict) -> dict:
    """A whole choice in the words of `put_together`."""
    message = choice["message"]
    calls = [c["function"] for c in message.get("tool_calls", [])]
    return {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "tool_calls": [{"name": c["name"], "arguments": c["arguments"]} for c in calls],
        "finish_reason": choice["finish_reason"],
    }


@pytest.fixture
async def post(config_of, start_local, http_over):
    config = config_of(MODEL, prefill={"prefix_cache": True}, decode={"prefix_cache": True})
    async with http_over(start_local(config)) as client:

        async def send(**body) -> httpx.Response:
            body |= {"model": config.model.served_name}
            return await client.post("/v1/chat/completions", json=body)

        yield send


class Differs(Exception):
    """A stream is not what the whole answer is. What else is in a batch, and where a cached prefix
    ends, moves the last bits of logits, and once in ten thousand tokens the choice with them."""


async def check(post, number: int, seen: Counter, *, alone: bool = False) -> None:
    """Raises Differs. alone: nothing else runs, and nothing is cached."""
    body = drawn(number)
    salts = [{"cache_salt": f"{number} {i}"} if alone else {} for i in range(2)]
    answer = await post(**body, **salts[0])
    streamed = await post(**body, **salts[1], stream=True, stream_options={"include_usage": True})
    assert answer.status_code == streamed.status_code, streamed.text
    seen[str(answer.status_code)] += 1
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"], answer.text
        assert streamed.json()["error"] == error
        seen[f"400 {error['param'].split('.')[0]}"] += 1
        return
    whole = answer.json()
    for choice in whole["choices"]:
        check_choice(body, choice)
        seen[choice["finish_reason"]] += 1
        if choice["message"].get("reasoning_content") and choice["message"]["content"]:
            seen[f"{'JSON' if 'response_format' in body else 'text'} after reasoning"] += 1
    events = [line.removeprefix("data: ") for line in streamed.text.strip().split("\n\n")]
    assert events.pop() == "[DONE]"
    events = [json.loads(event) for event in events]
    made = put_together(events, len(whole["choices"]))
    expected = [plain(choice) for choice in whole["choices"]]
    if made != expected:
        raise Differs(f"{made}, expected {expected}")
    used = events[-1]["usage"]
    for field in ("completion_tokens", "prompt_tokens", "completion_tokens_details"):
        assert used[field] == whole["usage"][field]


async def test_whatever_is_asked_for_together_holds(post):
    numbers = iter(tqdm(range(NUM_COMBINATIONS), disable=NUM_COMBINATIONS < 1000))
    seen: Counter = Counter()
    differing = []

    async def one_after_another() -> None:
        for number in numbers:
            try:
                await check(post, number, seen)
            except Differs:
                differing.append(number)
            except Exception as error:
                raise AssertionError(f"combination {number}: {drawn(number)}") from error

    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_AT_ONCE):
            group.create_task(one_after_another())
    for number in differing:
        await check(post, number, seen, alone=True)
    print(dict(seen), "differed beside others:", differing)
    assert len(differing) <= 1 + NUM_COMBINATIONS / 200
    ways = {"stop", "length"}
    if NUM_COMBINATIONS >= 1000:
        ways |= {"tool_calls", "text after reasoning", "JSON after reasoning"}
    assert seen["200"] > NUM_COMBINATIONS / 2 and all(seen[way] for way in ways), seen
