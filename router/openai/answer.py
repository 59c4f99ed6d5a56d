"""Answer: OpenAI's chat and text completion objects around the choices of one HTTP request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

from sluice.router.openai.choices import Choice, Entry
from sluice.router.openai.streaming import Event, OpenAIEnding
from sluice.router.output_text import Delta

Kind = Literal["chat", "text"]


class Answer(OpenAIEnding):
    """Builds every object of one answer, streamed or whole.

    choices: by index, `num_answers` for each prompt in turn. prompt_lengths: tokens of each prompt.
    with_usage: a stream ends with usage. continuous_usage: each chunk has what it is by then.
    """

    def __init__(
        self,
        kind: Kind,
        request_id: str,
        model: str,
        choices: Sequence[Choice],
        prompt_lengths: Sequence[int],
        *,
        with_usage: bool,
        continuous_usage: bool,
    ) -> None:
        self._kind = kind
        self._id = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{request_id}"
        self._model = model
        self._choices = tuple(choices)
        self._prompt_lengths = tuple(prompt_lengths)
        self._with_usage = with_usage
        self._continuous_usage = continuous_usage
        self._created = int(time.time())
        self._last: dict[int, Delta] = {}

    def whole(self, deltas: Sequence[Sequence[Delta]]) -> dict[str, Any]:
        """The answer in one object. deltas: those of each choice."""
        self._last = {index: of_choice[-1] for index, of_choice in enumerate(deltas)}
        entries = [
            choice.whole(of_choice) for choice, of_choice in zip(self._choices, deltas, strict=True)
        ]
        name = "chat.completion" if self._kind == "chat" else "text_completion"
        return self._object(name, entries) | {"usage": self.usage()}

    def events(self, index: int, delta: Delta) -> list[Event]:
        """The chunks for one choice's next delta; its first delta brings the opening too."""
        choice = self._choices[index]
        entries = [] if index in self._last else choice.opening(delta)
        self._last[index] = delta
        usage: dict[str, Any] = {"usage": None} if self._with_usage else {}
        if self._continuous_usage:
            usage = {"usage": self.usage()}
        return [
            Event(self._object(self._chunk_name, [entry]) | usage)
            for entry in (*entries, *choice.entries(delta))
        ]

    def end(self) -> list[Event]:
        """The chunk with the usage, where one is asked for."""
        if not self._with_usage:
            return []
        return [Event(self._object(self._chunk_name, []) | {"usage": self.usage()})]

    def usage(self) -> dict[str, Any]:
        """A prompt counts once however many answers it has, every answer's tokens count.

        Cached tokens are under OpenAI's name and under DeepSeek's.
        """
        num_prompt_tokens = sum(self._prompt_lengths)
        num_cached_tokens = self._num_cached_tokens()
        num_output_tokens = sum(delta.num_tokens for delta in self._last.values())
        num_reasoning_tokens = sum(delta.num_reasoning_tokens for delta in self._last.values())
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
            "prompt_cache_hit_tokens": num_cached_tokens,
            "prompt_cache_miss_tokens": num_prompt_tokens - num_cached_tokens,
            "completion_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        }

    def _num_cached_tokens(self) -> int:
        """Of each prompt what none of its answers had to compute."""
        cached: dict[int, int] = {}
        num_answers = len(self._choices) // len(self._prompt_lengths)
        for index, delta in self._last.items():
            prompt = index // num_answers
            known = cached.get(prompt, delta.num_cached_tokens)
            cached[prompt] = min(known, delta.num_cached_tokens)
        return sum(cached.values())

    @property
    def _chunk_name(self) -> str:
        return "chat.completion.chunk" if self._kind == "chat" else "text_completion"

    def _object(self, name: str, entries: list[Entry]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": name,
            "created": self._created,
            "model": self._model,
            "choices": entries,
        }
