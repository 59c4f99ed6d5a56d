"""Calls of models with their own templates, by grammar: whatever passes is read as calls."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest
from grammar_walks import passes_through, random_parameters, random_walk
from tokenizers import AddedToken, Tokenizer

from sluice.protocol.grammar import Grammars
from sluice.protocol.messages import InvalidRequest
from sluice.router.text.families.calls import Reasoning, answer_grammar
from sluice.router.text.families.parser import FamilyParser
from sluice.router.text.families.tool_formats import FORMATS, MARKERS

WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 9},
            "unit": {"$ref": "#/$defs/unit"},
            "days": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
        "$defs": {"unit": {"enum": ["C", "F"]}},
    },
}
CLOCK = {"name": 'the "clock"', "parameters": {}}
NO_TYPE = {"name": "f", "parameters": {"properties": {"a": {"const": 1}}, "required": ["a"]}}
GOOD = {"city": 'Zü "☕"\n', "unit": "F", "days": None}
JSON = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
FAMILIES = sorted(FORMATS)
SPECIAL = ("<|python_tag|>", "[TOOL_CALLS]")  # in the tokenizers of these families


@pytest.fixture(scope="module", params=["as tokens", "as text"])
def tokenizer(request, tmp_path_factory, checkpoint_writer):
    """One whose vocabulary has the families' markers, or one that spells them; and its folder."""
    folder = checkpoint_writer(tmp_path_factory.mktemp("calls") / "families")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if request.param == "as tokens":
        tokens = [AddedToken(m, special=m in SPECIAL, normalized=False) for m in MARKERS if m]
        tokenizer.add_tokens(tokens)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer, folder


@pytest.fixture(scope="module")
def grammar(tokenizer):
    ids = {m: i for m in MARKERS if m and (i := tokenizer[0].token_to_id(m)) is not None}

    def make(family, *tools, must=True, parallel=True, reasoning=Reasoning.NONE, json_schema=None):
        return answer_grammar(
            tools,
            FORMATS[family] if tools else None,
            ids,
            must=must,
            parallel=parallel,
            reasoning=reasoning,
            json_schema=json_schema,
        )

    return make


@pytest.fixture(scope="module")
def matcher_of(tokenizer):
    it, folder = tokenizer
    grammars = Grammars(folder, vocab_size=it.get_vocab_size(), eos_token_ids=(1,))
    return lambda grammar: grammars.matcher_of(grammar, param="tools")


@pytest.fixture
def follows(tokenizer, matcher_of):
    return lambda grammar, text: passes_through(tokenizer[0], matcher_of(grammar), text)


def written(family, *calls):
    """Calls as the family's models write them."""
    key = "parameters" if family == "llama3_json" else "arguments"
    texts = [json.dumps({"name": n, key: a}, ensure_ascii=False) for n, a in calls]
    match family:
        case "hermes":
            return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
        case "mistral":
            return f"[TOOL_CALLS] [{', '.join(texts)}]"
    return "; ".join(texts)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("tool", "arguments", "passes"),
    [
        (WEATHER, GOOD, True),
        (CLOCK, {}, True),
        (CLOCK, {"any": [1, {"more": None}]}, True),
        (NO_TYPE, {"a": 1}, True),
        (WEATHER, {"city": "Bern"}, False),
        (WEATHER, GOOD | {"unit": "K"}, False),
        (WEATHER, GOOD | {"days": 1.5}, False),
        (WEATHER, GOOD | {"city": "0123456789"}, False),
        (WEATHER, GOOD | {"other": 1}, False),
        (NO_TYPE, [], False),
        ({"name": "rain"}, {}, False),
    ],
)
def test_a_call_passes_as_its_schema_says(grammar, follows, family, tool, arguments, passes):
    offered = grammar(family, WEATHER, CLOCK, NO_TYPE)
    assert follows(offered, written(family, (tool["name"], arguments))) is passes


