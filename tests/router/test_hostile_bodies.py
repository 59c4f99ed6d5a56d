"""Whatever stands in a body is answered soon, with 200 or 400, and others are beside it."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sluice.router.text import checkpoint as checkpoint_module
from sluice.router.text.v4.words import BOS, CONTROL_TOKENS, EOS

JSON_TYPE = {"content-type": "application/json"}
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "the cat"}


@pytest.fixture(scope="module")
def v4_folder(tmp_path_factory, checkpoint_writer):
    folder = checkpoint_writer(tmp_path_factory.mktemp("hostile") / "v4", chat_template=None)
    tokenizer = checkpoint_module.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.add_tokens(list(CONTROL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "deepseek_v4", "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_id": tokenizer.token_to_id(EOS), "max_position_embeddings": 1 << 16,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
async def v4(make_world, v4_folder):
    """A world whose checkpoint speaks DeepSeek-V4's own format."""
    world = await make_world(folder=v4_folder)
    world.add_prefill(num_pages=1 << 12, max_model_len=1 << 16)
    world.add_decode(num_pages=1 << 12, max_model_len=1 << 16)
    return world


async def post(world, path, **fields):
    body = json.dumps({"model": "tiny", "max_tokens": 4, **fields}).encode()
    return await world.http.post(path, content=body, headers=JSON_TYPE)


def refused(answer, param: str | None = None) -> str:
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert param is None or error["param"] == param
    assert len(answer.content) < 8000  # no echo of what was sent
    return error["message"]


# Beside any of these, others are served.

ONES = b"1," * (1 << 20)
KEYS = b",".join(b'"k%d": 1' % number for number in range(1 << 17))
LONG = b"a" * 14_000_000
HOSTILE = {
    "faults": (CHAT, b'{"model": "tiny", "messages": [' + ONES + b"1]}"),
    "lists": (CHAT, b'{"model": "tiny", "messages": [' + b"[]," * (1 << 18) + b"1]}"),
    "nested faults": (
        CHAT,
        b'{"model": "tiny", "messages": [{"role": "assistant", "tool_calls": [' + ONES + b"1]}]}",
    ),
    "ids": (COMPLETE, b'{"model": "tiny", "prompt": [' + ONES + b"1]}"),
    "stop ids": (COMPLETE, b'{"model": "tiny", "prompt": "a", "stop_token_ids": [' + ONES + b"1]}"),
    "keys": (COMPLETE, b'{"model": "tiny", ' + KEYS + b"}"),
    "nesting": (CHAT, b'{"model": "tiny", "messages": ' + b"[" * 4_000_000),
    "digits": (COMPLETE, b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 10_000_000 + b"}"),
    "key": (COMPLETE, b'{"model": "tiny", "prompt": "a", "' + b"k" * 4_000_000 + b'": 1}'),
    "text": (CHAT, b'{"model": "tiny", "messages": [{"role": "user", "content": "%s"}]}' % LONG),
    "escapes": (COMPLETE, b'{"model": "tiny", "prompt": "' + b"\\u0041" * 2_000_000 + b'"}'),
}


@pytest.mark.parametrize("kind", HOSTILE)
async def test_a_hostile_body_is_refused_while_others_are_served(v4, kind):
    path, body = HOSTILE[kind]
    assert (await v4.complete()).status_code == 200
    asked = asyncio.create_task(v4.http.post(path, content=body, headers=JSON_TYPE))
    longest_s = 0.0  # of this thread's processor time: others may keep the machine busy
    while not asked.done():
        begun = time.thread_time()
        assert (await v4.http.get("/health")).status_code == 200
        assert (await v4.complete()).status_code == 200
        await asyncio.sleep(0.005)
        longest_s = max(longest_s, time.thread_time() - begun)
    refused(asked.result())
    print(kind, f"{longest_s * 1000:.0f} ms")
    assert longest_s < 0.4  # it is a tenth of that


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_a_million_faults_cost_no_memory_here(v4):
    """pydantic describes each with some hundred bytes, if it is let."""
    before = resident_bytes()
    for kind in ("faults", "nested faults", "stop ids"):
        path, body = HOSTILE[kind]
        refused(await v4.http.post(path, content=body, headers=JSON_TYPE))
    assert resident_bytes() - before < 64 << 20


