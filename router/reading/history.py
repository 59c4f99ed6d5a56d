"""Messages as other servers wrote them, in the spelling of our own answers.

Clients send back what they were sent, by whichever server. What says the same in other words is
read here; notes that no prompt is made of are left for the schema to drop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OUT_OF_USE = ("function_call", "audio")  # they hold a part of the answer, so they cannot be dropped
MAY_BE_EMPTY = ("tool_calls", "tools", "content", "reasoning_content", "reasoning", "prefix")


def in_one_spelling(message: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ValueError for what says something that there is no other field for."""
    for field in OUT_OF_USE:
        if message.get(field) is not None:
            raise ValueError(f"{field}: not supported, leave it out")
    ours = {key: value for key, value in message.items() if not _says_nothing(key, value)}
    if ours.get("role") == "assistant":
        _read_answer(ours)
    elif message.get("content") == []:
        ours["content"] = []  # a question has to say something
    return ours


def _says_nothing(field: str, value: Any) -> bool:
    return value is None or (field in MAY_BE_EMPTY and (value == [] or value is False))


def _read_answer(message: dict[str, Any]) -> None:
    """An answer may be a refusal, or nothing at all where thinking took all the room."""
    if isinstance(thought := message.get("reasoning"), str):
        message.setdefault("reasoning_content", thought)
    if message.get("reasoning_content") == "":
        del message["reasoning_content"]
    if isinstance(refusal := message.get("refusal"), str):
        message.setdefault("content", refusal)
    if not message.get("tool_calls"):
        message.setdefault("content", "")
