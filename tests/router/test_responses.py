"""The Responses API over a V4 checkpoint: items in, items out, streamed as whole."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from v4_answers import CALL, answers, named_events

from sluice.protocol.messages import InvalidRequest
from sluice.router.openai.responses.request import translate

EVENT = TypeAdapter(ResponseStreamEvent)
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "tells it",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
OWN = ("id", "created_at", "output")  # of one answer


async def ask(v4, given="hi", **fields) -> dict:
    body = {"model": "tiny", "input": given, "max_output_tokens": 300, **fields}
    answer = await v4.http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json(), strict=False)
    return answer.json()


async def stream(v4, given="hi", **fields) -> list[dict]:
    """The events, numbered in order."""
    body = {"model": "tiny", "input": given, "max_output_tokens": 300, "stream": True, **fields}
    answer = await v4.http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    events = named_events(answer.text)
    for event in events:
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def put_together(events: list[dict]) -> list[dict]:
    """The output as a client builds it of the events, checking each `done` against its deltas."""
    items: dict[int, dict] = {}
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            items[event["output_index"]] = {"text": "", "item": event["item"]}
        elif kind.endswith(".delta"):
            items[event["output_index"]]["text"] += event["delta"]
        elif kind.endswith(("text.done", "arguments.done")):
            text = event.get("text", event.get("arguments"))
            assert text == items[event["output_index"]]["text"]
        elif kind == "output_item.done":
            assert event["item"]["id"] == items[event["output_index"]]["item"]["id"]
            items[event["output_index"]] = event["item"]
    return [items[index] for index in sorted(items)]


def without_ids(output: list[dict]) -> list[dict]:
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in output]


async def same_streamed(v4, given="hi", **fields) -> dict:
    """The answer, which is what its stream adds up to."""
    whole, events = await ask(v4, given, **fields), await stream(v4, given, **fields)
    last = events[-1]
    assert last["type"] == f"response.{whole['status']}"
    assert put_together(events) == last["response"]["output"]
    assert without_ids(last["response"]["output"]) == without_ids(whole["output"])
    for response in (whole, last["response"]):
        response["shown"] = {k: v for k, v in response.items() if k not in OWN}
    assert last["response"]["shown"] == whole["shown"]
    return whole


async def test_reasoning_and_text_are_items(v4):
    answers(v4, "the user greets me</think>Hello ☕!")
    whole = await same_streamed(v4, instructions="be kind", metadata={"a": "b"})
    reasoning, message = whole["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "the user greets me"}]
    assert message["content"][0]["text"] == "Hello ☕!"
    assert whole["status"] == "completed" and whole["instructions"] == "be kind"
    assert whole["metadata"] == {"a": "b"} and whole["store"] is False
    usage = whole["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    reasoning_tokens = usage["output_tokens_details"]["reasoning_tokens"]
    assert 0 < reasoning_tokens < usage["output_tokens"]


async def test_an_answer_without_a_word_has_an_empty_message(v4):
    answers(v4, "</think>")
    [message] = (await same_streamed(v4))["output"]
    assert message["content"][0]["text"] == ""


async def test_an_answer_that_is_cut_says_so(v4):
    answers(v4, "</think>" + "Hello " * 50)
    whole = await same_streamed(v4, max_output_tokens=5)
    assert whole["status"] == "incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert whole["output"][-1]["status"] == "incomplete"


async def test_logprobs_are_those_of_the_message(v4):
    answers(v4, "hm</think>Hello")
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = await same_streamed(v4, **fields)
    listed = whole["output"][-1]["content"][0]["logprobs"]
    assert "Hello" in "".join(token["token"] for token in listed)
    assert all(token["top_logprobs"] for token in listed)


async def test_calls_come_back_as_input_and_are_one_turn(v4):
    answers(v4, f"hm</think>Let me see.{CALL}")
    asked = [{"role": "user", "content": "weather?"}]
    whole = await same_streamed(v4, asked, tools=[WEATHER])
    kinds = [item["type"] for item in whole["output"]]
    assert kinds == ["reasoning", "message", "function_call"]
    call = whole["output"][-1]
    assert call["name"] == "weather"
    assert json.loads(call["arguments"]) == {"city": "Zürich ☕", "days": 2}
    assert whole["tools"][0]["name"] == "weather"
    outcome = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    seen = v4.seen_requests()
    await ask(v4, [*asked, *whole["output"], outcome], tools=[WEATHER])
    chat = [
        *asked,
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": call["call_id"],
                    "type": "function",
                    "function": {"name": "weather", "arguments": call["arguments"]},
                }
            ],
        },
        {"role": "tool", "tool_call_id": call["call_id"], "content": "sunny"},
    ]
    tool = {"type": "function", "function": {k: v for k, v in WEATHER.items() if k != "type"}}
    body = {"model": "tiny", "messages": chat, "tools": [tool], "max_tokens": 99}
    await v4.http.post("/v1/chat/completions", json=body)
    assert seen[0].prompt_token_ids == seen[1].prompt_token_ids


async def test_fields_reach_the_model(v4):
    seen = v4.seen_requests()
    schema = {"type": "object", "properties": {"a": {"type": ["string", "null"]}}}
    await ask(
        v4,
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        temperature=0.5,
        top_p=0.5,
        seed=7,
        max_output_tokens=11,
        reasoning={"effort": "none", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}},
        include=["reasoning.encrypted_content"],
        truncation="disabled",
        store=True,
        user="me",
    )
    sampling = seen[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.5, 7)
    assert sampling.max_tokens == 11 and json.loads(sampling.json_schema) == schema


async def test_long_input_is_read_in_a_helper_process(v4):
    answers(v4, "</think>Hello")
    whole = await same_streamed(v4, "the cat " * 600, instructions="be kind", max_output_tokens=20)
    assert whole["instructions"] == "be kind" and whole["output"][0]["content"]


async def test_a_failure_in_mid_stream_is_the_last_event(make_world, v4_folder):
    world = await make_world(folder=v4_folder, transfer={"lease_s": 0.2})
    world.add_prefill(num_pages=256, max_model_len=4096)
    world.add_decode(num_pages=256, max_model_len=4096).die_after = 3
    answers(world, "</think>" + "Hello " * 30)
    events = await stream(world)
    assert events[-1]["type"] == "response.failed"
    failed = events[-1]["response"]
    assert failed["status"] == "failed" and failed["error"]["message"]
    assert not any(event["type"] == "response.completed" for event in events)


REFUSED = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "c"}, "conversation"),
    ({"background": True}, "background"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": [{"type": "function"}]}, "tools.0.name"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"input": 5}, "input"),
    ({"input": []}, "input"),
    ({"input": [5]}, "input"),
    ({"input": [{"type": "input_image"}]}, "input.0.type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input.0.role"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input.0.call_id"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"reasoning": {"effort": "wild"}}, "reasoning.effort"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "schema": {"$ref": "#"}}}}, "text.format"),
    ({"include": ["file_search_call.results"]}, "include.0"),
    ({"what": 1}, "what"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:60])
async def test_what_is_not_supported_is_refused_by_its_name(v4, fields, param):
    body = {"model": "tiny", "input": "hi", "max_output_tokens": 9, **fields}
    answer = await v4.http.post("/v1/responses", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and error["message"].startswith(param)


@pytest.mark.parametrize(
    ("param", "named"),
    [
        ("messages.1.content", "input.0.content"),
        ("messages.0", "instructions"),
        ("messages", "input"),
        ("response_format.json_schema", "text.format.json_schema"),
        ("seed", "seed"),
    ],
)
def test_errors_of_the_chat_behind_it_name_the_item(param, named):
    asked = translate({"model": "m", "instructions": "be kind", "input": "hi"})
    asked = replace(asked, places=["instructions", "input.0"])
    with pytest.raises(InvalidRequest, match=f"^{named}: wrong") as caught, asked.in_its_words():
        raise InvalidRequest(f"{param}: wrong", param=param)
    assert caught.value.param == named


ITEMS = st.one_of(
    st.builds(
        lambda role, text: {"role": role, "content": text},
        st.sampled_from(["user", "assistant", "system", "developer"]),
        st.sampled_from(["hi", "", "</think>", "☕"]),
    ),
    st.just({"type": "reasoning", "summary": [], "content": [{"text": "hm"}]}),
    st.just({"type": "reasoning", "summary": [], "encrypted_content": "x"}),
    st.just({"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"}),
    st.just({"type": "function_call_output", "call_id": "1", "output": "sunny"}),
    st.just({"type": "message", "role": "user", "content": None}),
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "instructions": st.sampled_from([None, "be kind"]),
        "tools": st.just([WEATHER]),
        "tool_choice": st.sampled_from(["auto", "none", "required"]),
        "reasoning": st.sampled_from([None, {"effort": "none"}, {"effort": "high"}]),
        "text": st.sampled_from([{}, {"format": {"type": "json_object"}}]),
        "max_output_tokens": st.integers(1, 30),
        "top_logprobs": st.sampled_from([0, 1]),
    },
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(items=st.lists(ITEMS, max_size=5), fields=FIELDS)
async def test_whatever_is_asked_is_answered_or_refused(v4, items, fields):
    answers(v4, f"hm</think>Let me see.{CALL}")
    body = {"model": "tiny", "input": items, "max_output_tokens": 20, **fields}
    answer = await v4.http.post("/v1/responses", json=body)
    if answer.status_code == 400:
        assert answer.json()["error"]["message"]
        return
    await same_streamed(v4, items, **{"max_output_tokens": 20, **fields})
