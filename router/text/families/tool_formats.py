"""Tool calls as the families of models with a template of their own write them.

    hermes       text <tool_call>{"name": ..., "arguments": {...}}</tool_call> ...    (Qwen, Hermes)
    llama3_json  [<|python_tag|>] {"name": ..., "parameters": {...}} [; {...}]
    mistral      [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]

Llama 3 calls without its marker, too, and so do others whose marker was lost: there a call is also
what begins the answer and looks like one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jiter

from sluice.router.text.answers.conversation import Message


@dataclass(frozen=True)
class ToolFormat:
    """How a model's calls are read.

    marker: before the calls. end: after one. between: characters around them, of no meaning. bare:
    the characters with which calls begin an answer without a marker; none if they cannot.

    And how they are written where they are enforced: [marker opening] call { separator call }
    closing, with the arguments under this key. is_marked: with the marker. separator: None if there
    is one call at a time.
    """

    marker: str
    end: str = ""
    between: str = " \t\r\n"
    bare: str = ""
    is_marked: bool = True
    opening: str = ""
    separator: str | None = None
    closing: str = ""
    key: str = "arguments"


THINK, END_THINK = "<think>", "</think>"
FORMATS = {
    "hermes": ToolFormat(
        "<tool_call>",
        end="</tool_call>",
        opening="\n",
        separator="\n</tool_call>\n<tool_call>\n",
        closing="\n</tool_call>",
    ),
    "llama3_json": ToolFormat(
        "<|python_tag|>", between=" \t\r\n;", bare="{", is_marked=False, key="parameters"
    ),
    "mistral": ToolFormat(
        "[TOOL_CALLS]",
        between=" \t\r\n[],",
        bare="[",
        opening=" [",
        separator=", ",
        closing="]",
    ),
}
MARKERS = (THINK, END_THINK, *(marker for f in FORMATS.values() for marker in (f.marker, f.end)))
ARGUMENTS = ("arguments", "parameters")
MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")
NAME = re.compile(r'\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*')


def tool_format_of(template: str) -> str:
    """The family whose calls the template writes; "none" if it is not one of ours."""
    if "tools" not in template:
        return "none"
    if "<tool_call>" in template and "<function=" not in template:
        return "hermes"
    if "[TOOL_CALLS]" in template and "[ARGS]" not in template:
        return "mistral"
    if "<|start_header_id|>" in template and '"parameters"' in template:
        return "llama3_json"
    return "none"


def calls_as_templates_read(message: Message, tool_format: str) -> dict[str, Any]:
    """Arguments as JSON, which templates write themselves; ids as the family's templates demand."""
    ours = dict(message)
    for call in (calls := [dict(call) for call in message.get("tool_calls", ())]):
        arguments = _object(call["function"]["arguments"])
        if arguments is not None:
            call["function"] = call["function"] | {"arguments": arguments}
        if tool_format == "mistral":
            call["id"] = _mistral_id(call.get("id", ""))
    if calls:
        ours["tool_calls"] = calls
    if tool_format == "mistral" and "tool_call_id" in ours:
        ours["tool_call_id"] = _mistral_id(ours["tool_call_id"])
    return ours


def read_call(text: str) -> tuple[str, str] | None:
    """The name and the arguments, as JSON, of a whole call; None if it is none."""
    call = _object(text)
    if call is None or not isinstance(name := call.get("name"), str) or not name:
        return None
    arguments: Any = next((call[key] for key in ARGUMENTS if key in call), {})
    if isinstance(arguments, str):
        arguments = _object(arguments)
    if not isinstance(arguments, Mapping):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)


def read_begun_call(text: str) -> tuple[str, str] | None:
    """The same of a call that has only begun: its arguments are the beginning of JSON, or none."""
    head = NAME.match(text)
    call = None if head is None else _object(head[0] + "0}")
    if head is None or call is None or text[head.end() :][:1] not in ("", "{"):
        return None
    return str(call["name"]), text[head.end() :]


def _object(text: str) -> dict[str, Any] | None:
    """Not with json.loads, which takes NaN, and gives up on deep nesting."""
    try:
        value = jiter.from_json(text.encode(), allow_inf_nan=False)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _mistral_id(call_id: str) -> str:
    if MISTRAL_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]
