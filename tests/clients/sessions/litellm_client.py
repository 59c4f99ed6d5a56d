"""LiteLLM, which many gateways are made of."""

from __future__ import annotations

import json

import litellm
from common import API, KEY, MODEL, QUESTION, TOO_LONG, TURNS, WEATHER, Person, tell

ASK = {
    "model": f"hosted_vllm/{MODEL}",
    "api_base": API,
    "api_key": KEY,
    "max_tokens": 8,
    "extra_body": {"thinking": {"type": "disabled"}},
    "num_retries": 0,
}
TOOLS = [{"type": "function", "function": WEATHER}]


def question() -> list:
    return [{"role": "user", "content": QUESTION}]


def chat() -> None:
    assert litellm.completion(messages=question(), **ASK).choices[0].message.content


def stream() -> None:
    chunks = litellm.completion(messages=question(), stream=True, **ASK)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def tools() -> None:
    messages = question()
    for _ in range(TURNS):
        answer = litellm.completion(
            messages=messages, tools=TOOLS, tool_choice="required", **{**ASK, "max_tokens": 400}
        )
        message = answer.choices[0].message
        messages.append(message.model_dump())
        for call in message.tool_calls:
            assert 1 <= json.loads(call.function.arguments)["days"] <= 9
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    assert litellm.completion(messages=messages, tools=TOOLS, **ASK).choices


def json_answer() -> None:
    answer = litellm.completion(
        messages=question(), response_format=Person, **{**ASK, "max_tokens": 400}
    )
    Person.model_validate_json(answer.choices[0].message.content)


def error() -> None:
    try:
        litellm.completion(messages=[{"role": "user", "content": TOO_LONG}], **ASK)
    except litellm.ContextWindowExceededError:
        pass
    else:
        raise AssertionError("a prompt that is too long was taken")


tell({"chat": chat, "stream": stream, "tools": tools, "json": json_answer, "error": error})