BAD_JSON = [
    b'{"model": "tiny", "prompt": "a", "prompt": "b"}',
    b'{"model": "tiny", "prompt": "a", "metadata": {"x": 1, "x": 2}}',
    b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    b'{"model": "tiny", "prompt": "a", "metadata": {"x": 1e999}}',
    b'{"model": "tiny", "prompt": "a", "temperature": -1e999}',
    b'{"model": "tiny", "prompt": "a", "top_p": Infinity}',
    b'{"model": "tiny", "prompt": "\\ud800"}',
    b'{"model": "tiny", "prompt": "\\udc00\\ud800"}',
    b'{"model": "tiny", "prompt": "a\x00b"}',
    b'{"model": "tiny", "prompt": "\xed\xa0\x80"}',
    b'{"model": "tiny", "prompt": "a", "metadata": ' + b'{"a":' * 300 + b"1" + b"}" * 300 + b"}",
    b'{"model": "tiny", "prompt": "a", "' + b"k" * 100_000 + b'": 1}',
    b'\xef\xbb\xbf{"model": "tiny", "prompt": "a"}',
]


@pytest.mark.parametrize("body", BAD_JSON, ids=lambda body: repr(body[32:60]))
async def test_json_that_readers_take_in_different_ways_is_refused(v4, body):
    refused(await v4.http.post(COMPLETE, content=body, headers=JSON_TYPE))


# Shapes within JSON schemas of tools

SHAPES = [
    ({"properties": [1]}, "parameters.properties"),
    ({"properties": {"a": 5}}, "parameters.properties.a"),
    ({"required": 5}, "parameters.required"),
    ({"required": [5]}, "parameters.required"),
    ({"properties": {"a": {"enum": 5}}}, "parameters.properties.a.enum"),
    ({"properties": {"a": {"type": 5}}}, "parameters.properties.a.type"),
    ({"properties": {"a": {"type": [["string"]]}}}, "parameters.properties.a.type"),
    ({"$defs": [1]}, "parameters.$defs"),
    ({"definitions": "x"}, "parameters.definitions"),
]
GOOD_SHAPES = [
    {"properties": {"a": {"type": ["string", "null"]}}},
    {"properties": {"a": {"type": ["integer", "null"], "enum": [1, None]}}, "required": ["a"]},
    {"properties": {"a": {"type": "string"}}, "required": None},
    {"properties": None, "required": None, "$defs": None},
    {"properties": {"a": True, "b": {}, "": {"type": "integer"}, "q\n": {"type": "string"}}},
]
CHOICES = ["auto", "required", {"type": "function", "function": {"name": "f"}}]


def tool(parameters) -> dict:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize(("parameters", "place"), SHAPES, ids=str)
async def test_a_schema_of_another_shape_is_refused_by_name(v4, parameters, place, choice):
    answer = await post(v4, CHAT, messages=[USER], tools=[tool(parameters)], tool_choice=choice)
    assert place in refused(answer, "tools.0.function")


async def test_a_name_that_v4_cannot_write_is_taken_where_no_call_is_enforced(v4):
    asked = {"messages": [USER], "tools": [tool({"properties": {'q"': {"type": "string"}}})]}
    assert (await post(v4, CHAT, **asked)).status_code == 200
    assert "quotation mark" in refused(
        await post(v4, CHAT, **asked, tool_choice="required"), "tools"
    )


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("parameters", GOOD_SHAPES, ids=str)
async def test_schemas_as_libraries_write_them_are_taken(v4, parameters, choice):
    answer = await post(v4, CHAT, messages=[USER], tools=[tool(parameters)], tool_choice=choice)
    assert answer.status_code == 200, answer.text


