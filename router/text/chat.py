"""Chat: messages and prompts to token ids. Behind this file there is no text.

A conversation becomes one text in the checkpoint's own format, and that text is encoded as a
whole, as the reference implementations do: a control token written out in a message is that
control token.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import replace

from sluice.protocol.messages import InvalidRequest
from sluice.router.common.errors import too_long
from sluice.router.text.answers.conversation import (
    ChatFormat,
    ChatOptions,
    Landmarks,
    Message,
    OutputParser,
)
from sluice.router.text.checkpoint import Checkpoint
from sluice.router.text.families.template import TemplateFormat
from sluice.router.text.families.tool_formats import MARKERS
from sluice.router.text.text_length import max_characters
from sluice.router.text.v4.encoding import V4Format
from sluice.router.text.v4.template_arguments import without_template_arguments
from sluice.router.text.v4.words import CONTROL_TOKENS, END_THINK

PLAIN = ChatOptions()
LONG_TEXT_CHARACTERS = 1 << 14
PROMPT_END_TOKENS = 16  # "<think>" and a line break or two, however they are cut


class ChatEncoder:
    """Encodes for one checkpoint. Safe to call from several threads. Raises ConfigError."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._tokenizer = checkpoint.tokenizer
        self._format = _format_of(checkpoint)
        self._max_characters = max_characters(checkpoint.tokenizer, checkpoint.max_model_len)

    @property
    def has_template(self) -> bool:
        """Whether conversations are rendered by code that comes with the checkpoint."""
        return isinstance(self._format, TemplateFormat) and self._format.has_template

    def try_template(self) -> None:
        """See TemplateFormat.try_out. Raises ConfigError."""
        if isinstance(self._format, TemplateFormat) and self._format.has_template:
            self._format.try_out()

    def encode_chat(
        self, messages: Sequence[Message], options: ChatOptions = PLAIN
    ) -> tuple[int, ...]:
        """Raises InvalidRequest for what the checkpoint's format cannot express."""
        text = self.render(messages, options)
        return tuple(self._encode(text, "messages", add_special_tokens=False))

    def encode_prompt(self, prompt: str | list[int]) -> tuple[int, ...]:
        """A prompt of either kind.

        Raises InvalidRequest for one of more tokens than can be, or of tokens that there are not.
        """
        if isinstance(prompt, str):
            return self.encode_text(prompt)
        if len(prompt) >= (max_model_len := self._checkpoint.max_model_len):
            raise _too_long("prompt", f"{len(prompt)} tokens", max_model_len)
        self._check_ids(prompt, "prompt")
        return tuple(prompt)

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Encode a plain prompt, with the special tokens this tokenizer puts around a text."""
        token_ids = self._encode(text, "prompt", add_special_tokens=add_special_tokens)
        if add_special_tokens and self._checkpoint.add_bos_token:
            token_ids = self._with_bos(token_ids)
        return tuple(token_ids)

    def _encode(self, text: str, field: str, *, add_special_tokens: bool) -> list[int]:
        """Raises InvalidRequest, at once, for a text that cannot be few enough tokens."""
        if self._max_characters is not None and len(text) > self._max_characters:
            raise _too_long(field, f"{len(text)} characters", self._checkpoint.max_model_len)
        if len(text) < LONG_TEXT_CHARACTERS:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        # This leaves out the places of the tokens, a third of time and memory.
        [encoding] = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        return encoding.ids

    def decode_checked(self, token_ids: Sequence[int]) -> str:
        """Raises InvalidRequest for a token that the model does not have."""
        self._check_ids(token_ids, "tokens")
        return self.decode(token_ids)

    def _check_ids(self, token_ids: Sequence[int], field: str) -> None:
        size = self._checkpoint.vocab_size
        for index, token_id in enumerate(token_ids):
            if not 0 <= token_id < size:
                raise InvalidRequest(
                    f"{field}.{index}: token id {reprlib.repr(token_id)}, expected 0 to {size - 1}",
                    field,
                )

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the tokens, special ones written out."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def render(self, messages: Sequence[Message], options: ChatOptions = PLAIN) -> str:
        """The text of a conversation as the model was trained on it."""
        return self._format.render(messages, self._understood(options))

    def parser(self, messages: Sequence[Message], options: ChatOptions) -> OutputParser:
        """A parser for one answer to the conversation."""
        return self._format.parser(messages, self._understood(options))

    def landmarks(self, messages: Sequence[Message], options: ChatOptions) -> Landmarks:
        """What tells the parts of an answer from one another, before they are parsed."""
        return self._format.landmarks(messages, self._understood(options))

    def grammar(self, messages: Sequence[Message], options: ChatOptions) -> str:
        """What the answer must follow where the JSON schema alone does not say it; "" otherwise."""
        return self._format.grammar(messages, self._understood(options))

    def with_prompt_end(self, options: ChatOptions, prompt: Sequence[int]) -> ChatOptions:
        """For parsing an answer to the prompt: a template may have begun it."""
        return replace(options, prompt_end=self.decode(prompt[-PROMPT_END_TOKENS:]))

    def _understood(self, options: ChatOptions) -> ChatOptions:
        """A format without a template has no variables, but its switches have names there too."""
        if isinstance(self._format, TemplateFormat) or not options.template_arguments:
            return options
        return without_template_arguments(options)

    def _with_bos(self, token_ids: list[int]) -> list[int]:
        bos = self._checkpoint.bos_token
        bos_id = None if bos is None else self._tokenizer.token_to_id(bos)
        if bos_id is None or token_ids[:1] == [bos_id]:
            return token_ids
        return [bos_id, *token_ids]


def _too_long(field: str, length: str, max_model_len: int) -> InvalidRequest:
    return too_long(
        f"{field}: {length}, which cannot be fewer than {max_model_len} tokens",
        max_context_tokens=max_model_len,
        param=field,
    )


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
        tool_format=checkpoint.tool_format,
        markers={
            token.content: (token_id, token.special)
            for token_id, token in checkpoint.tokenizer.get_added_tokens_decoder().items()
            if token.content in MARKERS
        },
    )


def _speaks_v4(checkpoint: Checkpoint) -> bool:
    """Whether it is a DeepSeek-V4 whose tokenizer has the format's control tokens."""
    return checkpoint.model_type == "deepseek_v4" and all(
        checkpoint.tokenizer.token_to_id(token) is not None for token in CONTROL_TOKENS
    )
