"""Calls and thoughts of models with their own templates are read the same however text is cut."""

from __future__ import annotations

import json
import random

import pytest

from sluice.router.text.families.parser import FamilyParser
from sluice.router.text.families.tool_formats import FORMATS, tool_format_of

F, G = ("f", {"city": "Zürich ☕", "n": [1, {"a": '}]"\\'}]}), ("g", {})
CALL_F, CALL_G = (json.dumps({"name": n, "arguments": a}, ensure_ascii=False) for n, a in (F, G))
LLAMA_F = json.dumps({"name": "f", "parameters": F[1]})
LLAMA_G = json.dumps({"type": "function", "name": "g", "parameters": {}})
JSON = '{"name": "nobody", "arguments": {}}'

READINGS = [  # format, output, content, calls
    ("hermes", f"<tool_call>\n{CALL_F}\n</tool_call>", "", [F]),
    ("hermes", f"Let me see.\n\n<tool_call>\n{CALL_F}\n</tool_call>", "Let me see.", [F]),
    (
        "hermes",
        f"<tool_call>\n{CALL_F}\n</tool_call>\n<tool_call>\n{CALL_G}\n</tool_call>",
        "",
        [F, G],
    ),
    ("hermes", f"<tool_call>{CALL_F}{CALL_G}</tool_call>", "", [F, G]),
    ("hermes", f"<tool_call>\n{CALL_F}\n</tool_call>\nDone.", "Done.", [F]),
    ("hermes", f"<tool_call>\n{CALL_F}", "", [F]),
    ("hermes", " no <tool_ call> \n", " no <tool_ call> \n", []),
    ("hermes", "a <tool_call> b", "a <tool_call> b", []),
    ("hermes", "<tool_call>{'name': 1}</tool_call>", "<tool_call>{'name': 1}</tool_call>", []),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', "", [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    ("hermes", CALL_F, CALL_F, []),
    ("llama3_json", LLAMA_F, "", [F]),
    ("llama3_json", f"<|python_tag|>{LLAMA_F}", "", [F]),
    ("llama3_json", f"\n{LLAMA_F}; {LLAMA_G}", "", [F, G]),
    ("llama3_json", f"{LLAMA_F}\n{LLAMA_G}\n", "", [F, G]),
    ("llama3_json", f"{LLAMA_F} That is it.", "That is it.", [F]),
    ("llama3_json", JSON, JSON, []),
    ("llama3_json", '{"a": 1} and', '{"a": 1} and', []),
    ("llama3_json", "{ not json", "{ not json", []),
    ("llama3_json", f"so: {LLAMA_F}", f"so: {LLAMA_F}", []),
    ("mistral", f"[TOOL_CALLS] [{CALL_F}, {CALL_G}]", "", [F, G]),
    ("mistral", f"[TOOL_CALLS][{CALL_F}]", "", [F]),
    ("mistral", f"[{CALL_F}, {CALL_G}]", "", [F, G]),
    ("mistral", f"One moment.\n[TOOL_CALLS] [{CALL_F}]", "One moment.", [F]),
    ("mistral", "[1, 2, 3]", "[1, 2, 3]", []),
    ("mistral", f"[{JSON}]", f"[{JSON}]", []),
    ("mistral", "[]", "[]", []),
    ("mistral", "[TOOL", "[TOOL", []),
    ("none", f"<tool_call>{CALL_F}", f"<tool_call>{CALL_F}", []),
    ("none", " \n", " \n", []),
]


def read(parser, pieces, *, complete=True):
    parts = [part for piece in pieces for part in parser.push(piece)]
    parts += parser.flush(complete=complete)
    content = "".join(part.content for part in parts)
    reasoning = "".join(part.reasoning for part in parts)
    calls: list[list[str]] = []
    for call in (part.call for part in parts if part.call is not None):
        if call.name is not None:
            assert call.index == len(calls)
            calls.append([call.name, ""])
        calls[call.index][1] += call.arguments
    return reasoning, content, [tuple(call) for call in calls]


