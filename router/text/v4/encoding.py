"""V4Format: conversations as DeepSeek-V4 writes them, which has an encoder instead of a template.

A prompt is one text, and every control token has its own spelling in it:

    BOS [effort] system [tools] { User turn Assistant (<think> | </think>) answer EOS }...

In thinking mode the prompt ends in <think>, else in </think>. Tool results are part of a user's
turn. Reasoning of turns before the last user's is dropped, unless there are tools, with which it
stays: so a tool loop keeps its thread, and its prompts share a prefix.

Where roles come in an order that DeepSeek's own encoder does not foresee, texts are written as it
writes them, and every answer is opened by the Assistant token, the one that is asked for too:
 - a system's text stays where it is, after a question or an answer as well, and alone
 - `developer` is OpenAI's word for the system; one that brings tools is DeepSeek's, and asks
 - an answer may come first, or after another
A reminder between a question and its answer is refused: the encoder would write it into the answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import jiter

from sluice.protocol.messages import InvalidRequest
from sluice.router.text.answers.conversation import ChatOptions, Landmarks, Message, OutputParser
from sluice.router.text.v4 import words as v4
from sluice.router.text.v4.calls import answer_grammar
from sluice.router.text.v4.parser import BEGIN_OF_CALLS, V4Parser

# What stands beside the turns of question and answer.
ASIDE = ("system", "latest_reminder")


class Release(StrEnum):
    """Checkpoints that differ in what the levels of reasoning effort write."""

    ORIGINAL = "original"
    V0731 = "v0731"  # not "0731", which is a number to YAML


EFFORTS: dict[Release, dict[str, str]] = {
    Release.ORIGINAL: {
        **dict.fromkeys(("minimal", "low", "medium", "high"), ""),
        **dict.fromkeys(("xhigh", "max", "ultra"), v4.EFFORT_MAXIMUM),
    },
    Release.V0731: {
        **dict.fromkeys(("minimal", "low"), ""),
        **dict.fromkeys(("medium", "high", "xhigh"), v4.EFFORT_MAXIMUM),
        **dict.fromkeys(("max", "ultra"), v4.EFFORT_BEYOND_MAXIMUM),
    },
}


class V4Format:
    """One release's format. end_think_id: the token that ends reasoning."""

    def __init__(self, release: Release = Release.ORIGINAL, end_think_id: int = 0) -> None:
        self._efforts = EFFORTS[release]
        self._end_think_id = end_think_id

    def render(self, messages: Sequence[Message], options: ChatOptions) -> str:
        _check(messages, options)
        thinking = is_thinking(options)
        turns = _with_extras(_merged(map(_in_v4s_roles, messages)), options)
        keeps_reasoning = any(turn.get("tools") for turn in turns)
        text = v4.BOS
        if thinking and options.effort is not None:
            text += self._efforts[options.effort]
        last_question = max((i for i, turn in enumerate(turns) if _asks(turn)), default=-1)
        task = None  # of the turn before
        for index, turn in enumerate(turns):
            thinks = thinking and (keeps_reasoning or index > last_question)
            if turn["role"] == "assistant" and task is None:
                text += _opening(thinks)
            text += _turn(turn, thinks=thinks and task is None)
            follower = turns[index + 1]["role"] if index + 1 < len(turns) else None
            task = turn.get("task") if follower in (None, "assistant", "latest_reminder") else None
            if task is not None and (follower is not None or options.add_generation_prompt):
                text += _instruction(task, thinking=thinking)
        is_open = task is not None or turns[-1]["role"] == "assistant"
        return text if is_open or not options.add_generation_prompt else text + _opening(thinking)

    def parser(self, messages: Sequence[Message], options: ChatOptions) -> OutputParser:
        return V4Parser(reasoning=_reasons(messages, options), calls=has_tools(messages, options))

    def landmarks(self, messages: Sequence[Message], options: ChatOptions) -> Landmarks:
        return Landmarks(
            end_of_reasoning=self._end_think_id if _reasons(messages, options) else None,
            begin_of_calls=BEGIN_OF_CALLS if has_tools(messages, options) else (),
        )

    def grammar(self, messages: Sequence[Message], options: ChatOptions) -> str:
        reasons = _reasons(messages, options)
        if not options.needs_grammar(reasons=reasons):
            return ""
        return answer_grammar(
            options.callable_tools,
            must=options.must_call is not None,
            parallel=options.parallel_calls,
            end_think_id=self._end_think_id if reasons else None,
            json_schema=options.json_schema,
        )


