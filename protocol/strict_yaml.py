"""YAML as a config needs it: text, numbers, true, false and null in mappings and lists.

Refused with their line: a key that stands twice, tags, dates, keys that are no text, deep nesting,
and aliases that would blow up or never end. YAML itself lets the last of two equal keys win.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

MAX_DEPTH = 20
MAX_VALUES = 10_000  # aliases written out

_PREFIX = "tag:yaml.org,2002:"
_PLAIN = {_PREFIX + kind for kind in ("str", "int", "float", "bool", "null")}
_TEXT, _MERGE = _PREFIX + "str", _PREFIX + "merge"


class YamlFault(ValueError):
    """What is wrong with a text, and where."""


def parse_yaml(text: str) -> Any:
    """The text's one document as plain values. Raises YamlFault."""
    try:
        _check_depth(text)
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check(node, loader)
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise YamlFault(f"not valid YAML: {error}") from error
    except ValueError as error:  # numbers: thousands of digits, or an empty one behind a sign
        raise error if isinstance(error, YamlFault) else YamlFault(f"{error}") from error


def _check_depth(text: str) -> None:
    """Before anything recursive looks at it."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise YamlFault(f"{_line(event)}: nested more than {MAX_DEPTH} deep")


def _check(root: Node, loader: yaml.SafeLoader) -> None:
    sizes: dict[int, int] = {}  # values under each node, aliases written out

    def visit(node: Node, path: tuple[Node, ...]) -> int:
        if any(node is above for above in path):
            raise YamlFault(f"{_line(node)}: an alias stands within what it repeats")
        if id(node) not in sizes:
            _check_kind(node, loader)
            inside = (visit(child, (*path, node)) for child in _children(node))
            sizes[id(node)] = 1 + sum(inside)
        if sizes[id(node)] > MAX_VALUES:
            raise YamlFault(f"{_line(node)}: more than {MAX_VALUES} values")
        return sizes[id(node)]

    visit(root, ())


def _check_kind(node: Node, loader: yaml.SafeLoader) -> None:
    if isinstance(node, MappingNode):
        _check_keys(node)
    elif isinstance(node, ScalarNode):
        implied = loader.resolve(ScalarNode, node.value, (node.style is None, True))
        if node.tag not in _PLAIN or node.tag not in (implied, _TEXT):
            kind = node.tag.removeprefix(_PREFIX)
            raise YamlFault(
                f"{_line(node)}: {node.value[:80]!r} is a {kind}, expected text, a number, true, "
                "false or null; put text into quotes"
            )


def _check_keys(mapping: MappingNode) -> None:
    lines: dict[str, str] = {}
    for key, _ in mapping.value:
        if not isinstance(key, ScalarNode) or key.tag not in (_TEXT, _MERGE):
            shown = key.value if isinstance(key, ScalarNode) else "a list or mapping"
            raise YamlFault(f"{_line(key)}: key {shown[:80]!r} is no text; put it into quotes")
        if key.value in lines:
            raise YamlFault(
                f"key {key.value[:80]!r} stands twice, in {lines[key.value]} and in {_line(key)}; "
                "remove one, or join the two sections"
            )
        lines[key.value] = _line(key)


def _children(node: Node) -> Iterator[Node]:
    if isinstance(node, MappingNode):
        for key, value in node.value:
            if key.tag == _MERGE:
                yield value
            else:
                yield from (key, value)
    elif isinstance(node, SequenceNode):
        yield from node.value


def _line(at: Node | yaml.Event) -> str:
    mark = at.start_mark
    assert mark is not None, "a text's nodes and events know where they begin"
    return f"line {mark.line + 1}"
