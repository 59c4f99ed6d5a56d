"""The official OpenAI client: chat completions, completions, models."""

from __future__ import annotations

import json

import openai
from common import (
    API,
    KEY,
    MODEL,
    NO_THINKING,
    QUESTION,
    TOO_LONG,
    TURNS,
    WEATHER,
    Person,
    tell,
)

client = openai.OpenAI(base_url=API, api_key=KEY, max_retries=0)
ASK = {"model": MODEL, "max_tokens": 8, **NO_THINKING}
TOOLS = [{"type": "function", "function": WEATHER}]


def question() -> list:
    return [{"role": "user", "content": QUESTION}]


def chat() -> None:
    answer = client.chat.completions.create(messages=question(), temperature=0, **ASK)
    assert answer.choices[0].message.content and answer.usage.completion_tokens == 8
    text = client.completions.create(model=MODEL, prompt=QUESTION, max_tokens=8)
    assert text.choices[0].text
    assert [model.id for model in client.models.list()] == [MODEL]


def stream() -> None:
    usage = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            messages=question(), temperature=0, stream=True, stream_options=usage, **ASK
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert chunks[-1].usage.completion_tokens == 8


def tools() -> None:
    messages = question()
    for _ in range(TURNS):
        answer = client.chat.completions.create(
            messages=messages, tools=TOOLS, tool_choice="required", **{**ASK, "max_tokens": 400}
        )
        message = answer.choices[0].message
        messages.append(message)
        for call in message.tool_calls:
            assert 1 <= json.loads(call.function.arguments)["days"] <= 9
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    assert client.chat.completions.create(messages=messages, tools=TOOLS, **ASK).choices


def json_answer() -> None:
    answer = client.chat.completions.parse(
        messages=question(), response_format=Person, **{**ASK, "max_tokens": 400}
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def error() -> None:
    try:
        client.chat.completions.create(messages=[{"role": "user", "content": TOO_LONG}], **ASK)
    except openai.BadRequestError as told:
        assert told.code == "context_length_exceeded" and "maximum context length" in str(told)
    else:
        raise AssertionError("a prompt that is too long was taken")
    try:
        client.chat.completions.create(messages=question(), **{**ASK, "model": "other"})
    except openai.NotFoundError as told:
        assert "other" in str(told)


tell({"chat": chat, "stream": stream, "tools": tools, "json": json_answer, "error": error})
