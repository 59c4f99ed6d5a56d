"""The OpenAI Agents SDK, over chat completions and over the Responses API."""

from __future__ import annotations

import asyncio

import agents
import openai
from common import API, KEY, MODEL, QUESTION, TOO_LONG, TURNS, City, Days, Person, tell
from openai.types.shared import Reasoning

agents.set_tracing_disabled(True)
MODELS = (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel)
ENDS = {"stop": [" ", "e", "a", "o"]}  # an answer that is cut off is an error to the SDK


def agent(kind: type, **fields) -> agents.Agent:
    client = openai.AsyncOpenAI(base_url=API, api_key=KEY, max_retries=0)
    settings = agents.ModelSettings(
        max_tokens=600,
        reasoning=Reasoning(effort="none"),
        tool_choice=fields.pop("tool_choice", None),
        extra_body=fields.pop("extra_body", None),
    )
    model = kind(model=MODEL, openai_client=client)
    return agents.Agent(
        name="a", instructions="Be kind.", model=model, model_settings=settings, **fields
    )


def run(agent: agents.Agent, text: str = QUESTION, **options) -> object:
    return asyncio.run(agents.Runner.run(agent, text, **options)).final_output


def chat() -> None:
    for kind in MODELS:
        assert isinstance(run(agent(kind, extra_body=ENDS)), str)


def stream() -> None:
    async def events(kind: type) -> int:
        streamed = agents.Runner.run_streamed(agent(kind, extra_body=ENDS), QUESTION)
        return len([event async for event in streamed.stream_events()])

    for kind in MODELS:
        assert asyncio.run(events(kind))


def tools() -> None:
    asked = []

    @agents.function_tool
    def weather(days: Days, city: City | None) -> str:
        """The weather of a city."""
        asked.append(days)
        return "sunny"

    for kind in MODELS:
        asked.clear()
        worker = agent(kind, tools=[weather], tool_choice="required", reset_tool_choice=False)
        try:
            run(worker, max_turns=TURNS)
        except agents.MaxTurnsExceeded:  # it is made to call for ever
            assert len(asked) >= TURNS - 1
        else:
            raise AssertionError("it stopped calling")


def json_answer() -> None:
    for kind in MODELS:
        assert isinstance(run(agent(kind, output_type=Person)), Person)


def error() -> None:
    for kind in MODELS:
        try:
            run(agent(kind), TOO_LONG)
        except openai.BadRequestError as told:
            assert "maximum context length" in str(told)
        else:
            raise AssertionError("a prompt that is too long was taken")


tell({"chat": chat, "stream": stream, "tools": tools, "json": json_answer, "error": error})
