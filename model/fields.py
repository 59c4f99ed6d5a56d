"""Fields: reading a config.json with errors that name file, field, value and expectation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sluice.engine.protocol import ConfigError


class Fields:
    """Access to a config's fields; what is null counts as absent."""

    def __init__(self, data: Mapping[str, Any], source: str) -> None:
        self.data = data
        self.source = source

    def error(self, problem: str) -> ConfigError:
        return ConfigError(f"{self.source}: {problem}")

    def get(self, name: str, default: Any) -> Any:
        value = self.data.get(name)
        return default if value is None else value

    def require(self, name: str) -> Any:
        if self.data.get(name) is None:
            raise self.error(f"{name} is missing; take config.json from the model's release")
        return self.data[name]

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer; without a default it must be there. Raises ConfigError."""
        value = self.require(name) if default is None else self.get(name, default)
        if type(value) is not int or value <= 0:
            raise self.error(f"{name} is {value!r}, expected a positive integer")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if type(value) is not bool:
            raise self.error(f"{name} is {value!r}, expected true or false")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id, a list of them, or none."""
        value = self.get(name, [])
        return tuple(value) if isinstance(value, list) else (int(value),)

    def refuse_other_than(self, supported: Mapping[str, Any]) -> None:
        """Fields whose other values would need another forward pass. Raises ConfigError."""
        for name, value in supported.items():
            if self.get(name, value) != value:
                raise self.error(f"{name} is {self.data[name]!r}, only {value!r} is supported")
