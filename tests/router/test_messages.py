"""The Messages API over a V4 checkpoint: blocks in, blocks out, streamed as whole."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from v4_answers import CALL, answers, named_events

from sluice.router.text.v4.words import DSML

WEATHER = {
    "name": "weather",
    "description": "tells it",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
}
THINKING = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
OWN = ("id", "content")  # of one answer


def body_of(messages="hi", **fields) -> dict:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return {"model": "tiny", "messages": messages, "max_tokens": 300, **fields}


async def ask(v4, messages="hi", **fields) -> dict:
    answer = await v4.http.post("/v1/messages", json=body_of(messages, **fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


async def stream(v4, messages="hi", **fields) -> list[dict]:
    body = body_of(messages, stream=True, **fields)
    answer = await v4.http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    return named_events(answer.text)


def put_together(events: list[dict]) -> dict:
    """The message as a client builds it of the events."""
    message, partial = {}, {}
    for event in events:
        kind, index = event["type"], event.get("index")
        if kind == "message_start":
            message = event["message"]
        elif kind == "content_block_start":
            assert index == len(message["content"])
            message["content"].append(event["content_block"])
            partial[index] = ""
        elif kind == "content_block_delta":
            delta, block = event["delta"], message["content"][index]
            field = delta["type"].removesuffix("_delta")
            if field == "input_json":
                partial[index] += delta["partial_json"]
            else:
                block[field] += delta[field]
        elif kind == "message_delta":
            message |= event["delta"]
            message["usage"] = event["usage"]
    assert events[-1]["type"] == "message_stop"
    for index, block in enumerate(message["content"]):
        if block["type"] == "tool_use":
            block["input"] = _object(partial[index])
    message["content"] = [b for b in message["content"] if b.get("input", {}) is not None]
    return message


def _object(text: str) -> dict | None:
    """None where it was cut off."""
    try:
        return json.loads(text or "{}")
    except ValueError:
        return None


def without_ids(content: list[dict]) -> list[dict]:
    return [{k: v for k, v in block.items() if k != "id"} for block in content]


async def same_streamed(v4, messages="hi", **fields) -> dict:
    whole = await ask(v4, messages, **fields)
    streamed = put_together(await stream(v4, messages, **fields))
    assert without_ids(streamed["content"]) == without_ids(whole["content"])
    assert {k: v for k, v in streamed.items() if k not in OWN} == {
        k: v for k, v in whole.items() if k not in OWN
    }
    return whole


async def test_thinking_and_text_are_blocks(v4):
    answers(v4, "the user greets me</think>Hello ☕!")
    whole = await same_streamed(v4, system=[{"type": "text", "text": "be kind"}], **THINKING)
    thinking, text = whole["content"]
    assert thinking == {"type": "thinking", "thinking": "the user greets me", "signature": ""}
    assert text == {"type": "text", "text": "Hello ☕!"}
    assert whole["stop_reason"] == "end_turn" and whole["role"] == "assistant"


async def test_who_does_not_ask_for_thinking_gets_none(v4):
    answers(v4, "Hello ☕!")
    whole = await same_streamed(v4)
    assert whole["content"] == [{"type": "text", "text": "Hello ☕!"}]


async def test_why_it_ended_is_told(v4):
    answers(v4, "Hello dear user.")
    whole = await same_streamed(v4, max_tokens=3)
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("max_tokens", None)
    assert whole["usage"]["output_tokens"] == 3
    whole = await same_streamed(v4, stop_sequences=["zz", " user"])
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", " user")
    assert whole["content"] == [{"type": "text", "text": "Hello dear"}]


async def test_the_answer_goes_on_with_what_is_said_already(v4):
    answers(v4, " user.")
    seen = v4.seen_requests()
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello dear"}]
    whole = await same_streamed(v4, begun)
    assert whole["content"] == [{"type": "text", "text": " user."}]
    prompt = v4.tokenizer.decode(seen[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith("Hello dear")


async def test_calls_come_back_as_blocks_and_are_one_turn(v4):
    answers(v4, f"hm</think>Let me see.{CALL}")
    asked = [{"role": "user", "content": "weather?"}]
    whole = await same_streamed(v4, asked, tools=[WEATHER], **THINKING)
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]
    call = whole["content"][-1]
    assert (call["name"], call["input"]) == ("weather", {"city": "Zürich ☕", "days": 2})
    assert whole["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "sunny"}
    turns = [
        *asked,
        {"role": "assistant", "content": whole["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
    ]
    seen = v4.seen_requests()
    await ask(v4, turns, tools=[WEATHER], **THINKING)
    chat = [
        *asked,
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": "weather", "arguments": json.dumps(call["input"])},
                }
            ],
        },
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny"},
        {"role": "user", "content": "and?"},
    ]
    function = {
        "name": "weather",
        "description": "tells it",
        "parameters": WEATHER["input_schema"],
    }
    body = {"model": "tiny", "messages": chat, "max_tokens": 300}
    tools = [{"type": "function", "function": function}]
    answer = await v4.http.post("/v1/chat/completions", json={**body, "tools": tools})
    assert answer.status_code == 200, answer.text
    assert seen[0].prompt_token_ids == seen[1].prompt_token_ids


async def test_a_call_that_is_cut_off_is_no_block_and_no_markup(v4):
    answers(v4, f"So.{CALL}")
    num_tokens = len(v4.ids(f"So.{CALL}"))
    for max_tokens in range(1, num_tokens + 1):
        whole = await same_streamed(v4, tools=[WEATHER], max_tokens=max_tokens)
        for block in whole["content"]:
            assert block["type"] != "tool_use" or isinstance(block["input"], dict)
            assert DSML not in block.get("text", "")


async def test_arguments_nested_without_end_are_no_block(v4):
    """Python's own reader would raise what no client is at fault for."""
    value = '<｜DSML｜parameter name="days" string="false">'
    answers(v4, f"So.{CALL.replace(value + '2', value + '[' * 2500)}")
    whole = await ask(v4, tools=[WEATHER], max_tokens=3000)
    assert whole["content"] == [{"type": "text", "text": "So."}]


