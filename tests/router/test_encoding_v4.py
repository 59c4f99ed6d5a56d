"""DeepSeek-V4's prompts, letter by letter, for each kind of conversation the format knows."""

from __future__ import annotations

import json
import random

import pytest

from sluice.protocol.messages import InvalidRequest
from sluice.router.text.answers.conversation import ChatOptions
from sluice.router.text.v4.encoding import Release, V4Format
from sluice.router.text.v4.words import EFFORT_BEYOND_MAXIMUM, EFFORT_MAXIMUM

BOS, EOS, USER, BOT = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
)
TOOL = {"name": "clock", "description": "Time “now”", "parameters": {"type": "object"}}
TOOLS_TEXT = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by \
writing a "<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types \
(numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside \
<think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{"name": "clock", "description": "Time “now”", "parameters": {"type": "object"}}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
CALLS_TEXT = """

<｜DSML｜tool_calls>
<｜DSML｜invoke name="clock">
<｜DSML｜parameter name="zone" string="true">Europe/Zürich</｜DSML｜parameter>
<｜DSML｜parameter name="digits" string="false">[12, null]</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="clock">
<｜DSML｜parameter name="arguments" string="true">no json</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜tool_calls>"""


def say(role, content, **fields):
    return {"role": role, "content": content, **fields}


