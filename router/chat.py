"""Chat: messages and prompts to token ids. Behind this file there is no text.

The checkpoint's own template turns messages into one text, and that text is encoded as a whole, as
the reference implementation does: a control token written out in a message is that control token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sluice.engine.protocol import ConfigError, InvalidRequest
from sluice.router.checkpoint import Checkpoint

Message = dict[str, str]


class ChatEncoder:
    """Encodes for one checkpoint. Safe to call from several threads."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._tokenizer = checkpoint.tokenizer
        self._template = _compile(checkpoint.chat_template)

    def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> tuple[int, ...]:
        """Raises InvalidRequest if there is no template or the template rejects the messages."""
        text = self.render(messages, add_generation_prompt=add_generation_prompt)
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

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The text of a conversation as the model was trained on it."""
        if self._template is None:
            raise InvalidRequest(
                "messages: this checkpoint has no chat template; use /v1/completions, or put a "
                "chat_template into its tokenizer_config.json",
                param="messages",
            )
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                bos_token=self._checkpoint.bos_token or "",
                eos_token=self._checkpoint.eos_token or "",
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError) as error:
            raise InvalidRequest(
                f"messages: the chat template rejects them: {error}", param="messages"
            ) from error

    def _with_bos(self, token_ids: list[int]) -> list[int]:
        bos = self._checkpoint.bos_token
        bos_id = None if bos is None else self._tokenizer.token_to_id(bos)
        if bos_id is None or token_ids[:1] == [bos_id]:
            return token_ids
        return [bos_id, *token_ids]


def _compile(source: str | None) -> jinja2.Template | None:
    """The environment that chat templates are written for. Raises ConfigError."""
    if source is None:
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ConfigError(f"chat template of the checkpoint: {error}") from error


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
