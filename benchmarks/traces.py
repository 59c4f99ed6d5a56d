"""Request traces in Mooncake's format: prompts as lists of block ids, equal id = equal beginning.

One JSON object a line, with `timestamp` (ms), `input_length` (tokens) and `hash_ids`, one for each
block of 512 tokens. An id names the block *and* all blocks before it, so it has one place in a
prompt. The traces of the FAST'25 release are at https://github.com/kvcache-ai/Mooncake.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

BLOCK_TOKENS = 512


@dataclass(frozen=True)
class Prompt:
    """One request's prompt. The last block may be cut short. arrived_s: since the trace began."""

    num_tokens: int
    block_ids: tuple[int, ...]
    arrived_s: float = 0.0


@dataclass(frozen=True)
class Trace:
    """Prompts in order of arrival, in blocks of `block_tokens` tokens."""

    name: str
    prompts: tuple[Prompt, ...]
    block_tokens: int = BLOCK_TOKENS

    @property
    def num_blocks(self) -> int:
        return sum(len(prompt.block_ids) for prompt in self.prompts)

    @property
    def num_tokens(self) -> int:
        return sum(prompt.num_tokens for prompt in self.prompts)

    @property
    def num_distinct_tokens(self) -> int:
        """Tokens of all distinct blocks: what a cache would hold that forgets nothing."""
        tokens = {
            block: min(self.block_tokens, prompt.num_tokens - index * self.block_tokens)
            for prompt in self.prompts
            for index, block in enumerate(prompt.block_ids)
        }
        return sum(tokens.values())

    @property
    def ideal_hit_rate(self) -> float:
        """The part of all blocks that came before: nothing that caches prefixes finds more."""
        distinct = {block for prompt in self.prompts for block in prompt.block_ids}
        return 1 - len(distinct) / self.num_blocks

    def token_ids(self, prompt: Prompt) -> list[int]:
        """Tokens that are equal where block ids are, and occur nowhere else."""
        first = np.array(prompt.block_ids, dtype=np.int64)[:, None] * self.block_tokens
        tokens = first + np.arange(self.block_tokens)  # [num_blocks, block_tokens]
        return tokens.ravel()[: prompt.num_tokens].tolist()


def read_trace(path: Path, *, scale: int = 1, limit: int | None = None) -> Trace:
    """The first `limit` requests in order of time, lengths and blocks divided by `scale`.

    Raises ValueError for a scale that does not divide a block, or a line whose blocks do not
    cover its tokens.
    """
    if scale < 1 or BLOCK_TOKENS % scale:
        raise ValueError(f"scale is {scale}, expected a divisor of {BLOCK_TOKENS} (block tokens)")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    lines.sort(key=lambda line: line["timestamp"])
    block_tokens = BLOCK_TOKENS // scale
    prompts = [_prompt(line, scale) for line in lines[:limit]]
    return Trace(path.stem, tuple(prompts), block_tokens)


def _prompt(line: Mapping[str, Any], scale: int) -> Prompt:
    num_tokens, block_ids = line["input_length"], line["hash_ids"]
    if len(block_ids) != -(-num_tokens // BLOCK_TOKENS):
        raise ValueError(
            f"a request has {num_tokens} tokens and {len(block_ids)} hash_ids, expected one for "
            f"each {BLOCK_TOKENS} tokens; is this a trace in Mooncake's format?"
        )
    return Prompt(-(-num_tokens // scale), tuple(block_ids), line["timestamp"] / 1000)
