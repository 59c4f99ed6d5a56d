"""Words of llguidance's grammars, which are written in a dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from llguidance import LLMatcher

from sluice.protocol.limits import WHITE_SPACE, check_size

# JSON as models are shown it. Left to itself, a weak model writes white space for ever.
SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
FREE_LAYOUT = {"whitespace_pattern": WHITE_SPACE}  # as where an answer is nothing but JSON


def grammar_of(rules: Iterable[str], of_tools: Iterable[str]) -> str:
    """A grammar of these rules. Raises InvalidRequest for tools of which too much is made.

    Looked at as it grows: every parameter may bring all definitions along.
    """
    lines = "\n".join(rules)
    for rule in of_tools:
        lines += f"\n{rule}"
        check_size(lines, "tools")
    return str(LLMatcher.grammar_from_lark(lines))


def literal(*parts: str) -> str:
    """These very characters."""
    return json.dumps("".join(parts), ensure_ascii=False)


def in_regex(marker: str) -> str:
    """The marker within a regular expression."""
    special = r"\/[]()|.*+?{}^$"
    return "".join("\\" + letter if letter in special else letter for letter in marker)


def json_of(schema: Mapping[str, Any], layout: Mapping[str, Any] = SEPARATORS) -> str:
    """JSON that follows the schema."""
    return "%json " + json.dumps({**schema, "x-guidance": layout}, ensure_ascii=False)


def without(rule: str, marker: str) -> str:
    """A terminal for any text that does not contain the marker."""
    return rf"{rule}: /(.|\n)*/ & ~/(.|\n)*{in_regex(marker)}(.|\n)*/"
