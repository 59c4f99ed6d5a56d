"""Fields: reading a config.json with errors that name file, field, value and expectation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sluice.protocol.messages import ConfigError
from sluice.protocol.reading import read_json as read_object
from sluice.protocol.reading import shown

MAX_INTEGER = 2**31 - 1  # of what is counted or measured in a model; sizes are products of some
MAX_LAYERS = 1024


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a checkpoint. Raises ConfigError."""
    return read_object(
        path, way_out="a checkpoint folder holds config.json, tokenizer.json and *.safetensors"
    )


class Fields:
    """Access to a config's fields; what is null counts as absent."""

    def __init__(self, data: Any, source: str) -> None:
        """Raises ConfigError if data is no mapping."""
        self.source = source
        if not isinstance(data, Mapping):
            raise self.error(f"is {shown(data)}, expected an object with names and values")
        self.data: Mapping[str, Any] = data

    def error(self, problem: str) -> ConfigError:
        return ConfigError(f"{self.source}: {problem}")

    def get(self, name: str, default: Any) -> Any:
        value = self.data.get(name)
        return default if value is None else value

    def require(self, name: str) -> Any:
        if self.data.get(name) is None:
            raise self.error(f"{name} is missing; take config.json from the model's release")
        return self.data[name]

    def integer(self, name: str, default: int | None = None, maximum: int = MAX_INTEGER) -> int:
        """A positive integer; without a default it must be there. Raises ConfigError."""
        value = self.require(name) if default is None else self.get(name, default)
        if type(value) is not int or value <= 0:
            raise self.error(f"{name} is {shown(value)}, expected a positive integer")
        if value > maximum:
            raise self.error(f"{name} is {shown(value)}, expected at most {maximum}")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """An integer from 0 on; without a default it must be there. Raises ConfigError."""
        value = self.require(name) if default is None else self.get(name, default)
        return 0 if type(value) is int and value == 0 else self.integer(name, default)

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0; without a default it must be there. Raises ConfigError."""
        value = self.require(name) if default is None else self.get(name, default)
        if type(value) not in (int, float) or not 0 < value <= 1e30:  # NaN is neither
            raise self.error(f"{name} is {shown(value)}, expected a number above 0")
        return float(value)

    def number_or_zero(self, name: str, default: float = 0.0) -> float:
        """A finite number from 0 on. Raises ConfigError."""
        value = self.get(name, default)
        return 0.0 if type(value) in (int, float) and value == 0 else self.number(name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if type(value) is not bool:
            raise self.error(f"{name} is {shown(value)}, expected true or false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self.get(name, default)
        if not isinstance(value, str):
            raise self.error(f"{name} is {shown(value)}, expected text")
        return value

    def sequence(self, name: str) -> list[Any]:
        """A list that must be there. Raises ConfigError."""
        value = self.require(name)
        if not isinstance(value, list):
            raise self.error(f"{name} is {shown(value)}, expected a list")
        return value

    def section(self, name: str) -> Fields:
        """An object within this one, empty if it is absent. Raises ConfigError."""
        return Fields(self.get(name, {}), f"{self.source}: {name}")

    def token_ids(self, name: str, default: int | None = None) -> tuple[int, ...]:
        """One token id, a list of them, or none. Raises ConfigError."""
        value = self.get(name, [] if default is None else default)
        ids = value if isinstance(value, list) else [value]
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id <= MAX_INTEGER:
                raise self.error(f"{name} is {shown(value)}, expected a token id or a list of them")
        return tuple(dict.fromkeys(ids))

    def refuse_other_than(self, supported: Mapping[str, Any]) -> None:
        """Fields whose other values would need another forward pass. Raises ConfigError."""
        for name, value in supported.items():
            if self.get(name, value) != value:
                raise self.error(f"{name} is {shown(self.data[name])}, only {value!r} is supported")
