"""Instructor: objects of pydantic models, by tool calls and by JSON schemas."""

from __future__ import annotations

import instructor
import openai
from common import API, KEY, MODEL, NO_THINKING, QUESTION, TOO_LONG, Person, tell

plain = openai.OpenAI(base_url=API, api_key=KEY, max_retries=0)
ASK = {"model": MODEL, "max_tokens": 400, "max_retries": 0, **NO_THINKING}
MODES = (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA)


def question(text: str = QUESTION) -> list:
    return [{"role": "user", "content": text}]


def json_answer() -> None:
    for mode in MODES:
        client = instructor.from_openai(plain, mode=mode)
        made = client.chat.completions.create(
            messages=question(), response_model=Person, strict=False, **ASK
        )
        assert isinstance(made, Person)


def stream() -> None:
    client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    partial = list(
        client.chat.completions.create_partial(
            messages=question(), response_model=Person, strict=False, **ASK
        )
    )
    Person.model_validate(partial[-1].model_dump())


def error() -> None:
    client = instructor.from_openai(plain)
    try:
        client.chat.completions.create(
            messages=question(TOO_LONG), response_model=Person, strict=False, **ASK
        )
    except Exception as told:  # noqa: BLE001 - it wraps the client's own error
        assert "maximum context length" in str(told)
    else:
        raise AssertionError("a prompt that is too long was taken")


tell({"stream": stream, "json": json_answer, "error": error})
