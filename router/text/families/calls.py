"""Grammars of the answers of models with a template of their own: which calls, which JSON.

    [<think> reasoning </think>] [text] calls
    [<think> reasoning </think>] JSON

Written for llguidance. What a tokenizer has as one token has to be that token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from sluice.protocol.messages import InvalidRequest
from sluice.router.text.families.tool_formats import END_THINK, THINK, ToolFormat
from sluice.router.text.grammar.lark import (
    FREE_LAYOUT,
    grammar_of,
    in_regex,
    json_of,
    literal,
    without,
)
from sluice.router.text.grammar.parameters import Budget, Parameters

Schema = Mapping[str, Any]


class Reasoning(Enum):
    """Whether an answer begins with reasoning."""

    NONE = "none"
    OPENED = "opened"  # the prompt ends within it
    POSSIBLE = "possible"  # the answer may open it itself


class Words:
    """Texts of a format as a grammar writes them. token_ids: of those that are one token."""

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        self._token_ids = token_ids

    def written(self, text: str) -> str:
        """The text, with the tokens in it as such."""
        tokens = "|".join(map(re.escape, self._token_ids)) or "(?!)"
        pieces = (piece for piece in re.split(f"({tokens})", text) if piece)
        return " ".join(
            f"<[{self._token_ids[piece]}]>" if piece in self._token_ids else literal(piece)
            for piece in pieces
        )

    def after_text(self, rule: str, marker: str, but: str = "") -> Iterator[str]:
        """A rule for any text, without the marker, and the marker. but: texts that it is not."""
        terminal = rule.upper()
        if marker in self._token_ids:
            yield f"{rule}: {terminal}? {self.written(marker)}"
            yield without(terminal, marker) + but
        else:  # a text of its own would take the marker's beginning
            yield f"{rule}[lazy]: {terminal}"
            yield rf"{terminal}: /(.|\n)*{in_regex(marker)}/{but}"


def answer_grammar(
    tools: Sequence[Schema],
    calls: ToolFormat | None,
    token_ids: Mapping[str, int],
    *,
    must: bool,
    parallel: bool,
    reasoning: Reasoning,
    json_schema: str | None = None,
) -> str:
    """A grammar for outputs that call these functions, or are JSON of that schema.

    calls: how they are written, None without tools. token_ids: of the texts that are one token.
    must: there is nothing but a call, else text may come before it, or without one; with a schema
    there is no text, but either calls or JSON. parallel: there may be several calls, where the
    format has more than one.
    Raises InvalidRequest for schemas that are too long. Whether llguidance can follow the grammar
    is for router/text/grammar_judge.py to find out.
    """
    words, answers = Words(token_ids), list[str]()
    rules = [r"GAP: /\n{1,2}/", *words.after_text("thought", END_THINK)]
    of_tools: Iterator[str] = iter(())
    if json_schema is not None and not must:
        rules.append(f"json: {json_of(json.loads(json_schema), FREE_LAYOUT)}")
        answers.append("json")
    if calls is not None:
        is_alone = must or json_schema is not None
        rules += _calls(calls, words, num_tools=len(tools), is_alone=is_alone, parallel=parallel)
        answers += ["calls"] if is_alone else ["calls", "OTHER?"]
        of_tools = _functions(tools, calls)
    match reasoning:
        case Reasoning.NONE:
            thought = ""
        case Reasoning.OPENED:
            thought = "thought GAP? "
        case Reasoning.POSSIBLE:
            thought = f"({words.written(THINK)} thought GAP?)? "
    return grammar_of([f"start: {thought}({' | '.join(answers)})", *rules], of_tools)


def _calls(
    calls: ToolFormat, words: Words, *, num_tools: int, is_alone: bool, parallel: bool
) -> Iterator[str]:
    """Rules for calls, with the text before them unless they are alone; and for no calls."""
    yield "call: " + " | ".join(f"call_{index}" for index in range(num_tools))
    more = calls.separator
    several = f" ({words.written(more)} call)*" if more is not None and parallel else ""
    body = f"call{several} {words.written(calls.closing)}"
    but = _but_bare_calls(calls)
    yield without("OTHER", calls.marker) + but
    if not calls.is_marked:
        yield f"calls: {body}"
        return
    first = words.written(calls.marker) if is_alone else "before"
    yield f"calls: {first} {words.written(calls.opening)} {body}"
    yield from words.after_text("before", calls.marker, but)


def _but_bare_calls(calls: ToolFormat) -> str:
    """For a text's terminal: it begins with nothing that could be read as a call."""
    if not calls.bare:
        return ""
    more = "" if calls.bare == "{" else rf"[\s{in_regex(calls.between.strip())}]*\{{"
    return rf" & ~/\s*{in_regex(calls.bare)}{more}(.|\n)*/"


def _functions(tools: Sequence[Schema], calls: ToolFormat) -> Iterator[str]:
    """A rule for a call of each."""
    budget = Budget()
    for index, tool in enumerate(tools):
        yield f"call_{index}: {_call(tool, calls, budget)}"


def _call(function: Schema, calls: ToolFormat, budget: Budget) -> str:
    """One call of the function: its name and its arguments as JSON."""
    schema = function.get("parameters") or {}
    parameters = Parameters(schema, budget)
    if "object" not in parameters.kinds(schema):
        raise InvalidRequest(
            "tools: parameters: they allow no arguments, expected an object's schema", param="tools"
        )
    arguments = parameters.standalone(schema) | {"type": "object"}
    call = {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, calls.key: arguments},
        "required": ["name", calls.key],
        "additionalProperties": False,
        "$defs": arguments.pop("$defs", {}),
    }
    return json_of(call)  # as a whole: JSON of another schema may begin with the same characters
