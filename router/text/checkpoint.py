"""What the router has to know of a checkpoint: facts from its JSON files, no weights, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sluice.protocol.config import ModelConfig
from sluice.protocol.messages import ConfigError
from sluice.protocol.reading import MAX_JSON_BYTES, read_json, read_text, shown
from sluice.protocol.special_tokens import eos_token_ids, is_text, token_text
from sluice.router.text.v4.encoding import Release

FILE = "checkpoint file"  # what errors call it
MAX_INTEGER = 1 << 31
V0731_MARK = "REASONING_EFFORT_PROMPTS"  # in the encoder of the release of July 31


@dataclass(frozen=True)
class Checkpoint:
    """max_model_len: longest request in tokens, prompt and output together.

    v4_release: which of DeepSeek-V4's encoders the checkpoint brings along, or is said to need.
    tool_format: as the config says it.
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
    tool_format: str = "auto"


def read_checkpoint(model: ModelConfig) -> Checkpoint:
    """Read tokenizer and limits from the checkpoint folder. Raises ConfigError."""
    folder = model.path
    config = _read_json(folder / "config.json")
    tokenizer_config = _read_json(folder / "tokenizer_config.json", optional=True)
    vocab_size = _positive(config, "vocab_size", folder)
    tokenizer = _read_tokenizer(folder / "tokenizer.json")
    return Checkpoint(
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        max_model_len=_max_model_len(model, _positive(config, "max_position_embeddings", folder)),
        eos_token_ids=eos_token_ids(folder, vocab_size, tokenizer),
        bos_token=token_text(tokenizer_config, "bos_token", folder),
        eos_token=token_text(tokenizer_config, "eos_token", folder),
        add_bos_token=bool(tokenizer_config.get("add_bos_token", False)),
        chat_template=_chat_template(folder, tokenizer_config),
        model_type=str(config.get("model_type", "")),
        v4_release=_v4_release(model),
        tool_format=model.tool_format,
    )


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    return read_json(path, FILE, "model.path must be a folder with config.json, tokenizer.json")


def _fault(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"{FILE} {path}: {problem}")


def _read_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise _fault(
            path,
            "no such file; model.path must be a folder with a tokenizer.json in the format of the "
            "`tokenizers` library",
        )
    text = read_text(path, FILE, max_bytes=MAX_JSON_BYTES)
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception for any fault of the file
        raise _fault(path, f"cannot be read: {error}") from error
    tokenizer.no_truncation()  # a cut prompt would be another prompt
    tokenizer.no_padding()
    return tokenizer


def _positive(config: dict[str, Any], key: str, folder: Path) -> int:
    value = config.get(key)
    if type(value) is not int or not 0 < value < MAX_INTEGER:
        raise _fault(
            folder / "config.json", f"{key} is {shown(value)}, expected a positive whole number"
        )
    return value


def _max_model_len(model: ModelConfig, limit: int) -> int:
    return min(model.max_model_len or limit, limit)


def _v4_release(model: ModelConfig) -> Release:
    """config.json does not tell them apart, the encoder's source beside the weights does."""
    if model.v4_release != "auto":
        return Release(model.v4_release)
    sources = sorted((model.path / "encoding").glob("encoding*.py"))
    is_0731 = any(V0731_MARK in read_text(path, FILE) for path in sources)
    return Release.V0731 if is_0731 else Release.ORIGINAL


def _chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """From chat_template.jinja, or tokenizer_config.json: a string or a list of named ones."""
    if (path := folder / "chat_template.jinja").is_file():
        return read_text(path, FILE)
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list) and all(map(_is_named, template)):
        template = {each["name"]: each["template"] for each in template}.get("default")
    if template is not None and not is_text(template):
        raise _fault(
            folder / "tokenizer_config.json",
            f"chat_template is {shown(template)}, expected text, or a list of objects with `name` "
            "and `template`",
        )
    return template


def _is_named(template: Any) -> bool:
    keys = ("name", "template")
    return isinstance(template, dict) and all(isinstance(template.get(key), str) for key in keys)
