"""What the sessions of all clients share: what is asked for, and how the outcome is told.

A session is a function that raises if something is not as its client's users expect. The model
says nothing that means anything, so sessions look at shapes, schemas and errors, never at sense.
"""

from __future__ import annotations

import enum
import json
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

URL, MODEL = sys.argv[1:3]
API = f"{URL}/v1"
KEY = "none"
QUESTION = "Say something."
NO_THINKING = {"reasoning_effort": "none"}
WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["days"],
        "additionalProperties": False,
    },
}
TURNS = 5
TOO_LONG = "word " * 30_000


class Mood(enum.Enum):
    CALM = "calm"
    WILD = "wild"


# Each has an end: a model that means nothing would go on for ever where a schema lets it.
Age = Literal[18, 40, 80]  # some clients take bounds out of schemas
Days = Annotated[int, Field(ge=1, le=9)]
City = Literal["Rome", "Oslo"]


class Person(BaseModel):
    """What pydantic makes of Optional and Enum is what servers stumble over."""

    model_config = ConfigDict(extra="forbid")  # as OpenAI's strict mode has it

    mood: Mood
    age: Age | None


def tell(sessions: dict[str, Callable[[], None]]) -> None:
    """Run them all, and print how each ended as one line of JSON."""
    outcomes = {}
    for name, session in sessions.items():
        try:
            session()
            outcomes[name] = "ok"
        except Exception as error:  # noqa: BLE001 - whatever a client raises is its outcome
            traceback.print_exc()
            outcomes[name] = f"{type(error).__name__}: {error}"[:300]
    print("OUTCOMES " + json.dumps(outcomes))
