"""No schema holds anybody up, gets further than the router, or counts against a node."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from sluice.protocol.messages import ChoiceFailed, InvalidRequest
from sluice.router.text import grammar_judge
from sluice.router.text.v4.words import CONTROL_TOKENS, EOS


def nested(depth):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def optional(count):
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}}


TO_A = {"$ref": "#/$defs/a"}
HOSTILE = {
    "multipleOf 99991": {"type": "integer", "multipleOf": 99991},
    "multipleOf 499979": {"type": "integer", "multipleOf": 499979},
    "multipleOf 999983": {"type": "integer", "multipleOf": 999983},
    "multipleOf in parts": {"allOf": [{"multipleOf": p} for p in (7919, 7907, 7901)]},
    "only itself": {"$ref": "#"},
    "circle": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": TO_A}},
    "700 optional": optional(700),
    "10,000 optional": optional(10_000),
    "100 deep": nested(55),
    "long enum": {"enum": [f"value-{index}" for index in range(30_000)]},
    "900 kB": {"enum": ["x" * 900_000]},
    "look-around": {"type": "string", "pattern": "(?=.*a.{20})x"},
    "impossible length": {"type": "string", "maxLength": 2**64},
    "impossible range": {"type": "number", "minimum": 1.2e-300, "maximum": 9.8e300},
}  # fmt: skip
REQUIRED_5000 = {**optional(5000), "required": [f"p{i}" for i in range(5000)]}
HEAVY = {  # that may as well be followed
    "5,000 required": REQUIRED_5000,  # a fast machine is done with it within the limit
    "(a{1,1000}){1,1000}": {"type": "string", "pattern": "(a{1,1000}){1,1000}"},
    "^(a|a?)+$": {"type": "string", "pattern": "^(a|a?)+$"},
    "1e9 characters": {"type": "string", "maxLength": 10**9},
}
MAY_PASS = {"100 deep", *HEAVY}


def form(schema):
    return {"type": "json_schema", "json_schema": {"schema": schema}}


async def test_hostile_schemas_are_refused_beside_others_that_are_answered(world):
    for name, schema in (HOSTILE | HEAVY).items():
        await world.until(world.quiescent)
        world.decodes["decode-0"].calls.clear()
        hostile = asyncio.create_task(world.complete(response_format=form(schema)))
        assert (await world.complete()).status_code == 200
        answer = await hostile
        if answer.status_code == 200 and name in MAY_PASS:
            continue
        assert answer.status_code == 400, name
        assert answer.json()["error"]["param"] == "response_format", name
        assert len(answer.text) < 1000, name
        await world.until(world.quiescent)
        assert world.decodes["decode-0"].calls == ["reserve", "release"], "only the innocent's"


async def test_a_schema_that_takes_longer_than_the_limit_is_refused(world, monkeypatch):
    """However fast the machine."""
    monkeypatch.setattr(grammar_judge, "LIMIT_S", 0.02)
    answer = await world.complete(response_format=form(REQUIRED_5000))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "response_format" and "too much to follow" in error["message"]


async def test_the_loop_turns_while_a_schema_is_looked_at(world):
    hostile = asyncio.create_task(
        world.complete(response_format=form(HOSTILE["multipleOf 999983"]))
    )
    num_answered = 0
    while not hostile.done():
        assert (await world.complete(max_tokens=1)).status_code == 200
        num_answered += 1
    assert (await hostile).status_code == 400 and num_answered > 3


async def test_a_schema_is_looked_at_once(world):
    async def refused():
        answer = await world.complete(response_format=form(HOSTILE["multipleOf 499979"]))
        return answer.json()["error"]["message"]

    messages = await asyncio.gather(*(refused() for _ in range(300)))
    assert len(set(messages)) == 1 and "CPU time" in messages[0]
    again = asyncio.create_task(refused())
    await world.complete()  # a helper takes longer
    assert again.done()


async def test_a_client_that_leaves_does_not_spoil_the_verdict_for_others(world):
    schema = form(optional(100))
    leaving = world.raw(response_format=schema)
    staying = asyncio.create_task(world.complete(response_format=schema))
    await asyncio.sleep(0)
    leaving.task.cancel()
    assert (await staying).status_code == 200


async def test_what_a_node_finds_in_the_request_is_the_clients_fault_once(world):
    decode = world.decodes["decode-0"]
    decode.error_after = 2
    decode.error_cause = InvalidRequest("response_format: the grammar failed", "response_format")
    answer = await world.complete(response_format=form({"type": "object"}))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "response_format"
    await world.until(world.quiescent)
    assert decode.calls == ["reserve", "release"]
    assert not any(node.breaker.num_failures for node in world.service.nodes)


async def test_a_token_that_cannot_be_chosen_is_tried_again_without_blame(world):
    decode = world.decodes["decode-0"]
    decode.error_after, decode.error_cause = 2, ChoiceFailed("not finite")
    answer = await world.complete()
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == world.expected()
    assert decode.calls.count("reserve") == 2
    assert not any(node.breaker.num_failures for node in world.service.nodes)


@pytest.fixture
async def v4(make_world, checkpoint_writer, tmp_path):
    """A checkpoint that can be made to call tools."""
    folder = checkpoint_writer(tmp_path / "v4", chat_template=None)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(list(CONTROL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "deepseek_v4",
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_id": tokenizer.token_to_id(EOS),
        "max_position_embeddings": 1 << 20,
    }
    (folder / "config.json").write_text(json.dumps(config))
    world = await make_world(folder=folder)
    world.add_prefill(num_pages=1 << 16, max_model_len=1 << 20)
    world.add_decode(num_pages=1 << 16, max_model_len=1 << 20)
    return world


@pytest.mark.parametrize("name", ["multipleOf 499979", "10,000 optional", "900 kB"])
async def test_hostile_schemas_of_tools_are_refused_as_well(v4, name):
    parameters = {"type": "object", "properties": {"a": HOSTILE[name]}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    answer = await v4.chat(tools=[tool], tool_choice="required")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools", answer.text
    assert not v4.decodes["decode-0"].calls


async def test_a_tokenizer_without_grammars_is_served_without_schemas(
    make_world, checkpoint_writer, tmp_path
):
    folder = checkpoint_writer(tmp_path / "odd")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["decoder"] = {"type": "Fuse"}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    world = await make_world(folder=folder)
    world.add_prefill()
    world.add_decode()
    assert (await world.complete()).status_code == 200
    answer = await world.complete(response_format={"type": "json_object"})
    assert answer.status_code == 400 and "tokenizer" in answer.json()["error"]["message"]


names = st.sampled_from(["a", "b", "c"])
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
)
KEYWORDS = {
    "type": st.sampled_from(["object", "array", "string", "integer", "number", "null", 5])
    | st.lists(st.sampled_from(["string", "integer", "null"]), max_size=3),
    "enum": st.lists(scalars, max_size=3),
    "const": scalars,
    "multipleOf": st.integers(-5, 10**6) | st.floats(allow_nan=False, allow_infinity=False),
    "minimum": scalars,
    "maximum": scalars,
    "minLength": st.integers(-1, 10**12),
    "maxLength": st.integers(-1, 10**12),
    "maxItems": st.integers(-1, 10**12),
    "pattern": st.text(alphabet="ab.*+?()[]{}|^$\\,1d9", max_size=20),
    "format": st.sampled_from(["date", "email", "uuid", "nothing"]),
    "$ref": st.sampled_from(["#", "#/$defs/a", "#/properties/a", "http://x/y", ""]),
}  # fmt: skip


def within(schemas):
    return st.fixed_dictionaries(
        {},
        optional={
            **KEYWORDS,
            "properties": st.dictionaries(names, schemas, max_size=3),
            "required": st.lists(names, max_size=3),
            "additionalProperties": schemas | st.booleans(),
            "items": schemas,
            "anyOf": st.lists(schemas, max_size=3),
            "allOf": st.lists(schemas, max_size=3),
            "oneOf": st.lists(schemas, max_size=3),
            "$defs": st.dictionaries(names, schemas, max_size=2),
        },
    ).map(lambda schema: dict(list(schema.items())[:4]))


schemas = st.recursive(st.fixed_dictionaries({}, optional=KEYWORDS) | st.booleans(), within)


@pytest.mark.timeout(60)
async def test_any_schema_is_followed_or_refused(world):
    loop, statuses = asyncio.get_running_loop(), set()

    @settings(
        max_examples=60,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.dictionaries(st.just("a"), schemas, min_size=1))
    def ask(properties) -> None:
        schema = form({"type": "object", "properties": properties, "required": ["a"]})
        asked = world.complete(max_tokens=1, response_format=schema)
        answer = asyncio.run_coroutine_threadsafe(asked, loop).result(10)
        statuses.add(answer.status_code)
        assert answer.status_code in (200, 400), answer.text

    await asyncio.to_thread(ask)
    assert statuses == {200, 400}
