"""The official Anthropic client."""

from __future__ import annotations

import anthropic
from common import KEY, MODEL, QUESTION, TOO_LONG, TURNS, URL, WEATHER, Person, tell

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
ASK = {"model": MODEL, "max_tokens": 8}
TOOLS = [
    {
        "name": WEATHER["name"],
        "description": WEATHER["description"],
        "input_schema": WEATHER["parameters"],
    }
]


def question() -> list:
    return [{"role": "user", "content": QUESTION}]


def chat() -> None:
    answer = client.messages.create(messages=question(), system="Be kind.", **ASK)
    assert answer.content[0].text and answer.stop_reason == "max_tokens"
    counted = client.messages.count_tokens(model=MODEL, messages=question(), system="Be kind.")
    used = answer.usage
    assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens


def stream() -> None:
    with client.messages.stream(messages=question(), **ASK) as events:
        text = "".join(events.text_stream)
        assert text and text == events.get_final_message().content[0].text


def tools() -> None:
    messages = question()
    for _ in range(TURNS):
        answer = client.messages.create(
            messages=messages,
            tools=TOOLS,
            tool_choice={"type": "any"},
            **{**ASK, "max_tokens": 400},
        )
        uses = [block for block in answer.content if block.type == "tool_use"]
        assert uses and all(1 <= use.input["days"] <= 9 for use in uses)
        results = [
            {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"} for use in uses
        ]
        messages += [
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": results},
        ]
    assert client.messages.create(messages=messages, tools=TOOLS, **ASK).content


def json_answer() -> None:
    answer = client.messages.parse(
        messages=question(), output_format=Person, **{**ASK, "max_tokens": 400}
    )
    assert isinstance(answer.parsed_output, Person)


def error() -> None:
    try:
        client.messages.create(messages=[{"role": "user", "content": TOO_LONG}], **ASK)
    except anthropic.BadRequestError as told:
        assert "maximum context length" in str(told)
    else:
        raise AssertionError("a prompt that is too long was taken")


tell({"chat": chat, "stream": stream, "tools": tools, "json": json_answer, "error": error})
