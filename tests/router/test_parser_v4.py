"""DeepSeek-V4's output as reasoning, content and calls, however it is cut and whatever it lacks."""

from __future__ import annotations

import json
import random

import pytest

from sluice.router.text.v4.parser import V4Parser

OPEN, CLOSE = "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"
INVOKE, END_INVOKE = '<｜DSML｜invoke name="{}">\n', "</｜DSML｜invoke>\n"


def parameter(name: str, value: str, string: str | None) -> str:
    kind = f' string="{string}"' if string else ""
    return f'<｜DSML｜parameter name="{name}"{kind}>{value}</｜DSML｜parameter>\n'


def call(name: str, *parameters: str) -> str:
    return INVOKE.format(name) + "".join(parameters) + END_INVOKE


def block(*calls: str) -> str:
    return f"\n\n{OPEN}\n{''.join(calls)}{CLOSE}"


def parsed(pieces, *, reasoning=True, calls=True, complete=True):
    """(reasoning, content, [(name, arguments)]) of an output that comes in pieces."""
    parser = V4Parser(reasoning=reasoning, calls=calls)
    parts = [part for piece in pieces for part in parser.push(piece)]
    parts += parser.flush(complete=complete)
    found: dict[int, list[str]] = {}
    for part in (part.call for part in parts if part.call is not None):
        name, arguments = found.setdefault(part.index, [part.name, ""])
        found[part.index] = [name, arguments + part.arguments]
    said = "".join(part.content for part in parts)
    return "".join(part.reasoning for part in parts), said, [tuple(c) for c in found.values()]


WEATHER = call(
    "weather", parameter("city", 'Rio "de"\nJaneiro', "true"), parameter("n", "3", "false")
)
WEATHER_ARGUMENTS = {"city": 'Rio "de"\nJaneiro', "n": 3}
OUTPUTS = [
    ("let me see</think>hello", ("let me see", "hello", [])),
    ("<think>let me see</think>hello", ("let me see", "hello", [])),
    ("a < b, a <｜ b\n\n</think>x\n\n\n", ("a < b, a <｜ b\n\n", "x\n\n\n", [])),
    ("never ends", ("never ends", "", [])),
    ("<thi", ("<thi", "", [])),
    ("", ("", "", [])),
    ("r</think>look:" + block(WEATHER), ("r", "look:", [("weather", WEATHER_ARGUMENTS)])),
    ("r" + block(WEATHER), ("r", "", [("weather", WEATHER_ARGUMENTS)])),  # </think> left out
    (
        "r</think>" + block(call("a"), call("b", parameter("x", "[1, {}]", "false"))) + "\nbye",
        ("r", "\nbye", [("a", {}), ("b", {"x": [1, {}]})]),
    ),
    (
        "</think>" + block(call("f", parameter("x", "{oops", "false"), parameter("y", "1", None))),
        ("", "", [("f", {"x": "{oops", "y": 1})]),
    ),
    (
        "</think>" + block(call("f", parameter("x", ' {"a": [1,\n {} ]} \n', "false"))),
        ("", "", [("f", {"x": {"a": [1, {}]}})]),
    ),
    (
        "</think>" + block(call("f", parameter("x", "[NaN]", "false"))),
        ("", "", [("f", {"x": "[NaN]"})]),
    ),
    (
        "</think>" + block(call("f", parameter("x", "NaN", "false"))),
        ("", "", [("f", {"x": "NaN"})]),
    ),
    (
        f"</think>{OPEN}{INVOKE.format('f')}{parameter('x', '1', 'false')}{CLOSE}",
        ("", "", [("f", {"x": 1})]),  # </invoke> left out
    ),
    (
        f'</think>{OPEN}{INVOKE.format("f")}<｜DSML｜parameter name="x" string="true">ab',
        ("", "", [("f", {"x": "ab"})]),  # all ends left out
    ),
    (
        f"</think>{OPEN}what is this {call('f')}and this{CLOSE}",
        ("", "what is this and this", [("f", {})]),
    ),
    (f"</think>{OPEN}\n<｜DSML｜invoke nam", ("", "", [])),
    (f"</think>{OPEN}\nwhat? <｜DSML", ("", "what?", [])),
    ("</think>a\n\n<｜DSML｜tool_c", ("", "a", [])),
    (f"</think>a {CLOSE} b <｜DSML｜invoke", ("", f"a {CLOSE} b <｜DSML｜invoke", [])),
]