ARGUMENTS = [
    "[" * 1000, '{"a":' * 1000, '{"a": "\\ud800"}', '{"a": NaN}', '{"a": 1e999}', "9" * 5000,
    '{"a": ' + "9" * 5000 + "}", "", "\x00", '{"a": 1, "a": 2}', "null", '{"\u202e": "\u2028"}',
]  # fmt: skip


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda text: ascii(text[:20]))
async def test_arguments_of_a_call_may_be_any_text(v4, arguments):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    seen = v4.seen_requests()
    answer = await post(v4, CHAT, messages=[USER, turn, USER])
    assert answer.status_code == 200, answer.text
    text = v4.tokenizer.decode(seen[0].prompt_token_ids, skip_special_tokens=False)
    assert "NaN" not in text or arguments in text  # what is no JSON stays as it came


# Anything at all, in the places where text or a schema stands within JSON

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)
WORDS = st.sampled_from(
    ["type", "properties", "required", "enum", "const", "items", "anyOf", "$ref", "$defs",
     "additionalProperties", "name", "parameters", "content", "role", "function", "arguments"]
)  # fmt: skip
NAMES = st.sampled_from(["string", "object", "array", "null", "integer", "f", "#/$defs/f", "user"])
SCHEMAS = st.recursive(
    VALUES | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | TEXT, inner, max_size=4),
    max_leaves=12,
)


def call(arguments) -> list:
    turn = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
    }
    return [USER, turn, USER]


PLACES = {
    "parameters": lambda value: {"tools": [tool(value)], "tool_choice": "required"},
    "properties": lambda value: {"tools": [tool({"properties": value})], "tool_choice": "required"},
    "property": lambda value: {
        "tools": [tool({"type": "object", "properties": {"a": value}})], "tool_choice": "required",
    },
    "required": lambda value: {
        "tools": [tool({"properties": {"a": {}}, "required": value})], "parallel_tool_calls": False,
    },
    "function": lambda value: {"tools": [{"type": "function", "function": value}]},
    "tools": lambda value: {"tools": value},
    "tool_choice": lambda value: {"tools": [tool({})], "tool_choice": value},
    "arguments": lambda value: {"messages": call(value)},
    "arguments' text": lambda value: {"messages": call(json.dumps(value))},
    "message": lambda value: {"messages": [value]},
    "content": lambda value: {"messages": [{"role": "user", "content": value}]},
    "system's tools": lambda value: {
        "messages": [{"role": "system", "content": "a", "tools": value}, USER],
    },
    "thinking": lambda value: {"thinking": value},
    "response_format": lambda value: {"response_format": value},
    "stream_options": lambda value: {"stream": True, "stream_options": value},
    "chat_template_kwargs": lambda value: {"chat_template_kwargs": value},
    "unknown": lambda value: {"unknown": value},
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
async def test_any_json_at_any_place_is_answered(v4, place):
    loop = asyncio.get_running_loop()

    @settings(
        max_examples=int(os.environ.get("SLUICE_FUZZ_CASES", "0")) // len(PLACES) or 25,
        derandomize="SLUICE_FUZZ_CASES" not in os.environ,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(SCHEMAS)
    def ask(value) -> None:
        fields = {"messages": [USER]} | PLACES[place](value)
        asked = asyncio.run_coroutine_threadsafe(post(v4, CHAT, **fields), loop)
        answer = asked.result(timeout=30)
        assert answer.status_code in (200, 400), (value, answer.text)

    await asyncio.to_thread(ask)
    await v4.until(v4.quiescent)


TOKENS = [b'{"model":"tiny"', b",", b'"prompt":', b'"messages":', b"[", b"]", b"{", b"}", b'"',
          b"1", b"e9", b"-", b"\\u", b"d800", b"null", b"\x00", b"\xff", b":"]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, COMPLETE, "/tokenize", "/detokenize"])
async def test_any_bytes_are_answered(v4, path):
    loop = asyncio.get_running_loop()

    @settings(
        max_examples=40, derandomize=True, database=None, deadline=None,
        phases=(Phase.generate,), suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.binary(max_size=200) | st.lists(st.sampled_from(TOKENS), max_size=20).map(b"".join))
    def ask(body) -> None:
        asked = v4.http.post(path, content=body, headers=JSON_TYPE)
        answer = asyncio.run_coroutine_threadsafe(asked, loop).result(timeout=30)
        assert answer.status_code in (200, 400), (body, answer.text)

    await asyncio.to_thread(ask)
