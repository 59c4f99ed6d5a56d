"""Texts that a grammar lets through, and schemas of arguments to make grammars of."""

from __future__ import annotations

import numpy as np


def passes_through(tokenizer, matcher, text):
    """Whether the text is one that the matcher's grammar lets through, to its end."""
    output = []
    for token_id in tokenizer.encode(text, add_special_tokens=False).ids:
        if not matcher.allowed()[token_id]:
            return False
        output.append(token_id)
        matcher.follow(output)
    return matcher.complete


def random_walk(it, matcher, rng, ends, max_tokens=600):
    """Random tokens under the mask, as text; None if they come to no end. Texts are ended often, by
    one of these, as chance takes long to do it."""
    closers = [it.encode(text).ids for text in ends]
    output: list[int] = []

    def take(token_id):
        output.append(token_id)
        matcher.follow(output)

    while not matcher.complete and len(output) < max_tokens:
        allowed = matcher.allowed()
        assert matcher.error is None and allowed.any()
        if allowed.sum() > 40 and rng.random() < 0.5:
            for token_id in rng.choice(closers):
                if matcher.complete or not matcher.allowed()[token_id]:
                    break
                take(token_id)
        else:
            take(rng.choice(np.flatnonzero(allowed).tolist()))
    return it.decode(output, skip_special_tokens=False) if matcher.complete else None


LEAVES = [
    {"type": "string"},
    {"type": "string", "maxLength": 3},
    {"type": "string", "minLength": 2, "maxLength": 4, "description": "d"},
    {"type": "string", "pattern": "^[a-z/]{2,4}$"},
    {"type": "string", "pattern": "[0-9]x", "maxLength": 6},
    {"type": "string", "pattern": "^a|b$", "maxLength": 6},
    {"type": "string", "enum": ["red", "blue"], "title": "Color"},
    {"type": "string", "format": "date"},
    {"const": "fixed"},
    {"const": 7},
    {"enum": ["a", 1, None]},
    {"type": "integer", "minimum": 0, "maximum": 99},
    {"type": "number", "exclusiveMinimum": 1},
    {"type": "boolean"},
    {"type": ["string", "null"], "maxLength": 2},
    {"type": ["integer", "string"], "maxLength": 2, "maximum": 9, "minimum": 0},
    {},
    True,
]


def random_schema(rng, names, depth=2):
    """A schema as pydantic (1 and 2) and zod write them. names: what references may lead to."""

    def inner():
        return random_schema(rng, names, depth - 1)

    if depth == 0 or rng.random() < 0.3:
        return rng.choice(LEAVES)
    return rng.choice([
        lambda: {"anyOf": [inner(), {"type": "null"}], "default": None},
        lambda: {"oneOf": [{"type": "integer"}, {"type": "null"}]},
        lambda: {"anyOf": [inner(), inner()]},
        lambda: {"$ref": rng.choice(names), "description": "d"},
        lambda: {"allOf": [{"$ref": rng.choice(names)}], "default": None},
        lambda: {"allOf": [{"type": "string", "minLength": 1}, {"maxLength": 3}]},
        lambda: {"type": "array", "items": inner(), "maxItems": 2},
        lambda: {"type": "object", "additionalProperties": {"type": "integer"}},
        lambda: {"type": "object", "properties": {"x": inner(), "y": inner()}, "required": ["x"],
                 "additionalProperties": False},
    ])()  # fmt: skip


def random_parameters(rng):
    place = rng.choice(["$defs", "definitions"])
    names = [f"#/{place}/Color", f"#/{place}/Node", f"#/{place}/Maybe~1a"]
    node = {"properties": {"next": {"anyOf": [{"$ref": names[1]}, {"type": "null"}]},
                           "color": {"$ref": names[0]}}, "required": ["color"], "type": "object",
            "additionalProperties": False}  # fmt: skip
    maybe = {"anyOf": [{"$ref": names[0]}, {"type": "integer", "maximum": 9}, {"type": "null"}]}
    properties = {f"p{index}": random_schema(rng, names) for index in range(rng.randrange(1, 5))}
    if rng.random() < 0.3:
        properties["again"] = {"$ref": "#/properties/p0"}
    required = [name for name in properties if rng.random() < 0.5]
    definitions = {"Color": {"enum": ["red", "blue"], "type": "string"}, "Node": node,
                   "Maybe/a": maybe}  # fmt: skip
    schema = {"type": "object", "properties": properties, "required": required}
    match rng.randrange(4):
        case 0 if "again" not in properties:
            return {"$ref": f"#/{place}/Top", place: definitions | {"Top": schema}}
        case 1:
            more = {"properties": {"kind": {"const": "k"}}, "required": ["kind"]}
            return schema | {"allOf": [more], place: definitions}
        case 2:
            kinds = [{"properties": {"kind": {"const": k}, k: {"type": "string", "maxLength": 2}},
                      "required": ["kind", k], "type": "object"} for k in "ab"]  # fmt: skip
            return schema | {rng.choice(["anyOf", "oneOf"]): kinds, place: definitions}
    return schema | {place: definitions, "additionalProperties": rng.random() < 0.5}
