"""Transcript: what an OpenAI answer says, read back from its JSON, streamed or whole.

Two answers to one request are compared by it. How the text was cut into events makes no
difference; what was thought, said and called does, and so does how it ended.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

DONE = b"[DONE]"


@dataclass(frozen=True)
class Said:
    """One choice of an answer."""

    text: str
    finish_reason: str


@dataclass(frozen=True)
class Difference:
    """Where two answers part: the choice, and the first character that is not the same."""

    choice: int
    character: int


def split_events(received: bytes) -> tuple[list[bytes], bytes]:
    """The data of each complete server-sent event, and the beginning of the next one."""
    *events, rest = received.split(b"\n\n")
    return [event.removeprefix(b"data:").strip() for event in events], rest


def transcript_of_body(body: bytes) -> tuple[Said, ...] | None:
    """What an answer's body says; None if it is not a whole answer."""
    try:
        if not body.startswith(b"data:"):
            return transcript([json.loads(body)])
        events, _ = split_events(body)
        if events[-1:] != [DONE]:
            return None
        return transcript([json.loads(event) for event in events[:-1]])
    except ValueError:
        return None


def transcript(events: Iterable[Any]) -> tuple[Said, ...] | None:
    """The choices that the events of one answer make up; None if one did not come to its end."""
    choices: dict[int, _Choice] = defaultdict(_Choice)
    try:
        for event in events:
            for choice in event["choices"]:
                choices[choice["index"]].add(choice)
    except (KeyError, TypeError, AttributeError):
        return None  # an error event, or nothing of OpenAI's shape
    whole = [choices[index].said() for index in sorted(choices)]
    ended = tuple(said for said in whole if said is not None)
    return ended if ended and len(ended) == len(whole) else None


def first_difference(ours: tuple[Said, ...], theirs: tuple[Said, ...]) -> Difference | None:
    """None if they say the same; a different end counts as the character after the last."""
    for index, (our, their) in enumerate(zip(ours, theirs, strict=False)):
        if our != their:
            pairs = enumerate(zip(our.text, their.text, strict=False))
            shorter = min(len(our.text), len(their.text))
            return Difference(index, next((i for i, (a, b) in pairs if a != b), shorter))
    if len(ours) != len(theirs):
        return Difference(min(len(ours), len(theirs)), 0)
    return None


@dataclass
class _Choice:
    """Collects one choice: text, or a message, or the deltas of one."""

    thought: str = ""
    content: str = ""
    calls: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    finish_reason: str | None = None

    def add(self, choice: Mapping[str, Any]) -> None:
        said = choice.get("message") or choice.get("delta") or {}
        self.thought += said.get("reasoning_content") or ""
        self.content += choice.get("text") or said.get("content") or ""
        for place, call in enumerate(said.get("tool_calls") or ()):
            function = call["function"]
            called = (function.get("name") or "") + (function.get("arguments") or "")
            self.calls[call.get("index", place)] += called
        self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def said(self) -> Said | None:
        if self.finish_reason is None:
            return None
        calls = "".join(self.calls[index] for index in sorted(self.calls))
        return Said(self.thought + self.content + calls, self.finish_reason)
