"""Pydantic AI's agents."""

from __future__ import annotations

import asyncio

from common import API, KEY, MODEL, QUESTION, TOO_LONG, TURNS, City, Days, Person, tell
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.exceptions import ModelHTTPError, UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=API, api_key=KEY))


def settings(max_tokens: int = 8) -> dict:
    return {"max_tokens": max_tokens, "extra_body": {"thinking": {"type": "disabled"}}}


def chat() -> None:
    assert Agent(model, model_settings=settings()).run_sync(QUESTION).output


def stream() -> None:
    async def run() -> str:
        agent = Agent(model, model_settings=settings())
        async with agent.run_stream(QUESTION) as result:
            return "".join([piece async for piece in result.stream_text(delta=True)])

    assert asyncio.run(run())


def tools() -> None:
    agent = Agent(model, output_type=Person, model_settings=settings(600))
    asked = []

    @agent.tool_plain
    def weather(days: Days, city: City | None) -> str:
        """The weather of a city."""
        asked.append(days)
        return "sunny"

    for _ in range(TURNS):  # each a run of its own: which tool is called is the model's choice
        try:
            made = agent.run_sync(QUESTION, usage_limits=UsageLimits(request_limit=TURNS))
            assert isinstance(made.output, Person)
        except UsageLimitExceeded:
            assert asked


def json_answer() -> None:
    for output in (Person, NativeOutput(Person)):
        made = Agent(model, output_type=output, model_settings=settings(400)).run_sync(QUESTION)
        assert isinstance(made.output, Person)


def error() -> None:
    try:
        Agent(model, model_settings=settings()).run_sync(TOO_LONG)
    except ModelHTTPError as told:
        assert told.status_code == 400 and "maximum context length" in str(told)
    else:
        raise AssertionError("a prompt that is too long was taken")


tell({"chat": chat, "stream": stream, "tools": tools, "json": json_answer, "error": error})
