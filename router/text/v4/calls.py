"""Grammars of DeepSeek-V4's answers: which outputs call which functions with which arguments.

    reasoning </think> <tool_calls> { <invoke> { <parameter> value </parameter> } </invoke> } ...
    reasoning </think> JSON

Written for llguidance. Arguments come in the order of their schema, required ones always. Strings
are text up to the parameter's end, within the bounds of their schema; everything else is JSON of
its schema, and what may be both is either.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sluice.protocol.messages import InvalidRequest
from sluice.router.text.grammar.lark import (
    FREE_LAYOUT,
    grammar_of,
    in_regex,
    json_of,
    literal,
    without,
)
from sluice.router.text.grammar.parameters import Budget, Form, Parameters, Texts
from sluice.router.text.v4 import words as v4

Schema = Mapping[str, Any]

NEW_LINE = "\n"
AS_TEXT, AS_JSON = '" string="true">', '" string="false">'


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
    is for router/text/grammar_judge.py to find out.
    """
    thought = "" if end_think_id is None else f"THOUGHT? <[{end_think_id}]> "
    is_json = json_schema is not None and not must
    opened = literal("\n\n", v4.OPEN_CALLS) if must or is_json else "before"
    answers = [*(["calls"] if tools else []), *(["json"] if is_json else [])]
    rules = [
        f"start: {thought}({' | '.join(answers if must or is_json else [*answers, 'TEXT?'])})",
        without("THOUGHT", v4.END_THINK),
        without("TEXT", v4.OPEN_CALLS),
        f"before[lazy]: /(.|\\n)*{in_regex(v4.OPEN_CALLS)}/",
        "value[lazy]: VALUE",
        f"VALUE: /(.|\\n)*{in_regex(v4.CLOSE_PARAMETER)}/ & {NO_OTHER_END}",
        r'NAME: /[^"<>\n]+/',
    ]
    if is_json:
        rules.append(f"json: {json_of(json.loads(json_schema or ''), FREE_LAYOUT)}")
    if tools:
        more = "+" if parallel else ""
        rules.append(f"calls: {opened} call{more} {literal(NEW_LINE, v4.CLOSE_CALLS)}")
        rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    budget = Budget()
    of_tools = (_function(f"call_{index}", tool, budget) for index, tool in enumerate(tools))
    return grammar_of(rules, itertools.chain.from_iterable(of_tools))


def _function(rule: str, function: Schema, budget: Budget) -> Iterator[str]:
    """Rules for one call of the function, from the line break before it."""
    parameters = Parameters(function.get("parameters") or {}, budget)
    forms = []
    for index, form in enumerate(parameters.forms()):
        yield from _form(f"{rule}_{index}", form, parameters)
        forms.append(f"{rule}_{index}")
    head = literal(NEW_LINE, f'<{v4.DSML}invoke name="{_name(function["name"])}">', NEW_LINE)
    yield f"{rule}: {head} ({' | '.join(forms)}) {literal(v4.CLOSE_INVOKE)}"


def _form(rule: str, form: Form, parameters: Parameters) -> Iterator[str]:
    """Rules for one set of arguments, a line each. Those without a name come where none has one."""
    parts = ['""']
    for index, (name, schema) in enumerate(form.properties.items()):
        parameter, optional = f"{rule}_{index}", "" if name in form.required else "?"
        parts.append(f"({parameter} {literal(NEW_LINE)}){optional}")
        head = literal(f'<{v4.DSML}parameter name="{_name(name)}')
        yield from _parameter(parameter, head, schema, parameters)
    if not form.properties and form.additional is not False:
        parts.append(f"({rule}_any {literal(NEW_LINE)})*")
        head = literal(f'<{v4.DSML}parameter name="') + " NAME"
        yield from _parameter(f"{rule}_any", head, form.additional, parameters)
    yield f"{rule}: {' '.join(parts)}"


def _parameter(rule: str, head: str, schema: Any, parameters: Parameters) -> Iterator[str]:
    """Rules for one parameter, from its tag to its end: a string is text, all else is JSON."""
    texts, kinds = parameters.texts(schema), parameters.kinds(schema)
    choices = []
    for index, text in enumerate(texts or ()):
        if text.choices is not None:
            values = " | ".join(literal(choice, v4.CLOSE_PARAMETER) for choice in text.choices)
        elif text.is_any:
            values = "value"
        else:
            values = f"{rule}_t{index}"
            yield from _bounded(values, text)
        choices.append(f"{head} {literal(AS_TEXT)} ({values})")
    if kinds != {"string"} or not texts:
        json_text = json_of(parameters.standalone(schema))
        choices.append(f"{head} {literal(AS_JSON)} {json_text} {literal(v4.CLOSE_PARAMETER)}")
    yield f"{rule}: {' | '.join(choices)}"


def _bounded(rule: str, text: Texts) -> Iterator[str]:
    """A rule for texts of certain lengths and patterns, with the parameter's end."""
    end, most = in_regex(v4.CLOSE_PARAMETER), text.max_characters
    length = f"{{{text.min_characters},{'' if most is None else most}}}"
    regexes = [f"/(.|\\n){length}{end}/", *(f"/{regex}{end}/" for regex in text.regexes)]
    yield f"{rule}[lazy]: {rule.upper()}"
    yield f"{rule.upper()}: {' & '.join((*regexes, NO_OTHER_END))}"


def _name(name: str) -> str:
    if '"' in name:
        raise InvalidRequest("tools: a name with a quotation mark cannot be called", param="tools")
    return name


# The parser takes an invoke's end for a parameter's, too, where a model has left that out.
NO_OTHER_END = rf"~/(.|\n)*{in_regex(v4.CLOSE_INVOKE)}(.|\n)*/"