def cuts(text: str, rng: random.Random) -> list[str]:
    points = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randrange(8))))
    return [text[a:b] for a, b in zip([0, *points], [*points, len(text)], strict=True)]


@pytest.mark.parametrize(("output", "expected"), OUTPUTS, ids=lambda value: str(value)[:40])
def test_any_cut_gives_the_same_parts(output, expected):
    seed = random.randrange(2**32)
    print(f"seed={seed}")
    rng = random.Random(seed)
    for pieces in ([output], list(output), *(cuts(output, rng) for _ in range(40))):
        reasoning, content, calls = parsed(pieces)
        found = [(name, json.loads(arguments)) for name, arguments in calls]
        assert (reasoning, content, found) == expected, pieces


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("[1, 2", [1, 2]),
        ('{"a": [1, "b', {"a": [1, "b"]}),
        ('{"a": "b\\', {"a": "b\\"}),
        ("[1,", [1, None]),
        ('{"a":', {"a": None}),
        ("[[1], [", [[1], []]),
        ('["]"', ["]"]),
    ],
)
@pytest.mark.parametrize("end", ["</｜DSML｜parameter>\n" + END_INVOKE + CLOSE, ""])
def test_ends_that_an_array_or_object_lacks_are_supplied(written, meant, end):
    begin = f'{OPEN}\n{INVOKE.format("f")}<｜DSML｜parameter name="x" string="false">'
    for pieces in ([begin + written + end], list(begin + written + end)):
        [(name, arguments)] = parsed(pieces, reasoning=False)[2]
        assert (name, json.loads(arguments)) == ("f", {"x": meant})


def test_reasoning_is_none_of_the_content_where_none_was_asked_for():
    for output in ("<think>hm</think>Hello", "<think>hm"):
        for pieces in ([output], list(output)):
            reasoning, content, _ = parsed(pieces, reasoning=False)
            assert (reasoning, content) == ("hm", "Hello" if "Hello" in output else "")
    assert parsed(["<thing> <think>"], reasoning=False)[:2] == ("", "<thing> <think>")
    for output in ("</think>Hello", "</think></think>Hello", "</think><think></think>Hello"):
        for pieces in ([output], list(output)):
            assert parsed(pieces, reasoning=False)[:2] == ("", "Hello")
            assert parsed(["hm", *pieces])[:2] == ("hm", "Hello")
    assert parsed(["a </think> b"], reasoning=False)[1] == "a </think> b"  # said, for all we know
    assert parsed(["<thi"], reasoning=False, complete=False)[:2] == ("", "")


def test_without_tools_calls_are_text_and_without_thinking_ends_are_too():
    output = "r</think>" + block(WEATHER)
    assert parsed([output], calls=False) == ("r", block(WEATHER), [])
    assert parsed([output], reasoning=False, calls=False) == ("", output, [])


@pytest.mark.parametrize("content", ["", "One moment."])
@pytest.mark.parametrize("thought", ["", "hm </think>"])
def test_wherever_a_call_is_cut_off_there_is_no_markup_and_the_beginning_of_json(content, thought):
    output = thought + content + block(WEATHER, WEATHER)
    whole = json.dumps(WEATHER_ARGUMENTS, ensure_ascii=False)
    for end in range(len(output)):
        pieces = output[:end], list(output[:end])
        both = [parsed(p, reasoning=bool(thought), complete=False) for p in pieces]
        reasoning, said, calls = both[0]
        assert both[0] == both[1]
        assert (f"{content}\n\n" if content else "").startswith(said)
        assert "hm ".startswith(reasoning)
        assert all(name == "weather" and a and whole.startswith(a) for name, a in calls)


@pytest.mark.parametrize("value", ['{"a": [1, "two", {"b": null}]}', "[[1, 2], [3]]"])
def test_arrays_and_objects_are_passed_on_while_they_come(value):
    parser = V4Parser(reasoning=False, calls=True)
    parser.push(f'{OPEN}\n{INVOKE.format("f")}<｜DSML｜parameter name="x" string="false">')
    shown = ""
    for index, character in enumerate(value):
        shown += "".join(part.call.arguments for part in parser.push(character))
        assert shown == value[: index + 1].rstrip() or index < 2
    assert shown == value


def test_long_strings_are_passed_on_while_they_come():
    parser = V4Parser(reasoning=False, calls=True)
    parser.push(f'{OPEN}\n{INVOKE.format("f")}<｜DSML｜parameter name="x" string="true">')
    for _ in range(5):
        [part] = parser.push("a line\n")
        assert part.call.arguments == "a line\\n"