def _reasons(messages: Sequence[Message], options: ChatOptions) -> bool:
    """Whether the answer begins with reasoning: not if a part of it stands in the prompt."""
    begun = messages[-1]["role"] == "assistant" or "task" in messages[-1]
    return is_thinking(options) and not begun


def is_thinking(options: ChatOptions) -> bool:
    """Thinking is the default, as in DeepSeek's own API, except where JSON is asked for."""
    if options.thinking is not None:
        return options.thinking
    if options.effort is not None:
        return options.effort != "none"
    return options.json_schema is None


def has_tools(messages: Sequence[Message], options: ChatOptions) -> bool:
    return bool(options.tools) or any(message.get("tools") for message in messages)


def _check(messages: Sequence[Message], options: ChatOptions) -> None:
    """Raises InvalidRequest for what contradicts itself or has no place in the format."""
    if options.thinking and options.effort == "none":
        raise InvalidRequest(
            "reasoning_effort: 'none' while thinking is enabled, expected one of the two",
            param="reasoning_effort",
        )
    if options.json_schema is not None and any(message.get("tools") for message in messages):
        raise InvalidRequest(
            "response_format: not supported with tools of a message; send them as `tools` of the "
            "request",
            param="response_format",
        )
    last = messages[-1]
    if options.add_generation_prompt and last["role"] == "assistant" and not last.get("prefix"):
        raise InvalidRequest(
            "messages: the last one is the assistant's, expected a question, or `prefix: true` to "
            "have it continued",
            param="messages",
        )
    _check_reminders([_in_v4s_roles(message) for message in messages])
    for index, message in enumerate(messages[:-1]):
        if message.get("prefix"):
            raise InvalidRequest(
                f"messages.{index}.prefix: only the last message can be continued",
                param=f"messages.{index}.prefix",
            )


def _check_reminders(messages: Sequence[Message]) -> None:
    """Raises InvalidRequest for one that is not on the way from an answer to a question."""
    answered = True
    pending = None  # a reminder whose question has not come yet
    for index, message in enumerate(messages):
        if message["role"] == "latest_reminder":
            pending = index
        elif message["role"] not in ASIDE:
            answered = message["role"] == "assistant"
            pending = pending if answered else None
        if pending is not None and (
            message["role"] == "assistant" or not answered or index == len(messages) - 1
        ):
            raise InvalidRequest(
                f"messages.{pending}: a latest_reminder belongs before the question that it is "
                "about; move it there, or send a system message",
                param=f"messages.{pending}",
            )


def _in_v4s_roles(message: Message) -> Message:
    """`developer` is what OpenAI's clients call the system; with tools it is DeepSeek's own."""
    is_system = message["role"] == "developer" and not message.get("tools")
    return {**message, "role": "system"} if is_system else message


def _asks(turn: Message) -> bool:
    return turn["role"] not in (*ASIDE, "assistant")


