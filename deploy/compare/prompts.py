"""Prompts to compare two deployments with: from a file, or passages of the shipped novel."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sluice.deploy.commands.prose import paragraphs
from sluice.protocol.messages import ConfigError

PASSAGE_TOKENS = (64, 128, 256, 512, 1024, 2048, 4000)
PASSAGES_EACH = 3


@dataclass(frozen=True)
class Prompt:
    """A text, or token ids, as the API takes them."""

    content: str | list[int]


def passages(tokenizer: Tokenizer, max_prompt_tokens: int) -> list[Prompt]:
    """Passages of PASSAGE_TOKENS tokens, as far as the model takes them.

    No two begin at the same place, so that none finds another's rows in the prefix cache.
    """
    token_ids = tokenizer.encode(" ".join(paragraphs()), add_special_tokens=False).ids
    lengths = [n for n in PASSAGE_TOKENS if n <= min(max_prompt_tokens, len(token_ids))]
    if not lengths:
        raise ConfigError(
            f"prompts can have {max_prompt_tokens} tokens here, expected {PASSAGE_TOKENS[0]} or "
            "more for the default ones; lower --max-tokens or give --prompts"
        )
    wanted = [length for length in lengths for _ in range(PASSAGES_EACH)]
    room = len(token_ids) - lengths[-1]
    starts = [number * room // len(wanted) for number in range(len(wanted))]
    pairs = zip(starts, wanted, strict=True)
    return [Prompt(token_ids[start : start + length]) for start, length in pairs]


def read_prompts(path: Path) -> list[Prompt]:
    """One prompt a line: plain text, or JSON with `prompt` or `prompt_token_ids`.

    Raises ConfigError naming the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path}: {error}; expected a UTF-8 file") from error
    prompts = [_prompt(line, f"--prompts {path}, line {n}") for n, line in _filled(lines)]
    if not prompts:
        raise ConfigError(f"--prompts {path}: no prompt in it, expected one a line")
    return prompts


def _filled(lines: Sequence[str]) -> list[tuple[int, str]]:
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _prompt(line: str, where: str) -> Prompt:
    if not line.lstrip().startswith("{"):
        return Prompt(line)
    try:
        data = json.loads(line)
    except ValueError as error:
        raise ConfigError(
            f'{where}: not valid JSON: {error}; a text that begins with {{ is written {{"prompt": '
            "...}"
        ) from error
    match data:
        case {"prompt": str(text)} if text and len(data) == 1:
            return Prompt(text)
        case {"prompt_token_ids": [*token_ids]} if _are_ids(token_ids) and len(data) == 1:
            return Prompt(token_ids)
    raise ConfigError(
        f"{where}: keys {', '.join(data)}, expected `prompt` with a text or `prompt_token_ids` "
        "with a list of token ids, and nothing else"
    )


def _are_ids(values: list[Any]) -> bool:
    return bool(values) and all(type(value) is int and value >= 0 for value in values)