@pytest.mark.parametrize("family", FAMILIES)
def test_a_required_call_leaves_no_way_round_it(grammar, follows, family):
    for text in ("", "Sorry", "[", f"hm {written(family, ('weather', GOOD))}"):
        assert not follows(grammar(family, WEATHER), text)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_call_at_a_time_or_several(grammar, follows, family):
    one = written(family, ("weather", GOOD))
    two = written(family, ("weather", GOOD), ('the "clock"', {}))
    for must in (True, False):
        several = grammar(family, WEATHER, CLOCK, must=must)
        assert follows(several, two) is (family != "llama3_json")
        alone = grammar(family, WEATHER, CLOCK, must=must, parallel=False)
        assert follows(alone, one) and not follows(alone, two)
    for text in ("", "Hello < there {", " a [TOOL_", "1 {", "so <tool_call"):
        assert follows(alone, text)
    assert follows(alone, f"One moment.\n{one}")  # of Llama's, no call


@pytest.mark.parametrize("family", FAMILIES)
def test_reasoning_comes_before_calls_and_json(grammar, follows, tokenizer, family):
    """It is any text; a token that is a marker is none."""
    call = written(family, ("weather", GOOD))
    is_text = tokenizer[0].token_to_id("</think>") is None or family == "llama3_json"
    for tools, schema, answer in (((WEATHER,), None, call), ((), JSON, '{"a": 1}')):
        options = {"must": bool(tools), "json_schema": schema}
        opened = grammar(family, *tools, reasoning=Reasoning.OPENED, **options)
        possible = grammar(family, *tools, reasoning=Reasoning.POSSIBLE, **options)
        for thought in ("", "hm\n < ", *([f"{call} maybe"] if is_text else [])):
            for gap in ("", "\n\n"):
                assert follows(opened, f"{thought}</think>{gap}{answer}")
                assert follows(possible, f"<think>{thought}</think>{gap}{answer}")
        assert follows(possible, answer) and not follows(opened, answer)
        for text in ("hm", "hm</think>", "hm</think>Hello"):
            assert not follows(opened, text) and not follows(possible, f"<think>{text}")


@pytest.mark.parametrize("family", FAMILIES)
def test_with_a_schema_and_tools_there_are_calls_or_json(grammar, follows, family):
    either = grammar(family, WEATHER, must=False, json_schema=JSON)
    for answer, passes in (
        ('{"a": 1}', True),
        ('{"a": "x"}', False),
        (written(family, ("weather", GOOD)), True),
        (written(family, ("weather", {})), False),
        ("", False),
        ("Hello", False),
    ):
        assert follows(either, answer) is passes, answer
    must = grammar(family, WEATHER, json_schema=JSON)
    assert follows(must, written(family, ("weather", GOOD))) and not follows(must, '{"a": 1}')


@pytest.mark.parametrize("family", FAMILIES)
def test_whatever_passes_is_read_as_a_call_that_satisfies_its_schema(
    grammar, tokenizer, matcher_of, family
):
    it, seed = tokenizer[0], random.randrange(2**32)
    print(f"seed={seed}")
    rng, num_done = random.Random(seed), 0
    for _ in range(12):
        schema = random_parameters(rng)
        tool = {"name": "f", "parameters": schema}
        matcher = matcher_of(grammar(family, tool, must=rng.random() < 0.5, parallel=False))
        text = random_walk(it, matcher, rng, ['"', *([FORMATS[family].marker] * 2)])
        if text is None or "\ufffd" in text:
            continue
        parser = FamilyParser(calls=FORMATS[family], names=("f",))
        parts = [*parser.push(text), *parser.flush(complete=True)]
        calls = [part.call for part in parts if part.call is not None]
        assert len([call for call in calls if call.name]) <= 1
        if calls:
            jsonschema.validate(json.loads("".join(call.arguments for call in calls)), schema)
            num_done += 1
    assert num_done > 0


@pytest.mark.parametrize("schema", [{"type": "string"}, {"$ref": "#/nowhere"}, {"type": 1}])
def test_what_allows_no_arguments_is_refused_by_its_field(grammar, schema):
    with pytest.raises(InvalidRequest) as info:
        grammar("hermes", {"name": "f", "parameters": schema})
    assert info.value.param == "tools"
