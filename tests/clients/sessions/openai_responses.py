"""The official OpenAI client: the Responses API."""

from __future__ import annotations

import json

import openai
from common import API, KEY, MODEL, QUESTION, TOO_LONG, TURNS, WEATHER, Person, tell

client = openai.OpenAI(base_url=API, api_key=KEY, max_retries=0)
ASK = {"model": MODEL, "reasoning": {"effort": "none"}}
TOOLS = [{"type": "function", "strict": True, **WEATHER}]


def chat() -> None:
    answer = client.responses.create(input=QUESTION, temperature=0, max_output_tokens=8, **ASK)
    assert answer.output_text and answer.usage.output_tokens == 8
    assert answer.status == "incomplete"


def stream() -> None:
    with client.responses.stream(
        input=QUESTION, temperature=0, max_output_tokens=8, **ASK
    ) as events:
        told = list(events)
    text = "".join(e.delta for e in told if e.type == "response.output_text.delta")
    assert told[-1].type == "response.incomplete" and text == told[-1].response.output_text


def tools() -> None:
    items: list = [{"role": "user", "content": QUESTION}]
    for _ in range(TURNS):
        answer = client.responses.create(
            input=items, tools=TOOLS, tool_choice="required", max_output_tokens=400, **ASK
        )
        items += answer.output
        calls = [item for item in answer.output if item.type == "function_call"]
        for call in calls:
            assert 1 <= json.loads(call.arguments)["days"] <= 9
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
            items.append(result)
        assert calls
    assert client.responses.create(input=items, tools=TOOLS, max_output_tokens=8, **ASK).output


def json_answer() -> None:
    answer = client.responses.parse(
        input=QUESTION, text_format=Person, max_output_tokens=400, **ASK
    )
    assert isinstance(answer.output_parsed, Person)


def error() -> None:
    try:
        client.responses.create(input=TOO_LONG, **ASK)
    except openai.BadRequestError as told:
        assert told.code == "context_length_exceeded" and told.param == "input"
    else:
        raise AssertionError("a prompt that is too long was taken")


tell({"chat": chat, "stream": stream, "tools": tools, "json": json_answer, "error": error})
