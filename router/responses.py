"""What clients receive: OpenAI's chat and text completion objects."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from sluice.router.text import Delta


@dataclass
class Answer:
    """Builds every object of one answer, streamed or whole."""

    kind: Literal["chat", "text"]
    request_id: str
    model: str
    num_prompt_tokens: int
    created: int = field(default_factory=lambda: int(time.time()))
    _last: Delta | None = field(default=None, init=False)

    def whole(self, deltas: Iterable[Delta]) -> dict[str, Any]:
        """The answer in one object."""
        text = ""
        for delta in deltas:
            text += delta.text
            self._last = delta
        content: dict[str, Any] = {"text": text}
        if self.kind == "chat":
            content = {"message": {"role": "assistant", "content": text}}
        name = "chat.completion" if self.kind == "chat" else "text_completion"
        return self._object(name, [self._choice(content, self._last)], usage=self.usage())

    def first(self, *, with_usage: bool) -> dict[str, Any] | None:
        """The chunk that opens a chat stream; a text stream has none."""
        if self.kind == "text":
            return None
        return self._chunk({"delta": {"role": "assistant", "content": ""}}, None, with_usage)

    def chunks(self, delta: Delta, *, with_usage: bool) -> list[dict[str, Any]]:
        """The chunks for one delta: none while its text is held back."""
        self._last = delta
        chunks = []
        if delta.text:
            chunks.append(self._chunk(self._piece(delta.text), None, with_usage))
        if delta.finish_reason is not None:
            chunks.append(self._chunk(self._piece(""), delta, with_usage))
        return chunks

    def usage_chunk(self) -> dict[str, Any]:
        """The chunk that ends a stream with `include_usage`."""
        return self._object(self._chunk_name(), [], usage=self.usage())

    def usage(self) -> dict[str, Any]:
        num_output_tokens = self._last.num_tokens if self._last else 0
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": self.num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": {
                "cached_tokens": self._last.num_cached_tokens if self._last else 0
            },
        }

    def _piece(self, text: str) -> dict[str, Any]:
        if self.kind == "text":
            return {"text": text}
        return {"delta": {"content": text} if text else {}}

    def _chunk_name(self) -> str:
        return "chat.completion.chunk" if self.kind == "chat" else "text_completion"

    def _chunk(
        self, content: dict[str, Any], last: Delta | None, with_usage: bool
    ) -> dict[str, Any]:
        chunk = self._object(self._chunk_name(), [self._choice(content, last)])
        if with_usage:
            chunk["usage"] = None
        return chunk

    @staticmethod
    def _choice(content: dict[str, Any], last: Delta | None) -> dict[str, Any]:
        reason = None if last is None or last.finish_reason is None else last.finish_reason.value
        return {"index": 0, **content, "logprobs": None, "finish_reason": reason}

    def _object(
        self, name: str, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        prefix = "chatcmpl" if self.kind == "chat" else "cmpl"
        answer: dict[str, Any] = {
            "id": f"{prefix}-{self.request_id}",
            "object": name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if usage is not None:
            answer["usage"] = usage
        return answer
