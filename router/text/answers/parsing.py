"""StepParser: what parsers of outputs have in common, step by step through text as it comes."""

from __future__ import annotations

from collections.abc import Callable

from sluice.router.text.answers.conversation import CallPart, Part


class StepParser:
    """One answer. A step takes what it can off the buffer; whether another one can go on."""

    _step: Callable[[], bool]

    def __init__(self) -> None:
        self._buffer = ""
        self._parts: list[Part] = []
        self._num_calls = 0

    def push(self, text: str) -> list[Part]:
        self._buffer += text
        while self._buffer and self._step():
            pass
        return self._take()

    def _call(self, name: str, arguments: str = "") -> None:
        """A call begins; `_argue` goes on with it."""
        self._parts.append(Part(call=CallPart(self._num_calls, name, arguments)))
        self._num_calls += 1

    def _argue(self, text: str) -> None:
        self._parts += [Part(call=CallPart(self._num_calls - 1, None, text))] if text else []

    def _say(self, text: str) -> None:
        self._parts += [Part(content=text)] if text else []

    def _think(self, text: str) -> None:
        self._parts += [Part(reasoning=text)] if text else []

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts
