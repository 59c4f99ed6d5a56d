"""Tool calls by grammar: what V4 is trained to write passes, everything else does not."""

from __future__ import annotations

import json
import random

import jsonschema
import numpy as np
import pytest
from grammar_walks import passes_through, random_parameters, random_walk
from tokenizers import Tokenizer

from sluice.protocol.grammar import Grammars
from sluice.protocol.messages import InvalidRequest
from sluice.router.text.answers.conversation import ChatOptions
from sluice.router.text.v4.calls import answer_grammar
from sluice.router.text.v4.encoding import V4Format
from sluice.router.text.v4.parser import V4Parser
from sluice.router.text.v4.words import CONTROL_TOKENS, END_THINK, EOS, OPEN_CALLS

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"type": "integer"},
        "where": {"$ref": "#/$defs/place"},
        "note": {},
    },
    "required": ["city", "unit"],
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}},
                        "additionalProperties": False}},
}  # fmt: skip
WEATHER = {"name": "weather", "parameters": SCHEMA}
CLOCK = {"name": "clock"}
GOOD = {"city": 'Zürich </div> "☕"\nnorth', "unit": "F", "days": 2, "where": {"x": 1.5}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory, checkpoint_writer):
    folder = checkpoint_writer(tmp_path_factory.mktemp("calls") / "v4", chat_template=None)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(list(CONTROL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer, folder


@pytest.fixture(scope="module")
def matcher_of(tokenizer):
    it, folder = tokenizer
    eos = it.token_to_id(EOS)
    grammars = Grammars(folder, vocab_size=it.get_vocab_size(), eos_token_ids=(eos,))
    return lambda grammar: grammars.matcher_of(grammar, param="tools")


@pytest.fixture
def follows(tokenizer, matcher_of):
    """Whether a text is one that the grammar lets through, to its end."""
    return lambda grammar, text: passes_through(tokenizer[0], matcher_of(grammar), text)


def written(*calls, content=""):
    """The answer as the format writes it into a prompt."""
    functions = [
        {"function": {"name": name, "arguments": json.dumps(arguments)}}
        for name, arguments in calls
    ]
    turn = {"role": "assistant", "content": content, "tool_calls": functions}
    asked = {"role": "user", "content": ""}
    text = V4Format().render([asked, turn, asked], ChatOptions(thinking=False))
    return text[text.index(END_THINK) + len(END_THINK) : text.index(EOS)]


def grammar(*tools, must=True, parallel=True, **options):
    return answer_grammar(tools, must=must, parallel=parallel, **{"end_think_id": None} | options)


@pytest.mark.parametrize(
    ("calls", "passes"),
    [
        ([("weather", GOOD)], True),
        ([("weather", GOOD), ("clock", {}), ("clock", {"any": [1], "more": "text"})], True),
        ([("weather", {"city": "", "unit": "C", "note": "x"})], True),
        ([("weather", {"city": "", "unit": "C", "note": [None]})], True),
        ([("weather", {"city": "Bern"})], False),
        ([("weather", GOOD | {"unit": "K"})], False),
        ([("weather", GOOD | {"days": 1.5})], False),
        ([("weather", GOOD | {"where": {"y": 1}})], False),
        ([("weather", GOOD | {"other": 1})], False),
        ([("rain", {})], False),
    ],
)
def test_calls_pass_as_their_schemas_say(follows, calls, passes):
    assert follows(grammar(WEATHER, CLOCK), written(*calls)) is passes


def test_a_required_call_leaves_no_way_round_it(follows):
    for text in ("", "Sorry", written(content="hm")):
        assert not follows(grammar(WEATHER), text)


def test_one_call_at_a_time(follows):
    one, two = [("clock", {})], [("clock", {}), ("clock", {})]
    for must in (True, False):
        alone = grammar(WEATHER, CLOCK, must=must, parallel=False)
        assert follows(alone, written(*one)) and not follows(alone, written(*two))
    for text in ("", "Hello < there", written(*one, content="One moment.")):
        assert follows(alone, text)
    assert not follows(alone, f"hm {OPEN_CALLS}\n")


def test_reasoning_comes_first_where_the_model_thinks(tokenizer, follows):
    thinking = grammar(CLOCK, end_think_id=tokenizer[0].token_to_id(END_THINK))
    for reasoning in ("", "let me see\n < ", f"a {OPEN_CALLS} maybe"):
        assert follows(thinking, reasoning + END_THINK + written(("clock", {})))
    assert not follows(thinking, written(("clock", {})))


JSON = '{"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"], \
"$defs": {"n": {"type": "integer"}}}'


def test_json_comes_after_free_reasoning(tokenizer, follows):
    end_think_id = tokenizer[0].token_to_id(END_THINK)
    thinking = grammar(must=False, end_think_id=end_think_id, json_schema=JSON)
    for reasoning in ("", 'let me {"a": "x"}\n', f"a {OPEN_CALLS} maybe"):
        for answer in ('{"a": 1}', '{\n  "a": 1\n}'):
            assert follows(thinking, reasoning + END_THINK + answer)
        for answer in ("", "{}", '{"a": "x"}', 'It is {"a": 1}', '{"a": 1}.'):
            assert not follows(thinking, reasoning + END_THINK + answer)
    assert not follows(thinking, '{"a": 1}')


def test_with_a_schema_and_tools_there_are_calls_or_json(tokenizer, follows):
    for end_think_id in (None, tokenizer[0].token_to_id(END_THINK)):
        either = grammar(WEATHER, must=False, end_think_id=end_think_id, json_schema=JSON)
        before = "" if end_think_id is None else f"hm{END_THINK}"
        for answer, passes in (
            ('{"a": 1}', True),
            (written(("weather", GOOD)), True),
            (written(("weather", GOOD), ("weather", GOOD)), True),
            ("", False),
            ("Hello", False),
            ('{"a": "x"}', False),
            (written(("weather", GOOD | {"unit": "K"})), False),
            (written(("weather", GOOD), content='{"a": 1}'), False),
        ):
            assert follows(either, before + answer) is passes, answer
    must = grammar(WEATHER, json_schema=JSON)
    assert follows(must, written(("weather", GOOD))) and not follows(must, '{"a": 1}')


def test_any_path_through_the_grammar_is_read_as_calls_with_valid_arguments(tokenizer, matcher_of):
    """Random tokens under the mask; text is ended by hand, as chance takes long to do it."""
    it, _ = tokenizer
    seed = random.randrange(2**32)
    print(f"seed={seed}")
    rng, end = np.random.default_rng(seed), it.encode("</｜DSML｜parameter>").ids
    schema = {"properties": {"unit": {"enum": ["C", "F"]}, "text": {"type": "string"}},
              "required": ["unit", "text"]}  # fmt: skip
    for _ in range(5):
        matcher, output = matcher_of(grammar({"name": "f", "parameters": schema})), []
        while not matcher.complete:
            allowed = np.flatnonzero(matcher.allowed())
            output += end if len(allowed) > 50 else [int(rng.choice(allowed))]
            matcher.follow(output)
        text = it.decode(output, skip_special_tokens=False)
        parser = V4Parser(reasoning=False, calls=True)
        parts = [*parser.push(text), *parser.flush(complete=True)]
        calls = [part.call for part in parts if part.call]
        assert {call.name for call in calls if call.name} == {"f"}
        first = "".join(call.arguments for call in calls if call.index == 0)
        assert json.loads(first)["unit"] in ("C", "F")


def arguments_of(text):
    parser = V4Parser(reasoning=False, calls=True)
    parts = [*parser.push(text), *parser.flush(complete=True)]
    assert not "".join(part.content for part in parts)
    calls = [part.call for part in parts if part.call]
    return json.loads("".join(call.arguments for call in calls if call.index == 0))


NUM_SCHEMAS = 30
ENDS = ('"', "</｜DSML｜parameter>")


def test_whatever_the_grammar_of_a_schema_lets_through_satisfies_the_schema(tokenizer, matcher_of):
    it, _ = tokenizer
    seed = random.randrange(2**32)
    print(f"seed={seed}")
    rng, num_done = random.Random(seed), 0
    for _ in range(NUM_SCHEMAS):
        schema = random_parameters(rng)
        matcher = matcher_of(grammar({"name": "f", "parameters": schema}, parallel=False))
        if (text := random_walk(it, matcher, rng, ENDS)) is None or "\ufffd" in text:
            continue
        if text.count("<｜DSML｜parameter") < text.count("</｜DSML｜parameter>"):
            continue  # the end's marker within JSON, where the parser takes it for the end
        jsonschema.validate(arguments_of(text), schema)
        num_done += 1
    assert num_done > NUM_SCHEMAS / 4


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, [1, None], ["x", "1", 1.5]),
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, [1, None], ["x"]),
        ({"$ref": "#/$defs/color"}, ["red"], ["green", 1]),
        ({"allOf": [{"$ref": "#/$defs/color"}], "default": "red"}, ["red"], ["green"]),
        ({"anyOf": [{"$ref": "#/$defs/color"}, {"type": "null"}]}, ["red", None], ["green", ""]),
        ({"$ref": "#/$defs/place"}, [{"x": 1}], [{}, "x", {"x": "y"}]),
        ({"$ref": "#/$defs/fixed"}, ["a/b"], ["a"]),
        ({"type": "string", "maxLength": 3}, ["", "abc", "<☕>"], ["abcd", 1]),
        ({"type": "string", "minLength": 2}, ["ab", "a\n"], ["a", ""]),
        ({"type": "string", "pattern": "^[0-9]{2}/$"}, ["12/"], ["12", "a12/", "12/\n"]),
        ({"type": "string", "pattern": "[0-9]{2}"}, ["12", "a\n34b"], ["1", "1b2"]),
        ({"type": "string", "pattern": "^a", "maxLength": 2}, ["a", "ab"], ["abc", "b"]),
        ({"type": ["string", "null"], "maxLength": 2}, ["ab", None], ["abc", 1]),
        ({"type": "array", "items": {"$ref": "#/$defs/color"}}, [["red"], []], [["x"], "red"]),
        ({"$ref": "#/properties/twin"}, [5], ["x", 10]),
        ({"type": "object", "properties": {"in": {"$ref": "#"}}}, [{"in": {"a": {}}}], ["x"]),
    ],
)
@pytest.mark.parametrize("at_the_top", [True, False])
def test_arguments_are_held_to_their_schema_however_it_is_written(
    follows, schema, good, bad, at_the_top
):
    definitions = {
        "color": {"enum": ["red", "blue"]},
        "place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
        "fixed": {"const": "a/b"},
    }
    properties = {"a": schema, "twin": {"type": "integer", "maximum": 9}}
    parameters = {"type": "object", "properties": properties, "required": ["a"]}
    if not at_the_top and "#/$defs" in json.dumps(schema):
        parameters = {"$ref": "#/$defs/top", "$defs": definitions | {"top": parameters}}
    else:
        parameters |= {"$defs": definitions}
    tool = grammar({"name": "f", "parameters": parameters})
    for values, passes in ((good, True), (bad, False)):
        for value in values:
            assert follows(tool, written(("f", {"a": value}))) is passes, value


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"properties": {}, "additionalProperties": False}, [{}], [{"a": 1}]),
        ({"additionalProperties": {"type": "integer"}}, [{}, {"a": 1, "b": 2}], [{"a": "x"}]),
        ({"required": ["a"]}, [{"a": "x"}, {"a": 1}], [{}]),
        ({"allOf": [{"properties": {"a": {"type": "integer"}}}, {"required": ["a"]}]},
         [{"a": 1}], [{}, {"a": "x"}]),
        ({"anyOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]},
                    {"properties": {"b": {"type": "null"}}, "required": ["b"]}]},
         [{"a": 1}, {"b": None}], [{}, {"a": None}]),
        ({"properties": {"a": True, "b": False}}, [{"a": "x"}, {"a": [1]}, {}], [{"b": 1}]),
        ({"properties": {"definitions": {"type": "integer"}}}, [{"definitions": 1}],
         [{"definitions": "x"}]),
        ({"type": None, "properties": None, "required": None}, [{}, {"a": 1}], []),
    ],
)  # fmt: skip
def test_sets_of_arguments_are_held_to_their_schema(follows, schema, good, bad):
    tool = grammar({"name": "f", "parameters": schema})
    for values, passes in ((good, True), (bad, False)):
        for value in values:
            assert follows(tool, written(("f", value))) is passes, value


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/none"},
        {"$ref": "http://x/y"},
        {"$ref": 5},
        {"type": "string"},
        {"type": ["string", "null"]},
        {"anyOf": 5},
        {"allOf": [{"$ref": "#"}]},
        {"not": {}},
        {"minProperties": 1},
        {"properties": {'a"b': {}}},
        {"properties": {"a": {"$ref": "#/properties/a"}}},
        {"properties": {"a": {"enum": 5}}},
        {"properties": {"a": {"type": 5}}},
        {"properties": {"a": {"anyOf": {"x": 1}}}},
        {"properties": 5},
        {"required": [5]},
        {"required": ["a"], "additionalProperties": False},
        {"oneOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"$defs": {str(n): {"allOf": [{"$ref": f"#/$defs/{n + 1}"}] * 4} for n in range(30)}
         | {"30": {}}, "$ref": "#/$defs/0"},
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused_by_its_field(matcher_of, schema):
    with pytest.raises(InvalidRequest, match="tools: ") as refused:
        matcher_of(grammar({"name": "f", "parameters": schema}))
    assert refused.value.param == "tools"


def test_schemas_that_no_grammar_follows_are_refused(matcher_of):
    broken = {"name": "f", "parameters": {"properties": {"x": {"type": "nothing"}}}}
    with pytest.raises(InvalidRequest, match="tools: "):
        matcher_of(grammar(broken))


def test_definitions_that_every_parameter_brings_along_do_not_add_up_without_end():
    definitions = {f"d{index}": {"const": index} for index in range(10_000)}
    properties = {f"p{index}": {"$ref": "#/$defs/d0"} for index in range(10_000)}
    with pytest.raises(InvalidRequest, match="tools: .* characters of schemas, expected at most"):
        grammar({"name": "f", "parameters": {"properties": properties, "$defs": definitions}})