async def test_fields_reach_the_model(v4):
    seen = v4.seen_requests()
    schema = {"type": "object", "properties": {"a": {"type": ["string", "null"]}}}
    answer = await v4.http.post(
        "/v1/messages",
        json=body_of(
            temperature=0.5,
            top_p=0.5,
            top_k=7,
            max_tokens=11,
            metadata={"user_id": "me"},
            output_config={"format": {"type": "json_schema", "schema": schema}},
        ),
        headers={"anthropic-version": "2023-06-01", "anthropic-beta": "x"},
    )
    assert answer.status_code == 200, answer.text
    sampling = seen[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.5, 7)
    assert sampling.max_tokens == 11 and json.loads(sampling.json_schema) == schema


@pytest.mark.parametrize("text", ["hi", "the cat " * 600])
async def test_tokens_are_counted_as_they_are_used(v4, text):
    answers(v4, "Hello")
    body = body_of(text, system="be kind", tools=[WEATHER])
    usage = (await ask(v4, text, system="be kind", tools=[WEATHER]))["usage"]
    del body["max_tokens"]
    counted = (await v4.http.post("/v1/messages/count_tokens", json=body)).json()
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
REFUSED = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**6}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "system", "content": "a"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0.type"),
    ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages.0.content.0"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
    ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"thinking": {"type": "wild"}}, "thinking.type"),
    ({"stop_sequences": [5]}, "stop_sequences"),
    ({"temperature": 3}, "temperature"),
    ({"n": 2}, "n"),
    ({"output_config": {"effort": "wild"}}, "output_config.effort"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"$ref": "#"}}}},
        "output_config.format",
    ),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:60])
