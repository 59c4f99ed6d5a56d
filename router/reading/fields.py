"""Fields whose JSON has more than one shape, checked and brought into one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

from sluice.protocol.limits import MAX_BIAS, MAX_BIASES

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_TEMPLATE_ARGUMENTS = 64

# Parts of a message that are text, by the field that holds it.
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def _text_of_parts(value: Any) -> Any:
    """Message content: a string, or a list of text parts, which become its lines."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("expected a string or a list of text parts")
    return "\n".join(_text_of_part(part) for part in value)


def _text_of_part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    field = TEXT_PARTS.get(kind) if isinstance(part, dict) and isinstance(kind, str) else None
    if field is None:
        raise ValueError(f"a part of type {kind!r:.60} is not supported, expected type 'text'")
    if not isinstance(part.get(field), str):
        raise ValueError(f"a part of type {kind!r} needs a string `{field}`")
    return str(part[field])


def _arguments(value: Any) -> Any:
    """Of a call in the history: JSON as text, which some servers write as the object itself."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value


def _template_arguments(value: Any) -> Any:
    """Variables of a chat template, plain ones only: their size bounds what a template does."""
    if not isinstance(value, dict):
        raise ValueError("expected an object of names and values")
    if len(value) > MAX_TEMPLATE_ARGUMENTS:
        raise ValueError(f"{len(value)} values, expected at most {MAX_TEMPLATE_ARGUMENTS}")
    for name, each in value.items():
        if name.startswith("_") or name in RESERVED:
            raise ValueError(f"{name}: not for clients to set, leave it out")
        if not isinstance(each, str | int | float | bool | None):
            raise ValueError(f"{name}: expected a string, a number, true, false or null")
    return value


RESERVED = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("bos_token", "eos_token", "chat_template", "tokenize", "raise_exception"),
        *("strftime_now", "range", "dict", "lipsum", "cycler", "joiner", "namespace"),
        *("self", "loop", "caller", "varargs", "kwargs"),
    }
)


def _prompts(value: Any) -> Any:
    """One prompt or a list of them, each a string or token ids: always a list of prompts."""
    if isinstance(value, str) or _is_token_ids(value):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(prompt, str) for prompt in value):
            return value
        if all(_is_token_ids(prompt) for prompt in value):
            return value
    raise ValueError("expected a string, a list of token ids, or a list of either")


def _is_token_ids(value: Any) -> bool:
    """Whether it is one prompt of token ids, which an empty list is not."""
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _stop(value: Any) -> Any:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
        raise ValueError("expected a string or a list of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise ValueError(f"{len(strings)} stop strings, expected at most {MAX_STOP_STRINGS}")
    if any(not 0 < len(text) <= MAX_STOP_CHARACTERS for text in strings):
        raise ValueError(f"each stop string must have 1 to {MAX_STOP_CHARACTERS} characters")
    return strings


def _logit_bias(value: Any) -> Any:
    """JSON has string keys only: {"15": -100}."""
    if not isinstance(value, dict):
        raise ValueError("expected an object of token ids and biases")
    if len(value) > MAX_BIASES:
        raise ValueError(f"{len(value)} biases, expected at most {MAX_BIASES}")
    biases = {}
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 10):
            raise ValueError(f"{key!r} is no token id, expected a whole number")
        if type(bias) not in (int, float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise ValueError(f"{key}: {bias!r}, expected a number from -{MAX_BIAS:g} to 100")
        biases[int(key)] = float(bias)
    return biases


def _function(value: Any) -> Any:
    """A tool's function, kept as it is: the model reads it as the client wrote it."""
    if not isinstance(value, dict):
        raise ValueError("expected an object with a name and parameters")
    if not isinstance(value.get("name"), str) or not value["name"]:
        raise ValueError("name: expected a string that is not empty")
    if not isinstance(value.get("parameters", {}), dict | None):
        raise ValueError("parameters: expected a JSON schema")
    _check_shape(value.get("parameters") or {}, "parameters")
    return value


def _check_shape(schema: dict[str, Any], place: str) -> None:
    """Raises ValueError where the parts of a JSON schema that we read are no such parts.

    A part that is null counts as left out, as serializers write it.
    """
    for name, (fits, expectation) in SHAPES.items():
        part = schema.get(name)
        if part is not None and not fits(part):
            raise ValueError(f"{place}.{name}: expected {expectation}")
    for name, part in (schema.get("properties") or {}).items():
        if not isinstance(part, dict | bool):
            raise ValueError(f"{place}.properties.{name}: expected a JSON schema")
        if isinstance(part, dict):
            _check_shape(part, f"{place}.properties.{name}")


def _is_name_or_names(value: Any) -> bool:
    return isinstance(value, str) or _is_names(value)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_is_name_or_names, "the name of a type or a list of them"),
    "properties": (_is_object, "an object of JSON schemas"),
    "required": (_is_names, "a list of names"),
    "enum": (_is_list, "a list of values"),
    "$defs": (_is_object, "an object of JSON schemas"),
    "definitions": (_is_object, "an object of JSON schemas"),
}


@dataclass(frozen=True)
class ToolChoice:
    """name: of the one function that has to be called, with mode "required"."""

    mode: str = "auto"
    name: str | None = None


def _tool_choice(value: Any) -> ToolChoice:
    if isinstance(value, ToolChoice):
        return value
    if value in ("none", "auto", "required"):
        return ToolChoice(value)
    match value:
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice("required", name)
    raise ValueError(
        "expected 'none', 'auto', 'required' or "
        '{"type": "function", "function": {"name": ...}}'
    )


_STRING_OR_STRINGS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_TOKEN_IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}

Text = Annotated[
    str,
    BeforeValidator(_text_of_parts),
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART, "minItems": 1}]}
    ),
]
Arguments = Annotated[
    str,
    BeforeValidator(_arguments),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]}),
]
TemplateArguments = Annotated[
    dict[str, Any],
    BeforeValidator(_template_arguments),
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": {"type": ["string", "number", "boolean", "null"]},
        }
    ),
]
Prompts = Annotated[
    list[str | list[int]],
    BeforeValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                _TOKEN_IDS,
                {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
            ]
        }
    ),
]
Stop = Annotated[list[str], BeforeValidator(_stop), WithJsonSchema(_STRING_OR_STRINGS)]
LogitBias = Annotated[
    dict[int, float],
    BeforeValidator(_logit_bias),
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
        }
    ),
]
Function = Annotated[
    dict[str, Any],
    BeforeValidator(_function),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 1},
                "description": {"type": "string"},
                "parameters": {"type": "object"},
            },
            "required": ["name"],
        }
    ),
]
ToolChoiceField = Annotated[
    ToolChoice,
    BeforeValidator(_tool_choice),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["none", "auto", "required"]},
                {
                    "type": "object",
                    "properties": {
                        "type": {"const": "function"},
                        "function": {
                            "type": "object",
                            "properties": {"name": {"type": "string"}},
                            "required": ["name"],
                        },
                    },
                    "required": ["type", "function"],
                },
            ]
        }
    ),
]
