"""max_characters: which texts are too long for a model by their length alone."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel


def max_characters(tokenizer: Tokenizer, max_tokens: int) -> int | None:
    """The longest text that may be `max_tokens` tokens; None where its length says nothing.

    It says something where each token stands for the bytes it spells, and every byte is in some
    token: byte-level tokenizers that neither rewrite nor drop any text.
    """
    vocab = tokenizer.get_vocab()
    keeps_all = (
        _is_kind(tokenizer.normalizer, {"Sequence"})
        and _is_kind(tokenizer.pre_tokenizer, {"Sequence", "Split", "Digits", "ByteLevel"})
        and "ByteLevel" in _kinds(_state(tokenizer.pre_tokenizer))
        and all(character in vocab for character in ByteLevel.alphabet())
        and not any(t.lstrip or t.rstrip for t in tokenizer.get_added_tokens_decoder().values())
    )
    # A byte is one character of a token's spelling, and no text has more characters than bytes.
    return max_tokens * max(len(token) for token in vocab) if keeps_all else None


def _is_kind(part: Any, known: set[str]) -> bool:
    """Whether the part, if there is one, is made of parts of these types that remove nothing."""
    state = _state(part)
    return _kinds(state) <= known and "Removed" not in json.dumps(state)


def _state(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def _kinds(state: Any) -> set[str]:
    """The types of a part and of the parts in it."""
    if isinstance(state, list):
        return {kind for item in state for kind in _kinds(item)}
    if not isinstance(state, dict):
        return set()
    inner = {kind for item in state.values() for kind in _kinds(item)}
    return inner | {state["type"]} if "type" in state else inner
