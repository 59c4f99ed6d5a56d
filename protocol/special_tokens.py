"""Special tokens as a checkpoint's files name them: one reading for the router and for nodes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from tokenizers import Tokenizer

from sluice.protocol.messages import ConfigError
from sluice.protocol.reading import read_json, shown

CONFIG = "tokenizer_config.json"
WAY_OUT = "model.path must be a folder with config.json, tokenizer.json and *.safetensors"


def token_text(tokenizer_config: Mapping[str, Any], key: str, folder: Path) -> str | None:
    """The special token's text, which is written as such or as {"content": ...}.

    Raises ConfigError.
    """
    token = tokenizer_config.get(key)
    text = token.get("content") if isinstance(token, dict) else token
    if text is None or is_text(text):
        return text
    raise ConfigError(
        f"{folder / CONFIG}: {key} is {shown(token)}, expected text or an object with text as "
        "`content`"
    )


def is_text(value: Any) -> TypeGuard[str]:
    """Half a character, which JSON can spell, is none."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def eos_token_ids(folder: Path, vocab_size: int, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Every id that one of the checkpoint's files calls the end of a text. Raises ConfigError.

    Ids stand in generation_config.json and config.json, the token itself in tokenizer_config.json.
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
    text = token_text(_read(folder / CONFIG), "eos_token", folder)
    if tokenizer is not None and text is not None:
        token_id = tokenizer.token_to_id(text)
        found += [] if token_id is None else [token_id]
    return tuple(dict.fromkeys(found))


def readable_tokenizer(folder: Path) -> Tokenizer | None:
    """The checkpoint's tokenizer; None where there is none, or none that can be read.

    For nodes, which need none: it is the router that cannot start then, and says why.
    """
    path = folder / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path)) if path.is_file() else None
    except Exception:  # noqa: BLE001 - the library raises bare Exception for any fault of the file
        return None


def _read(path: Path) -> dict[str, Any]:
    return read_json(path, way_out=WAY_OUT) if path.exists() else {}
