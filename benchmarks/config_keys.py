"""Every key of the config, with its type, default and sentence, for docs/configuration.md."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sluice.protocol.config import SluiceConfig

TEXT_WIDTH = 100


def configuration_page() -> str:
    """Every key of the config: type, default, and what it does."""
    schema = SluiceConfig.model_json_schema()
    return "\n".join(_section(schema, schema["$defs"], [""]))


def _section(
    section: Mapping[str, Any], sections: Mapping[str, Any], places: Sequence[str]
) -> Iterator[str]:
    """A section's own keys, then its sections'; places: where such a one stands."""
    inner: dict[str, list[str]] = {}
    for name, key in section["properties"].items():
        if (found := _section_of(key)) is not None:
            several = ".<name>" if "additionalProperties" in key else ""
            inner.setdefault(found, []).extend(f"{place}{name}{several}" for place in places)
            continue
        about = key.get("description", "")
        default = f"; default {_value(key)}" if "default:" not in about else ""
        default = "; required" if name in section.get("required", ()) else default
        text = f"- `{name}`: {_type(key)}{default}. {about}"
        yield from textwrap.wrap(" ".join(text.split()), TEXT_WIDTH, subsequent_indent="  ")
    for found, names in inner.items():
        yield f"\n### {', '.join(f'`{name}`' for name in names)}\n"
        yield textwrap.fill(" ".join(sections[found]["description"].split()), TEXT_WIDTH) + "\n"
        yield from _section(sections[found], sections, [f"{name}." for name in names])


def _section_of(key: Mapping[str, Any]) -> str | None:
    """The section that the key holds, or each value of it; None if it is a value itself."""
    inner = key.get("additionalProperties")
    for part in (key, *key.get("anyOf", ()), *([inner] if isinstance(inner, dict) else ())):
        if "$ref" in part:
            return str(part["$ref"].rsplit("/", 1)[1])
    return None


def _type(key: Mapping[str, Any]) -> str:
    parts = [part for part in key.get("anyOf", (key,)) if part.get("type") != "null"]
    return " or ".join(map(_one_type, parts))


WORDS = {"string": "text", "boolean": "true or false", "integer": "whole number", "object": "names"}


def _one_type(part: Mapping[str, Any]) -> str:
    if "const" in part:
        return f"`{part['const']}`"
    if "enum" in part:
        return " or ".join(f"`{value}`" for value in part["enum"])
    if part.get("format") == "path":
        return "path"
    if part["type"] == "array":
        return f"list of {_one_type(part['items'])}"
    low, high = part.get("minimum"), part.get("maximum")
    above = part.get("exclusiveMinimum")
    bounds = [
        f"from {low}" if low is not None else f"above {above}" if above is not None else "",
        f"to {high:,}" if high is not None and high < 1 << 20 else "",
    ]
    return " ".join([WORDS.get(part["type"], part["type"]), *filter(None, bounds)])


def _value(key: Mapping[str, Any]) -> str:
    value = key.get("default")
    if value is None or value in ("", [], {}):
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