async def test_what_is_not_supported_is_refused_by_its_name(v4, fields, param):
    answer = await v4.http.post("/v1/messages", json={**body_of(), **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert error["error"]["message"].startswith(param), error


async def test_every_error_has_the_shape_of_the_api(v4, make_world, v4_folder, tmp_path):
    async def error_of(world, path="/v1/messages", **request) -> tuple[int, str]:
        request = {"method": "POST", "json": body_of(), **request}
        answer = await world.http.request(url=path, **request)
        assert answer.json()["type"] == "error" and answer.json()["error"]["message"]
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
        return answer.status_code, answer.json()["error"]["type"]

    assert await error_of(v4, json=body_of(model="other")) == (404, "not_found_error")
    assert await error_of(v4, path="/v1/messages/batches") == (404, "not_found_error")
    assert await error_of(v4, method="GET") == (405, "invalid_request_error")
    assert await error_of(v4, content=b"{", json=None, headers={"content-type": "text/plain"}) == (
        415,
        "invalid_request_error",
    )
    huge = {"content-length": str(10**9)}
    assert (await error_of(v4, headers=huge))[1] == "request_too_large"
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    empty = await make_world(folder=v4_folder, router={"api_keys_file": str(keys)})
    assert await error_of(empty) == (401, "authentication_error")
    assert await error_of(empty, headers={"x-api-key": "wrong"}) == (401, "authentication_error")
    assert await error_of(empty, headers={"x-api-key": "secret"}) == (503, "overloaded_error")
    v4.script.plan = (60, -1)  # no tokenizer can decode that
    assert await error_of(v4) == (500, "api_error")


async def test_a_failure_in_mid_stream_is_the_last_event(make_world, v4_folder):
    world = await make_world(folder=v4_folder, transfer={"lease_s": 0.2})
    world.add_prefill(num_pages=256, max_model_len=4096)
    world.add_decode(num_pages=256, max_model_len=4096).die_after = 3
    answers(world, "Hello " * 30)
    events = await stream(world)
    assert events[-1]["type"] == "error" and events[-1]["error"]["message"]
    assert not any(event["type"] == "message_stop" for event in events)


USER = st.sampled_from(
    [
        "hi",
        "",
        [{"type": "text", "text": "hi"}, {"type": "text", "text": "</think>"}],
        [{"type": "tool_result", "tool_use_id": "1", "content": "sunny", "is_error": True}],
        [{"type": "tool_result", "tool_use_id": "1"}, {"type": "text", "text": "so?"}],
        [IMAGE],
    ]
)
ASSISTANT = st.sampled_from(
    [
        "yes",
        [],
        [{"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "a"}],
        [{"type": "redacted_thinking", "data": "x"}],
        [{"type": "tool_use", "id": "1", "name": "weather", "input": {"city": None}}],
    ]
)
TURNS = st.one_of(
    st.builds(lambda content: {"role": "user", "content": content}, USER),
    st.builds(lambda content: {"role": "assistant", "content": content}, ASSISTANT),
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "system": st.sampled_from(["be kind", [{"type": "text", "text": "be kind"}]]),
        "tools": st.just([WEATHER]),
        "tool_choice": st.sampled_from([{"type": "auto"}, {"type": "any"}, {"type": "none"}]),
        "thinking": st.sampled_from(
            [{"type": "disabled"}, {"type": "adaptive"}, THINKING["thinking"]]
        ),
        "stop_sequences": st.sampled_from([[], ["me"], ["</think>"]]),
        "max_tokens": st.integers(1, 120),
    },
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(turns=st.lists(TURNS, max_size=5), fields=FIELDS)
async def test_whatever_is_asked_is_answered_or_refused(v4, turns, fields):
    answers(v4, f"hm</think>Let me see.{CALL}")
    answer = await v4.http.post("/v1/messages", json=body_of(turns, **fields))
    if answer.status_code == 400:
        assert answer.json()["error"]["message"]
        return
    await same_streamed(v4, turns, **fields)
