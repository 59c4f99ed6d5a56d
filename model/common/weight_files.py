"""The safetensors files of a checkpoint: which there are, whether they are whole, and their hash.

No torch here: a command line looks at them before anything starts.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from sluice.model.common.fields import read_json
from sluice.protocol.messages import ConfigError
from sluice.protocol.reading import reading, shown

_HASHED_BYTES = 1 << 20  # at either end of a weights file, for the fingerprint
_MAX_LISTED = 5  # names in an error message


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, in order. Raises ConfigError if any is missing."""
    index = folder / "model.safetensors.index.json"
    with reading(str(folder)):
        if index.exists():
            files = [folder / name for name in _named_in(read_json(index), index)]
        else:
            files = sorted(folder.glob("*.safetensors"))
        missing = [path.name for path in files if not path.is_file()]
    if missing:
        more = f" and {len(missing) - _MAX_LISTED} more" if len(missing) > _MAX_LISTED else ""
        raise ConfigError(
            f"{folder}: {', '.join(missing[:_MAX_LISTED])}{more} named in {index.name} is not "
            "there; copy the whole checkpoint"
        )
    if not files:
        raise ConfigError(
            f"{folder}: no *.safetensors file; a checkpoint folder holds config.json, "
            "tokenizer.json and *.safetensors"
        )
    return files


def _named_in(index: dict[str, Any], source: Path) -> list[str]:
    """The files an index names: beside it, whatever it says."""
    names = index.get("weight_map", {})
    for name in names.values() if isinstance(names, dict) else [names]:
        if not isinstance(name, str) or Path(name).name != name:
            raise ConfigError(
                f"{source}: weight_map holds {shown(name)}, expected for each tensor the name of "
                "a file in this folder"
            )
    return sorted(set(names.values()))


def check_whole(folder: Path) -> None:
    """Every file's header fits its length, and no tensor leaves it. Raises ConfigError.

    Reads headers only, so that hundreds of gigabytes take no longer than a few.
    """
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="np"):
                pass
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{path}: cannot be read as safetensors: {error}; it may be cut off, copy it again"
            ) from error


def fingerprint(folder: Path) -> str:
    """A hash that tells one checkpoint from another: config, and both ends of each weights file.

    The ends hold the header (names, shapes, types) and the last weights; reading all of a large
    checkpoint would take minutes at each start.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update((folder / "config.json").read_bytes())
    for path in weight_files(folder):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HASHED_BYTES))
            file.seek(max(0, size - _HASHED_BYTES))
            digest.update(file.read())
    return digest.hexdigest()
