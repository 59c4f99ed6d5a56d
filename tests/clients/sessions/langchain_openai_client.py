"""LangChain's OpenAI chat model."""

from __future__ import annotations

import openai
from common import API, KEY, MODEL, QUESTION, TOO_LONG, TURNS, WEATHER, Person, tell
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI


def model(max_tokens: int = 8) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL,
        base_url=API,
        api_key=KEY,
        max_tokens=max_tokens,
        temperature=0,
        max_retries=0,
        reasoning_effort="none",
    )


def chat() -> None:
    answer = model().invoke(QUESTION)
    assert answer.content and answer.usage_metadata["output_tokens"] == 8


def stream() -> None:
    assert "".join(chunk.content for chunk in model().stream(QUESTION))


def tools() -> None:
    messages: list = [HumanMessage(QUESTION)]
    bound = model(400).bind_tools([{"type": "function", "function": WEATHER}], tool_choice="any")
    for _ in range(TURNS):
        answer = bound.invoke(messages)
        messages.append(answer)
        assert answer.tool_calls
        for call in answer.tool_calls:
            assert 1 <= call["args"]["days"] <= 9
            messages.append(ToolMessage("sunny", tool_call_id=call["id"]))
    model().invoke(messages)


def json_answer() -> None:
    structured = model(400).with_structured_output(Person, method="json_schema")
    assert isinstance(structured.invoke(QUESTION), Person)
    forced = model(400).with_structured_output(Person, method="function_calling")
    assert isinstance(forced.invoke(QUESTION), Person)


def error() -> None:
    try:
        model().invoke(TOO_LONG)
    except openai.BadRequestError as told:
        assert "maximum context length" in str(told)
    else:
        raise AssertionError("a prompt that is too long was taken")


tell({"chat": chat, "stream": stream, "tools": tools, "json": json_answer, "error": error})
