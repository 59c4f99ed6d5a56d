"""Which tokens end a text: one rule for the router, which stops there, and for nodes' grammars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sluice.protocol.messages import ConfigError
from sluice.protocol.reading import read_json, shown

WAY_OUT = "model.path must be a folder with config.json, tokenizer.json and *.safetensors"


def eos_token_ids(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """Every id that one of the checkpoint's files calls the end of a text. Raises ConfigError.

    Ids stand in generation_config.json and config.json; the token itself in tokenizer_config.json,
    and its id, if it is an added one, in tokenizer.json.
    """
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = _read(folder / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(token_id) is not int or not 0 <= token_id < vocab_size for token_id in ids):
            raise ConfigError(
                f"{folder / name}: eos_token_id is {shown(value)}, expected a token id below "
                f"vocab_size ({vocab_size}) or a list of them"
            )
        found += ids
    token = _read(folder / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    added = _read(folder / "tokenizer.json").get("added_tokens")
    for entry in added if isinstance(added, list) else []:
        if isinstance(entry, dict) and text is not None and entry.get("content") == text:
            found += [entry["id"]] if type(entry.get("id")) is int else []
    return tuple(dict.fromkeys(found))


def _read(path: Path) -> dict[str, Any]:
    return read_json(path, way_out=WAY_OUT) if path.exists() else {}
