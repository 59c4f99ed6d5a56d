"""Parameters: the arguments that a function's schema allows, each with a schema of its own.

V4 writes arguments one by one, and strings as plain text, so a grammar has to know which arguments
there are and which of them are strings. References and combinations, as pydantic and zod write
them, are resolved as far as that takes; what is within an argument is left to JSON's own grammar.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from sluice.protocol.messages import InvalidRequest

MAX_VISITS = 50_000  # of schemas within schemas, over all tools: 30 ms
MAX_DEPTH = 32  # of references and combinations within one another
MAX_FORMS = 64
MAX_TEXTS = 16

KINDS = frozenset({"string", "number", "integer", "boolean", "array", "object", "null"})
# What nothing here follows: a set of arguments that has one of these is refused, ...
BEYOND_FORMS = (
    "not", "if", "then", "else", "const", "enum", "minProperties", "maxProperties",
    "patternProperties", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies",
    "$dynamicRef", "$recursiveRef",
)  # fmt: skip
# ... and a string is written as JSON, whose grammar knows some of them.
BEYOND_TEXTS = ("not", "if", "then", "else", "format", "$dynamicRef", "$recursiveRef")


@dataclass(frozen=True)
class Form:
    """One set of arguments. additional: the schema of unnamed ones, False if there may be none."""

    properties: Mapping[str, Any]
    required: frozenset[str] = frozenset()
    additional: Any = True

    def schema_of(self, name: str) -> Any:
        return self.properties.get(name, self.additional)


@dataclass(frozen=True)
class Texts:
    """Strings, as text: some, or those of such lengths that match all these regular expressions."""

    choices: tuple[str, ...] | None = None
    min_characters: int = 0
    max_characters: int | None = None
    regexes: tuple[str, ...] = ()

    @property
    def is_any(self) -> bool:
        return self == Texts()


class Budget:
    """How many schemas may be looked at for one request."""

    def __init__(self) -> None:
        self._left = MAX_VISITS

    def spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise _refused("too many references to references; simplify the schemas")


class Parameters:
    """The parameters of one function. Raises InvalidRequest for what cannot be followed."""

    def __init__(self, root: Mapping[str, Any], budget: Budget) -> None:
        self._root = root
        self._budget = budget

    def forms(self) -> list[Form]:
        """The sets of arguments of which a call has one; every required one is a property."""
        found = [form for form in map(_completed, self._forms(self._root, 0)) if form is not None]
        if not found:
            raise _refused("parameters: they allow no arguments, expected an object's schema")
        return found

    def kinds(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """The JSON types that the schema may allow; never too few."""
        self._visit(depth)
        if not isinstance(schema, Mapping):
            return frozenset() if schema is False else KINDS
        found = KINDS
        if (named := schema.get("type")) is not None:
            found = frozenset([named] if isinstance(named, str) else _list(named, "type"))
            found |= {"integer"} if "number" in found else set()
        if (choices := _choices(schema)) is not None:
            found &= {kind for choice in choices for kind in _kinds_of(choice)}
        for part in self._all_of(schema):
            found &= self.kinds(part, depth + 1)
        for parts in _any_of(schema):
            found &= frozenset().union(*(self.kinds(part, depth + 1) for part in parts))
        return found

    def texts(self, schema: Any, depth: int = 0) -> list[Texts] | None:
        """The strings that the schema allows; None if they cannot be described as text."""
        if "string" not in self.kinds(schema, depth):
            return []
        if not isinstance(schema, Mapping):
            return [Texts()]
        if any(key in schema for key in BEYOND_TEXTS) or (own := _own_texts(schema)) is None:
            return None
        found = [own]
        groups = [[part] for part in self._all_of(schema)] + _any_of(schema)
        for group in groups:
            parts = [self.texts(part, depth + 1) for part in group]
            if any(part is None for part in parts):
                return None
            if group is schema.get("oneOf") and sum(map(bool, parts)) > 1:
                return None  # one may exclude the other
            others = [text for part in parts for text in part or ()]
            found = [both for a in found for b in others if (both := _both(a, b)) is not None]
            if len(found) > MAX_TEXTS:
                return None
        return found

    def standalone(self, schema: Any) -> dict[str, Any]:
        """The schema by itself, with what its references lead to."""
        places: dict[str, int] = {}

        def moved(value: Any) -> Any:
            self._budget.spend()
            if isinstance(value, list):
                return [moved(item) for item in value]
            if not isinstance(value, dict):
                return value
            copy = {key: moved(item) for key, item in value.items()}
            ref = value.get("$ref")
            if isinstance(ref, str) and ref.startswith("#"):
                copy["$ref"] = f"#/$defs/{places.setdefault(ref, len(places))}"
            return copy

        body = moved(schema) if isinstance(schema, dict) else _from_bool(schema)
        definitions: dict[str, Any] = {}
        while len(definitions) < len(places):
            place = len(definitions)
            definitions[str(place)] = moved(self._target(list(places)[place]))
        return body | ({"$defs": definitions} if definitions else {})

    def _forms(self, schema: Any, depth: int) -> list[Form]:
        if "object" not in self.kinds(schema, depth):
            return []
        if not isinstance(schema, Mapping):
            return [Form({})]
        for key in BEYOND_FORMS:
            if schema.get(key) is not None:
                raise _refused(f"parameters: {key} cannot be enforced here, leave it out")
        additional = schema.get("additionalProperties")
        own = Form(
            _mapping(schema.get("properties"), "properties"),
            frozenset(_list(schema.get("required") or [], "required")),
            True if additional is None else additional,
        )
        found = [own]
        groups = [[part] for part in self._all_of(schema)] + _any_of(schema)
        for group in groups:
            others = [form for part in group for form in self._forms(part, depth + 1)]
            if group is schema.get("oneOf") and not self._told_apart(others):
                raise _refused("parameters: oneOf of objects that may overlap, expected anyOf")
            found = [both for a in found for b in others if (both := _merged(a, b)) is not None]
            if len(found) > MAX_FORMS:
                raise _refused(f"parameters: more than {MAX_FORMS} combinations of arguments")
        return found

    def _told_apart(self, forms: list[Form]) -> bool:
        """Whether each two have an argument, required in both, with other values in each."""
        return all(
            any(
                self._differ(a.schema_of(name), b.schema_of(name))
                for name in sorted(a.required & b.required)
            )
            for index, a in enumerate(forms)
            for b in forms[:index]
        )

    def _differ(self, one: Any, other: Any) -> bool:
        if not (self.kinds(one) & self.kinds(other)):
            return True
        a, b = (_choices(s) if isinstance(s, Mapping) else None for s in (one, other))
        return a is not None and b is not None and not any(x == y for x in a for y in b)

    def _all_of(self, schema: Mapping[str, Any]) -> list[Any]:
        """Schemas that hold as well."""
        parts = list(_list(schema.get("allOf") or [], "allOf"))
        if (ref := schema.get("$ref")) is not None:
            parts.append(self._target(ref))
        return parts

    def _target(self, ref: Any) -> Any:
        """What a reference leads to."""
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            raise _refused("$ref: expected one that begins with '#/', within the parameters")
        target: Any = self._root
        for word in ref.split("/")[1:]:
            word = unquote(word).replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and word.isdecimal() and len(word) < 6:
                target = dict(enumerate(target)).get(int(word))
            else:
                target = target.get(word) if isinstance(target, Mapping) else None
        if not isinstance(target, Mapping | bool):
            raise _refused("$ref: it leads to no schema")
        return target

    def _visit(self, depth: int) -> None:
        self._budget.spend()
        if depth > MAX_DEPTH:
            raise _refused("a schema that refers to itself, or is nested too deeply")


def _completed(form: Form) -> Form | None:
    """Every required argument as a property; None if one may not be."""
    properties = {name: s for name, s in form.properties.items() if s is not False}
    for name in sorted(form.required - properties.keys()):
        if form.schema_of(name) is False:
            return None
        properties[name] = form.additional
    return Form(properties, form.required, form.additional)


def _merged(a: Form, b: Form) -> Form | None:
    """The arguments that both allow."""
    names = dict.fromkeys((*a.properties, *b.properties))
    properties = {name: _and(a.schema_of(name), b.schema_of(name)) for name in names}
    allowed = {name: schema for name, schema in properties.items() if schema is not False}
    required, additional = a.required | b.required, _and(a.additional, b.additional)
    if additional is False and not required <= allowed.keys():
        return None
    return Form(allowed, required, additional)


def _and(a: Any, b: Any) -> Any:
    if a is False or b is False:
        return False
    parts = [schema for schema in (a, b) if schema is not True and schema != {}]
    return {"allOf": parts} if len(parts) == 2 else parts[0] if parts else True


def _own_texts(schema: Mapping[str, Any]) -> Texts | None:
    """What the schema itself says of strings; None if that cannot be said of text."""
    choices = _choices(schema)
    texts = None if choices is None else tuple(c for c in choices if isinstance(c, str))
    lengths = schema.get("minLength"), schema.get("maxLength")
    if any(n is not None and (type(n) is not int or n < 0) for n in lengths):
        return None
    regexes: tuple[str, ...] = ()
    if (pattern := schema.get("pattern")) is not None:
        if not isinstance(pattern, str) or (regex := _whole(pattern)) is None:
            return None
        regexes = (regex,)
    if texts is not None and regexes:
        return None
    return _both(Texts(texts), Texts(None, lengths[0] or 0, lengths[1], regexes))


def _both(a: Texts, b: Texts) -> Texts | None:
    """The strings that both allow."""
    low = max(a.min_characters, b.min_characters)
    limits = [n for n in (a.max_characters, b.max_characters) if n is not None]
    high = min(limits, default=None)
    if high is not None and low > high:
        return None
    if a.choices is None and b.choices is None:
        return Texts(None, low, high, a.regexes + b.regexes)
    choices = [c for c in a.choices or b.choices or () if b.choices is None or c in b.choices]
    fitting = tuple(c for c in choices if low <= len(c) and (high is None or len(c) <= high))
    return Texts(fitting, regexes=a.regexes + b.regexes) if fitting else None


ANYTHING = r"(.|\n)*"
SPECIAL = re.compile(r"\\.|/|\n", re.DOTALL)
TOKEN = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|.", re.DOTALL)


def _whole(pattern: str) -> str | None:
    """JSON Schema's pattern, which may match anywhere, as one for the whole string.

    None where that takes more than looking at its ends.
    """
    tokens = TOKEN.findall(pattern)
    begins, ends = tokens[:1] == ["^"], len(tokens) > 1 and tokens[-1] == "$"
    inner = tokens[begins : len(tokens) - ends]
    if "^" in inner or "$" in inner or r"\b" in inner or ("|" in inner and (begins or ends)):
        return None
    words = {"/": r"\/", "\n": r"\n"}  # as a grammar writes them
    regex = SPECIAL.sub(lambda found: words.get(found[0], found[0]), "".join(inner))
    return f"{'' if begins else ANYTHING}({regex}){'' if ends else ANYTHING}"


def _any_of(schema: Mapping[str, Any]) -> list[list[Any]]:
    """Groups of schemas of each of which one has to hold."""
    groups = (_list(schema[key], key) for key in ("anyOf", "oneOf") if schema.get(key) is not None)
    return list(groups)


def _choices(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return None if schema.get("enum") is None else _list(schema["enum"], "enum")


def _kinds_of(value: Any) -> Iterator[str]:
    match value:
        case bool():
            yield "boolean"
        case int() | float():
            yield from ("number", "integer")
        case str():
            yield "string"
        case None:
            yield "null"
        case list():
            yield "array"
        case _:
            yield "object"


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise _refused(f"{name}: expected a list")
    if name in ("type", "required") and not all(isinstance(item, str) for item in value):
        raise _refused(f"{name}: expected a list of names")
    return value


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping | None):
        raise _refused(f"{name}: expected an object of JSON schemas")
    return value or {}


def _from_bool(schema: Any) -> dict[str, Any]:
    return {"not": {}} if schema is False else {}


def _refused(problem: str) -> InvalidRequest:
    return InvalidRequest(f"tools: {problem}", param="tools")