def _merged(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Turns: tool results become part of the user's, and neighbouring users' become one.

    A user's turn has `blocks`, the texts and results in it.
    """
    turns: list[dict[str, Any]] = []
    call_order: dict[str, int] = {}
    for message in messages:
        role = message["role"]
        if role == "assistant" and message.get("tool_calls"):
            ids = [call.get("id") for call in message["tool_calls"]]
            call_order = {call_id: place for place, call_id in enumerate(ids) if call_id}
        if role not in ("user", "tool"):
            turns.append(dict(message))
            continue
        is_open = bool(turns) and turns[-1]["role"] == "user" and "task" not in turns[-1]
        if not is_open:
            turns.append({"role": "user", "blocks": []})
        turn = turns[-1]
        if role == "user":
            turn["blocks"].append(message["content"])
            turn |= {"task": message["task"]} if "task" in message else {}
        else:
            result = f"<tool_result>{message['content']}</tool_result>"
            place = call_order.get(message.get("tool_call_id", ""), 0)
            turn["blocks"].append((place, result))
    for turn in turns:
        if "blocks" in turn:
            turn["content"] = "\n\n".join(_in_call_order(turn["blocks"]))
    return turns


def _in_call_order(blocks: Sequence[str | tuple[int, str]]) -> list[str]:
    """Texts stay where they are; results take the results' places in the order of the calls."""
    results = iter(sorted((b for b in blocks if isinstance(b, tuple)), key=lambda b: b[0]))
    return [block if isinstance(block, str) else next(results)[1] for block in blocks]


def _with_extras(turns: list[dict[str, Any]], options: ChatOptions) -> list[dict[str, Any]]:
    """Tools and answer schema belong to the first turn, the system's; there is one for them."""
    extras: dict[str, Any] = {}
    leads = turns[0]["role"] == "system"
    if options.tools:
        extras["tools"] = [*(turns[0].get("tools", ()) if leads else ()), *options.tools]
    if options.show_schema and options.json_schema is not None:
        extras["schema"] = options.json_schema
    if not extras:
        return turns
    if leads:
        return [turns[0] | extras, *turns[1:]]
    return [{"role": "system", "content": "", **extras}, *turns]


def _turn(turn: Message, *, thinks: bool) -> str:
    role, content = turn["role"], turn.get("content", "")
    if role == "assistant":
        return _answer(turn, thinks=thinks)
    if role == "latest_reminder":
        return v4.REMINDER + content
    sections = [content]
    if turn.get("tools"):
        sections.append(v4.TOOLS % "\n".join(_json(tool) for tool in turn["tools"]))
    if "schema" in turn:
        sections.append(v4.RESPONSE_FORMAT % turn["schema"])
    return ("" if role == "system" else v4.USER) + "\n\n".join(sections)


def _answer(turn: Message, *, thinks: bool) -> str:
    text = turn.get("reasoning_content", "") + v4.END_THINK if thinks else ""
    text += turn.get("content", "")
    if calls := turn.get("tool_calls"):
        invokes = "\n".join(_invoke(call["function"]) for call in calls)
        text += f"\n\n{v4.OPEN_CALLS}\n{invokes}\n{v4.CLOSE_CALLS}"
    return text if turn.get("prefix") else text + v4.EOS


def _invoke(function: Mapping[str, str]) -> str:
    lines = [f'<{v4.DSML}invoke name="{function["name"]}">']
    for name, value in _arguments(function["arguments"]).items():
        is_string = isinstance(value, str)
        head = f'<{v4.DSML}parameter name="{name}" string="{"true" if is_string else "false"}">'
        lines.append(head + (value if is_string else _json(value)) + v4.CLOSE_PARAMETER)
    return "\n".join([*lines, v4.CLOSE_INVOKE])


def _arguments(raw: str) -> dict[str, Any]:
    """What is no JSON object is kept as one argument, as models are trained to see it.

    Not with json.loads, which takes NaN and halves of characters, and gives up on deep nesting.
    """
    try:
        arguments = jiter.from_json(raw.encode(), allow_inf_nan=False)
    except ValueError:
        arguments = None
    return arguments if isinstance(arguments, dict) else {"arguments": raw}


def _opening(thinks: bool) -> str:
    """What an answer begins with."""
    return v4.ASSISTANT + (v4.THINK if thinks else v4.END_THINK)


def _instruction(task: str, *, thinking: bool) -> str:
    """What asks for a quick instruction's output; only an action is an answer that is opened."""
    opening = _opening(thinking) if task == "action" else ""
    return opening + v4.TASKS[task]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
