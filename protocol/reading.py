"""Reading files that people wrote: bounded, UTF-8, every fault a ConfigError with their name."""

from __future__ import annotations

import json
import reprlib
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sluice.protocol.messages import ConfigError

MAX_TEXT_BYTES = 1 << 20  # of a config, a template, a key file
MAX_JSON_BYTES = 64 << 20  # the index of a checkpoint of thousands of tensors has a few MB

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80
_short.maxlevel = 3


def shown(value: Any) -> str:
    """A value as an error shows it: Python's spelling, of bounded length whatever it is."""
    try:
        return _short.repr(value)
    except ValueError:  # an int of thousands of digits
        return f"an {type(value).__name__} of thousands of digits"


@contextmanager
def reading(what: str, way_out: str = "") -> Iterator[None]:
    """Turn what a path or a file can do wrong in the block into a ConfigError.

    It begins with `what`, and ends with the way out where nothing can be opened. Anything else
    leaves with a note that says what was being read.
    """
    try:
        yield
    except ConfigError:
        raise
    except OSError as error:
        hint = f"; {way_out}" if way_out else ""
        raise ConfigError(f"{what}: {error.strerror or error}{hint}") from error
    except UnicodeError as error:
        raise ConfigError(f"{what}: not UTF-8 ({error}); save it as UTF-8") from error
    except RecursionError as error:
        raise ConfigError(f"{what}: nested too deeply") from error
    except Exception as error:
        error.add_note(f"while reading {what}")
        raise


def read_text(path: Path, what: str, way_out: str = "", *, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """The text of a regular file. `what` stands before the path in errors. Raises ConfigError."""
    named = f"{what} {path}".strip()
    with reading(named, way_out):
        refuse_special(path, named, max_bytes)
        return path.read_text(encoding="utf-8")


def read_json(path: Path, what: str = "", way_out: str = "") -> dict[str, Any]:
    """A JSON object from a file. Raises ConfigError."""
    named = f"{what} {path}".strip()
    text = read_text(path, what, way_out, max_bytes=MAX_JSON_BYTES)
    with reading(named):
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{named}: not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{named}: expected a JSON object, got {type(data).__name__}")
    return data


def refuse_special(path: Path, named: str, max_bytes: int) -> None:
    """Raises OSError if there is nothing, ConfigError for what is no file or too large a one.

    Opening a pipe would wait for ever, and a device may have no end.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe or a device"
        raise ConfigError(f"{named}: is {kind}, expected a file")
    if found.st_size > max_bytes:
        raise ConfigError(
            f"{named}: has {found.st_size >> 20} MiB, expected at most {max_bytes >> 20}"
        )