def parser_of(tool_format, **options):
    return FamilyParser(calls=FORMATS.get(tool_format), names=("f", "g"), **options)


def cuts(text):
    yield [text]
    yield list(text)
    yield from ([text[:place], text[place:]] for place in range(1, len(text)))


@pytest.mark.parametrize(("tool_format", "output", "content", "calls"), READINGS, ids=str)
@pytest.mark.parametrize("thought", [None, "", "hm\n<tool_call> {"])
def test_an_output_is_read_the_same_however_it_is_cut(tool_format, output, content, calls, thought):
    said = output if thought is None else f"<think>\n{thought}\n</think>\n\n{output}"
    for pieces in cuts(said):
        parser = parser_of(tool_format, thinks=thought is not None)
        reasoning, got, made = read(parser, pieces)
        assert (reasoning, got) == (thought or "", content.lstrip("\n") if thought else content)
        assert [(name, json.loads(arguments)) for name, arguments in made] == calls


@pytest.mark.parametrize("opened", [True, False])
def test_what_the_prompt_has_opened_is_reasoning(opened):
    for pieces in cuts("\nhm\n\n</think>\n\nHello"):
        parser = parser_of("hermes", opened=opened)
        assert read(parser, pieces)[:2] == (
            ("hm", "Hello") if opened else ("", "\nhm\n\n</think>\n\nHello")
        )
    assert read(parser_of("none", opened=True), ["cut\n"], complete=False)[0].strip() == "cut"


@pytest.mark.parametrize(
    ("tool_format", "output"),
    [
        ("hermes", f"<tool_call>\n{CALL_F}\n</tool_call>\n<tool_call>\n{CALL_G}\n</tool_call>"),
        ("llama3_json", f"<|python_tag|>{LLAMA_F}; {LLAMA_G}"),
        ("mistral", f"[TOOL_CALLS] [{CALL_F}, {CALL_G}]"),
    ],
)
def test_a_call_that_is_cut_off_leaves_no_markup(tool_format, output):
    marker = FORMATS[tool_format].marker
    for length in range(len(marker), len(output)):
        _, content, calls = read(parser_of(tool_format), [output[:length]], complete=False)
        assert content == ""
        for name, arguments in calls:
            whole = json.dumps(dict([F, G])[name], ensure_ascii=tool_format == "llama3_json")
            assert whole.startswith(arguments) or json.loads(arguments) == dict([F, G])[name]


def test_nothing_is_lost_of_random_texts():
    pieces = ["<tool_call>", "</tool_call>", "{", "}", "[", "]", '"name"', ":", '"f"', "\n", " ",
              "[TOOL_CALLS]", "<|python_tag|>", ";", "a", "\\", '"', CALL_F]  # fmt: skip
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(300):
        tool_format = rng.choice([*FORMATS, "none"])
        text = "".join(rng.choices(pieces, k=rng.randrange(1, 12)))
        whole = read(parser_of(tool_format), [text])
        assert read(parser_of(tool_format), list(text)) == whole, text
        if "a" in text.replace(CALL_F, "") and not whole[2]:
            assert "a" in whole[1], text
        if CALL_F not in text and not whole[2]:
            assert whole[1].replace("\n", "") == text.replace("\n", ""), text


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}<tool_call><function=x>{% endif %}", "none"),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", "mistral"),
        ("{% if tools %}[TOOL_CALLS]f[ARGS]{% endif %}", "none"),
        (
            '<|start_header_id|>{% if tools %}{"name": 1, "parameters": {}}{% endif %}',
            "llama3_json",
        ),
        ("<tool_call>", "none"),
        ("{{ tools }}", "none"),
        ("", "none"),
    ],
)
def test_the_family_is_seen_in_the_template(template, expected):
    assert tool_format_of(template) == expected