def call(call_id, arguments):
    function = {"name": "clock", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


CALLS = [call("a", json.dumps({"zone": "Europe/Zürich", "digits": [12, None]}))]
CALLS.append(call("b", "no json"))


def render(*messages, release=Release.ORIGINAL, **options):
    return V4Format(release).render(messages, ChatOptions(**options))


@pytest.mark.parametrize(("thinking", "end"), [(True, "<think>"), (False, "</think>")])
def test_a_prompt_ends_in_its_mode(thinking, end):
    prompt = render(say("system", "SYS"), say("user", "hi"), thinking=thinking)
    assert prompt == f"{BOS}SYS{USER}hi{BOT}{end}"


def test_thinking_is_the_default_and_none_switches_it_off():
    assert render(say("user", "hi")).endswith("<think>")
    assert render(say("user", "hi"), effort="none").endswith("</think>")


def test_a_tool_loop_keeps_its_reasoning_and_orders_results_by_call():
    prompt = render(
        say("user", "what time?"),
        say("assistant", "", reasoning_content="look it up", tool_calls=CALLS),
        say("tool", "two", tool_call_id="b"),
        say("tool", "one", tool_call_id="a"),
        say("user", "quick!"),
        say("assistant", "Noon.", reasoning_content="done"),
        say("user", "thanks"),
        tools=(TOOL,),
    )
    assert prompt == (
        f"{BOS}\n\n{TOOLS_TEXT}{USER}what time?{BOT}<think>look it up</think>{CALLS_TEXT}{EOS}"
        f"{USER}<tool_result>one</tool_result>\n\n<tool_result>two</tool_result>\n\nquick!"
        f"{BOT}<think>done</think>Noon.{EOS}{USER}thanks{BOT}<think>"
    )


def test_without_tools_old_reasoning_is_dropped():
    prompt = render(
        say("system", "SYS"),
        say("user", "a"),
        say("assistant", "b", reasoning_content="old"),
        say("user", "d"),
        say("assistant", "e", reasoning_content="new", prefix=True),
    )
    assert prompt == f"{BOS}SYS{USER}a{BOT}</think>b{EOS}{USER}d{BOT}<think>new</think>e"


@pytest.mark.parametrize("thinking", [True, False])
def test_developer_is_the_system_as_openais_clients_mean_it(thinking):
    for others in ([say("user", "u")], [], [say("user", "u"), say("assistant", "a")]):
        for place in range(len(others) + 1):
            as_developer, as_system = (
                [*others[:place], say(role, "S"), *others[place:], say("user", "more")]
                for role in ("developer", "system")
            )
            expected = render(*as_system, thinking=thinking)
            assert render(*as_developer, thinking=thinking) == expected and "S" in expected


@pytest.mark.parametrize(("thinking", "end"), [(True, "<think>"), (False, "</think>")])
@pytest.mark.parametrize(
    ("roles", "text"),
    [
        ("s", "0"),
        ("us", f"{USER}01"),
        ("suas", f"0{USER}1{BOT}%2{EOS}3"),
        ("usau", f"{USER}01{BOT}</think>2{EOS}{USER}3"),
        ("au", f"{BOT}</think>0{EOS}{USER}1"),
        ("uaau", f"{USER}0{BOT}</think>1{EOS}{BOT}</think>2{EOS}{USER}3"),
        ("t", f"{USER}<tool_result>0</tool_result>"),
        ("usu", f"{USER}01{USER}2"),
    ],
)
def test_every_answer_is_opened_whatever_comes_before_it(roles, text, thinking, end):
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    messages = [say(names[role], str(index)) for index, role in enumerate(roles)]
    expected = text.replace("%", "<think></think>" if thinking else "</think>")
    assert render(*messages, thinking=thinking) == f"{BOS}{expected}{BOT}{end}"


@pytest.mark.parametrize("roles", ["ur", "r", "sr", "urau", "uru", "uar", "ursa", "sura"])
def test_a_reminder_that_would_be_written_into_an_answer_is_refused(roles):
    names = {"s": "system", "u": "user", "a": "assistant", "r": "latest_reminder"}
    messages = [say(names[role], str(index)) for index, role in enumerate(roles)]
    if roles.endswith("a"):
        messages[-1]["prefix"] = True
    with pytest.raises(InvalidRequest, match="latest_reminder belongs before the question") as no:
        render(*messages)
    assert no.value.param == f"messages.{roles.index('r')}"


def test_tools_stand_at_the_beginning_and_none_are_lost():
    text = f"{BOS}\n\n{TOOLS_TEXT}"
    assert render(say("user", "a"), say("system", "S"), tools=(TOOL,)).startswith(text + USER)
    both = render(say("system", "S", tools=[{"name": "map"}]), say("user", "u"), tools=(TOOL,))
    assert '{"name": "map"}\n{"name": "clock"' in both


ROLES = ["system", "developer", "user", "assistant", "tool", "latest_reminder"]


def stated(messages, *, thinking, tools):
    """The rules once more, from the answers' side: what each message adds, given its neighbours."""
    roles = ["system" if m["role"] == "developer" else m["role"] for m in messages]
    asked = [index for index, role in enumerate(roles) if role in ("user", "tool")]
    head = f"\n\n{TOOLS_TEXT}" if tools else ""
    text, leading = BOS, roles[0] == "system"
    text += "" if leading else head
    for index, (role, message) in enumerate(zip(roles, messages, strict=True)):
        thinks = thinking and (tools or not asked or index > asked[-1])
        content = message["content"]
        if role == "tool":
            content = f"<tool_result>{content}</tool_result>"
        if role in ("user", "tool"):
            joined = index > 0 and roles[index - 1] in ("user", "tool")
            text += ("\n\n" if joined else USER) + content
        elif role == "assistant":
            thought = f"<think>{message['reasoning_content']}" if thinks else ""
            text += f"{BOT}{thought}</think>{content}" + ("" if message.get("prefix") else EOS)
        else:
            text += ("<｜latest_reminder｜>" if role == "latest_reminder" else "") + content
        text += head if leading and index == 0 else ""
    if roles[-1] != "assistant":
        text += BOT + ("<think>" if thinking else "</think>")
    return text


def test_any_order_of_roles_is_as_the_rules_say_or_refused_with_a_reason():
    seed = random.randrange(2**32)
    print(f"seed={seed}")
    rng, refused = random.Random(seed), 0
    for _ in range(3000):
        messages = []
        for index in range(rng.randrange(1, 8)):
            message = say(rng.choice(ROLES), f"text {index}.")
            if message["role"] == "assistant":
                message["reasoning_content"] = f"thought {index}."
            messages.append(message)
        if messages[-1]["role"] == "assistant":
            messages[-1]["prefix"] = True
        thinking, tools = rng.random() < 0.5, rng.random() < 0.5
        try:
            prompt = render(*messages, thinking=thinking, tools=(TOOL,) if tools else ())
        except InvalidRequest as error:
            assert "latest_reminder" in str(error) and error.param.startswith("messages.")
            refused += 1
            continue
        assert prompt == stated(messages, thinking=thinking, tools=tools), messages
    assert 0 < refused < 2000


def test_reminders_and_developers_with_tools_have_their_places():
    prompt = render(
        say("system", "SYS"),
        say("latest_reminder", "2026-01-01"),
        say("developer", "cite", tools=[TOOL]),
        say("assistant", "x", reasoning_content="r"),
        say("user", "y"),
        thinking=True,
    )
    assert prompt == (
        f"{BOS}SYS<｜latest_reminder｜>2026-01-01{USER}cite\n\n{TOOLS_TEXT}"
        f"{BOT}<think>r</think>x{EOS}{USER}y{BOT}<think>"
    )


@pytest.mark.parametrize(
    ("task", "thinking", "end"),
    [
        ("action", False, f"{BOT}</think><｜action｜>"),
        ("action", True, f"{BOT}<think><｜action｜>"),
        ("query", True, "<｜query｜>"),
    ],
)
def test_a_quick_instruction_ends_the_prompt(task, thinking, end):
    prompt = render(say("user", "springs?", task=task), thinking=thinking)
    assert prompt == f"{BOS}{USER}springs?{end}"


def test_a_title_is_asked_for_after_the_answer():
    prompt = render(say("user", "a"), say("assistant", "b", task="title", prefix=True))
    assert prompt.endswith("b<｜title｜>")


@pytest.mark.parametrize(
    ("release", "effort", "text"),
    [
        (Release.ORIGINAL, "low", ""),
        (Release.ORIGINAL, "high", ""),
        (Release.ORIGINAL, "xhigh", EFFORT_MAXIMUM),
        (Release.ORIGINAL, "max", EFFORT_MAXIMUM),
        (Release.V0731, "minimal", ""),
        (Release.V0731, "medium", EFFORT_MAXIMUM),
        (Release.V0731, "xhigh", EFFORT_MAXIMUM),
        (Release.V0731, "max", EFFORT_BEYOND_MAXIMUM),
    ],
)
def test_effort_opens_a_thinking_prompt_and_no_other(release, effort, text):
    messages = (say("system", "S"), say("user", "u"))
    assert render(*messages, release=release, effort=effort).startswith(f"{BOS}{text}S{USER}")
    assert "Effort" not in render(*messages, release=release, effort=effort, thinking=False)


def test_neighbouring_users_are_one_turn():
    prompt = render(say("user", "a"), say("user", "b"), thinking=False)
    assert prompt == f"{BOS}{USER}a\n\nb{BOT}</think>"


def test_an_answer_schema_follows_the_system_text_and_thinking_is_on_where_it_is_asked_for():
    schema = '{"type": "object"}'
    for asked in ({"thinking": True}, {"effort": "high"}, {"thinking": True, "effort": "max"}):
        assert render(say("user", "u"), json_schema=schema, **asked).endswith(f"{BOT}<think>")
    for asked in ({}, {"thinking": False}, {"effort": "none"}):
        assert render(say("user", "u"), json_schema=schema, **asked).endswith(f"{BOT}</think>")
    both = render(say("user", "u"), json_schema=schema, show_schema=True, tools=(TOOL,))
    assert both.startswith(f"{BOS}\n\n{TOOLS_TEXT}\n\n## Response Format:")
    prompt = render(say("user", "u"), json_schema=schema, show_schema=True)
    assert prompt == (
        f"{BOS}\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to "
        f"reply:\n{schema}{USER}u{BOT}</think>"
    )


def test_with_tools_a_prompt_and_its_answer_begin_the_next_prompt():
    messages = [say("user", "a")]
    for answer in ("x", "y"):
        prompt = render(*messages, tools=(TOOL,))
        messages += [say("assistant", answer, reasoning_content="r"), say("user", "more")]
        assert render(*messages, tools=(TOOL,)).startswith(f"{prompt}r</think>{answer}{EOS}")


@pytest.mark.parametrize(
    ("messages", "options", "param"),
    [
        ([say("user", "u"), say("assistant", "a")], {}, "messages"),
        ([say("assistant", "a", prefix=True), say("user", "u")], {}, "messages.0.prefix"),
        ([say("user", "u")], dict(thinking=True, effort="none"), "reasoning_effort"),
        (
            [say("system", "", tools=[TOOL]), say("user", "u")],
            dict(json_schema="{}"),
            "response_format",
        ),
    ],
)
def test_contradictions_are_refused_by_name(messages, options, param):
    with pytest.raises(InvalidRequest) as refused:
        render(*messages, **options)
    assert refused.value.param == param
