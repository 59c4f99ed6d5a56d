"""Detokenizer: token ids to text while they come, never half a character.

The pieces joined are exactly what the tokenizer decodes from all ids at once. Special tokens have
no text, but for those that are to be shown. The decoder runs over a short window of ids only:

    ... | group | newest ids |        group: the ids up to the last point where text was complete
        ^ window starts here          (kept as context: some decoders trim the very first token)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
MAX_PENDING = 3  # bytes of an unfinished UTF-8 character, each of which may show as a replacement


class Detokenizer:
    """One request's output as text. Not shared between requests. shown: texts of special tokens."""

    def __init__(
        self, tokenizer: Tokenizer, shown: Mapping[int, str] = MappingProxyType({})
    ) -> None:
        self._tokenizer = tokenizer
        self._shown = shown
        self._window: list[int] = []
        self._group_start = 0  # index in the window of the ids after the last complete point
        self._num_sent = 0  # characters of the window's text handed out

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now that these follow."""
        if self._shown.keys().isdisjoint(token_ids):
            return self._push(token_ids)
        return "".join(
            self._push([token_id]) if token_id not in self._shown else self._show(token_id)
            for token_id in token_ids
        )

    def _show(self, token_id: int) -> str:
        """A special token's text. What comes after it is decoded as if nothing had come before."""
        text = self.flush() + self._shown[token_id]
        self._window, self._group_start, self._num_sent = [], 0, 0
        return text

    def _push(self, token_ids: Sequence[int]) -> str:
        self._window.extend(token_ids)
        text = self._decode(self._window)
        end = len(text) - _num_pending(text)
        piece = text[self._num_sent : end]
        self._num_sent = max(self._num_sent, end)
        if end == len(text):
            self._start_group()
        return piece

    def flush(self) -> str:
        """What was held back, as it stands, at the end of the output."""
        text = self._decode(self._window)
        piece = text[self._num_sent :]
        self._num_sent = len(text)
        return piece

    def _start_group(self) -> None:
        """Drop ids before the group that just ended; it stays as context for the next one."""
        group = self._window[self._group_start :]
        if context := self._decode(group):  # special tokens alone give no context
            self._window = group
            self._num_sent = len(context)
            self._group_start = len(group)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


def _num_pending(text: str) -> int:
    """How many characters at the end may yet turn into another one."""
    tail = text[-MAX_PENDING:]
    return len(tail) - len(tail.rstrip(REPLACEMENT))
