"""Grammars of DeepSeek-V4's answers: which outputs call which functions with which arguments.

    reasoning </think> <tool_calls> { <invoke> { <parameter> value </parameter> } </invoke> } ...
    reasoning </think> JSON

Written for llguidance. Arguments come in the order of their schema, required ones always; strings
are any text up to the parameter's end (or one of an enum), everything else is JSON of its schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llguidance import LLMatcher

from sluice.engine.limits import WHITE_SPACE, check_size
from sluice.router import v4_text as v4

Schema = Mapping[str, Any]

NEW_LINE = "\n"
AS_TEXT, AS_JSON = '" string="true">', '" string="false">'

NO_STRINGS = frozenset({"number", "integer", "boolean", "array", "object", "null"})
# JSON as the model was shown it. Left to itself, a weak model writes white space for ever.
SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
FREE_LAYOUT = {"whitespace_pattern": WHITE_SPACE}  # as where an answer is nothing but JSON


def answer_grammar(
    tools: Sequence[Schema],
    *,
    must: bool,
    parallel: bool,
    end_think_id: int | None,
    json_schema: str | None = None,
) -> str:
    """A grammar for outputs that call these functions, or are JSON of that schema.

    must: there is nothing but a call, else text may come before it, or without one; with a schema
    there is no text, but either calls or JSON. parallel: there may be several calls. end_think_id:
    the output begins with reasoning, which this token ends.
    Raises InvalidRequest for schemas that are too long. Whether llguidance can follow the grammar
    is for router/grammars.py to find out.
    """
    thought = "" if end_think_id is None else f"THOUGHT? <[{end_think_id}]> "
    is_json = json_schema is not None and not must
    opened = _text("\n\n", v4.OPEN_CALLS) if must or is_json else "before"
    answers = [*(["calls"] if tools else []), *(["json"] if is_json else [])]
    rules = [
        f"start: {thought}({' | '.join(answers if must or is_json else [*answers, 'TEXT?'])})",
        _without("THOUGHT", v4.END_THINK),
        _without("TEXT", v4.OPEN_CALLS),
        f"before[lazy]: /(.|\\n)*{_regex(v4.OPEN_CALLS)}/",
    ]
    if is_json:
        rules.append(f"json: %json {_json(json.loads(json_schema or ''), FREE_LAYOUT)}")
    if tools:
        more = "+" if parallel else ""
        rules.append(f"calls: {opened} call{more} {_text(NEW_LINE, v4.CLOSE_CALLS)}")
        rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    text = "\n".join((*rules, *_any_parameter()))
    for rule in (r for index, tool in enumerate(tools) for r in _function(f"call_{index}", tool)):
        text += "\n" + rule
        check_size(text, "tools")  # as it grows: each parameter brings all definitions along
    return str(LLMatcher.grammar_from_lark(text))


def _any_parameter() -> Iterator[str]:
    """Rules for values, and for the arguments of a function that does not say which it has."""
    head, end = _text(f'<{v4.DSML}parameter name="'), _text(v4.CLOSE_PARAMETER)
    yield f"value[lazy]: /(.|\\n)*{_regex(v4.CLOSE_PARAMETER)}/"
    yield r'NAME: /[^"<>\n]+/'
    yield f"any: %json {_json({})}"
    yield f"any_parameter: {head} NAME ({_text(AS_TEXT)} value | {_text(AS_JSON)} any {end})"


def _function(rule: str, function: Schema) -> Iterator[str]:
    """Rules for one call of the function, from the line break before it."""
    schema = function.get("parameters") or {}
    properties = schema.get("properties") or {}
    required = schema.get("required") or ()
    parts = [_text(NEW_LINE, f'<{v4.DSML}invoke name="{function["name"]}">', NEW_LINE)]
    for index, (name, value) in enumerate(properties.items()):
        parameter, optional = f"{rule}_{index}", "" if name in required else "?"
        parts.append(f"({parameter} {_text(NEW_LINE)}){optional}")
        yield f"{parameter}: {_parameter(name, _with_definitions(value, schema))}"
    if not properties:
        parts.append(f"(any_parameter {_text(NEW_LINE)})*")
    yield f"{rule}: {' '.join(parts)} {_text(v4.CLOSE_INVOKE)}"


def _parameter(name: str, schema: Schema) -> str:
    """The alternatives of one parameter, from its tag to its end."""
    head = f'<{v4.DSML}parameter name="{name}'
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if choices and all(isinstance(choice, str) for choice in choices):
        return " | ".join(_text(head, AS_TEXT, c, v4.CLOSE_PARAMETER) for c in choices)
    as_text = f"{_text(head, AS_TEXT)} value"
    as_json = f"{_text(head, AS_JSON)} %json {_json(schema)} {_text(v4.CLOSE_PARAMETER)}"
    types = _types(schema)
    if types == {"string"}:
        return as_text
    if choices or (types and types <= NO_STRINGS):
        return as_json
    return f"{as_text} | {as_json}"


def _types(schema: Schema) -> set[str]:
    """Names of the types that the schema allows; none where it does not say."""
    named = schema.get("type") or []
    return {named} if isinstance(named, str) else set(named)


def _with_definitions(value: Any, root: Schema) -> Schema:
    """The property's schema, with what its references point at."""
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**shared, **value} if isinstance(value, dict) else shared


def _json(schema: Schema, layout: Mapping[str, Any] = SEPARATORS) -> str:
    return json.dumps({**schema, "x-guidance": layout}, ensure_ascii=False)


def _without(rule: str, marker: str) -> str:
    """A terminal for any text that does not contain the marker."""
    return rf"{rule}: /(.|\n)*/ & ~/(.|\n)*{_regex(marker)}(.|\n)*/"


def _regex(text: str) -> str:
    return text.replace("/", r"\/")


def _text(*parts: str) -> str:
    """These very characters, as a grammar writes them."""
    return json.dumps("".join(parts), ensure_ascii=False)
