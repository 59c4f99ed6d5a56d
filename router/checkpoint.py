"""What the router has to know of a checkpoint: facts from its JSON files, no weights, no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sluice.engine.config import ModelConfig
from sluice.engine.protocol import ConfigError
from sluice.router.encoding_v4 import Release

V0731_MARK = "REASONING_EFFORT_PROMPTS"  # in the encoder of the release of July 31


@dataclass(frozen=True)
class Checkpoint:
    """max_model_len: longest request in tokens, prompt and output together.

    v4_release: which of DeepSeek-V4's encoders the checkpoint brings along, or is said to need.
    """

    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    bos_token: str | None
    eos_token: str | None
    add_bos_token: bool
    chat_template: str | None
    model_type: str = ""
    v4_release: Release = Release.ORIGINAL


def read_checkpoint(model: ModelConfig) -> Checkpoint:
    """Read tokenizer and limits from the checkpoint folder. Raises ConfigError."""
    folder = model.path
    config = _read_json(folder / "config.json")
    generation = _read_json(folder / "generation_config.json", optional=True)
    tokenizer_config = _read_json(folder / "tokenizer_config.json", optional=True)
    tokenizer = _read_tokenizer(folder / "tokenizer.json")
    eos_token = _token_text(tokenizer_config.get("eos_token"))
    return Checkpoint(
        tokenizer=tokenizer,
        vocab_size=_positive(config, "vocab_size", folder),
        max_model_len=_max_model_len(model, _positive(config, "max_position_embeddings", folder)),
        eos_token_ids=_eos_token_ids(config, generation, tokenizer, eos_token),
        bos_token=_token_text(tokenizer_config.get("bos_token")),
        eos_token=eos_token,
        add_bos_token=bool(tokenizer_config.get("add_bos_token", False)),
        chat_template=_chat_template(folder, tokenizer_config),
        model_type=str(config.get("model_type", "")),
        v4_release=_v4_release(model),
    )


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"checkpoint file {path}: {error.strerror or error}; "
            "model.path must be a folder with config.json, tokenizer.json and *.safetensors"
        ) from error
    except ValueError as error:
        raise ConfigError(f"checkpoint file {path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"checkpoint file {path}: expected a JSON object")
    return content


def _read_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise ConfigError(
            f"checkpoint file {path}: no such file; model.path must be a folder with a "
            "tokenizer.json in the format of the `tokenizers` library"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for any fault of the file
        raise ConfigError(f"checkpoint file {path}: cannot be read: {error}") from error
    tokenizer.no_truncation()  # a cut prompt would be another prompt
    tokenizer.no_padding()
    return tokenizer


def _positive(config: dict[str, Any], key: str, folder: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ConfigError(
            f"checkpoint file {folder / 'config.json'}: {key} is {value!r}, "
            "expected a positive whole number"
        )
    return value


def _max_model_len(model: ModelConfig, limit: int) -> int:
    return min(model.max_model_len or limit, limit)


def _eos_token_ids(
    config: dict[str, Any],
    generation: dict[str, Any],
    tokenizer: Tokenizer,
    eos_token: str | None,
) -> tuple[int, ...]:
    """Every id that one of the files calls the end of a text."""
    found: list[int] = []
    for source in (generation, config):
        value = source.get("eos_token_id")
        found += value if isinstance(value, list) else [] if value is None else [value]
    if eos_token is not None and (token_id := tokenizer.token_to_id(eos_token)) is not None:
        found.append(token_id)
    return tuple(dict.fromkeys(found))


def _token_text(token: Any) -> str | None:
    """A special token is written as a string or as {"content": ...}."""
    return token.get("content") if isinstance(token, dict) else token


def _v4_release(model: ModelConfig) -> Release:
    """config.json does not tell them apart, the encoder's source beside the weights does."""
    if model.v4_release != "auto":
        return Release(model.v4_release)
    sources = sorted((model.path / "encoding").glob("encoding*.py"))
    is_0731 = any(V0731_MARK in path.read_text(encoding="utf-8") for path in sources)
    return Release.V0731 if is_0731 else Release.ORIGINAL


def _chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """From chat_template.jinja, or tokenizer_config.json: a string or a list of named ones."""
    if (path := folder / "chat_template.jinja").is_file():
        return path.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")
    return template
