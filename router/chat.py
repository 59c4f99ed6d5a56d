"""Chat: messages and prompts to token ids. Behind this file there is no text.

A conversation becomes one text in the checkpoint's own format, and that text is encoded as a
whole, as the reference implementations do: a control token written out in a message is that
control token.
"""

from __future__ import annotations

from collections.abc import Sequence

from sluice.router.checkpoint import Checkpoint
from sluice.router.conversation import ChatFormat, ChatOptions, Message, OutputParser
from sluice.router.encoding_v4 import V4Format
from sluice.router.template import TemplateFormat
from sluice.router.v4_text import CONTROL_TOKENS, END_THINK

PLAIN = ChatOptions()


class ChatEncoder:
    """Encodes for one checkpoint. Safe to call from several threads. Raises ConfigError."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._tokenizer = checkpoint.tokenizer
        self._format = _format_of(checkpoint)

    def encode_chat(
        self, messages: Sequence[Message], options: ChatOptions = PLAIN
    ) -> tuple[int, ...]:
        """Raises InvalidRequest for what the checkpoint's format cannot express."""
        text = self.render(messages, options)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Encode a plain prompt, with the special tokens this tokenizer puts around a text."""
        token_ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self._checkpoint.add_bos_token:
            token_ids = self._with_bos(token_ids)
        return tuple(token_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the tokens, special ones written out."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def render(self, messages: Sequence[Message], options: ChatOptions = PLAIN) -> str:
        """The text of a conversation as the model was trained on it."""
        return self._format.render(messages, options)

    def parser(self, messages: Sequence[Message], options: ChatOptions) -> OutputParser:
        """A parser for one answer to the conversation."""
        return self._format.parser(messages, options)

    def end_of_reasoning(self, messages: Sequence[Message], options: ChatOptions) -> int | None:
        """The token that ends the reasoning with which the answer begins; None: it has none."""
        return self._format.end_of_reasoning(messages, options)

    def grammar(self, messages: Sequence[Message], options: ChatOptions) -> str:
        """What the answer must follow for its tool calls to be as asked; "" for any text."""
        return self._format.grammar(messages, options)

    def _with_bos(self, token_ids: list[int]) -> list[int]:
        bos = self._checkpoint.bos_token
        bos_id = None if bos is None else self._tokenizer.token_to_id(bos)
        if bos_id is None or token_ids[:1] == [bos_id]:
            return token_ids
        return [bos_id, *token_ids]


def _format_of(checkpoint: Checkpoint) -> ChatFormat:
    """The checkpoint's template; DeepSeek-V4's own format where it has none."""
    if checkpoint.chat_template is None and _speaks_v4(checkpoint):
        end_think_id = checkpoint.tokenizer.token_to_id(END_THINK)
        assert end_think_id is not None, "it is one of the control tokens"
        return V4Format(checkpoint.v4_release, end_think_id)
    return TemplateFormat(
        checkpoint.chat_template,
        bos_token=checkpoint.bos_token or "",
        eos_token=checkpoint.eos_token or "",
    )


def _speaks_v4(checkpoint: Checkpoint) -> bool:
    """Whether it is a DeepSeek-V4 whose tokenizer has the format's control tokens."""
    return checkpoint.model_type == "deepseek_v4" and all(
        checkpoint.tokenizer.token_to_id(token) is not None for token in CONTROL_TOKENS
    )
