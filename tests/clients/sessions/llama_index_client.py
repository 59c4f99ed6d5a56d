"""LlamaIndex's model for servers that are like OpenAI's."""

import openai
from common import API, KEY, MODEL, NO_THINKING, QUESTION, TOO_LONG, TURNS, City, Days, Person, tell
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def model(max_tokens: int = 8) -> OpenAILike:
    return OpenAILike(
        model=MODEL,
        api_base=API,
        api_key=KEY,
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        context_window=8192,
        max_tokens=max_tokens,
        max_retries=0,
        additional_kwargs=NO_THINKING,
    )


def question() -> list[ChatMessage]:
    return [ChatMessage(role="user", content=QUESTION)]


def chat() -> None:
    assert model().chat(question()).message.content
    assert model().complete(QUESTION).text


def stream() -> None:
    assert "".join(chunk.delta or "" for chunk in model().stream_chat(question()))


def weather(days: Days, city: City | None) -> str:
    """The weather of a city."""
    return "sunny"


def tools() -> None:
    messages, llm = question(), model(600)
    tool = FunctionTool.from_defaults(fn=weather)
    for _ in range(TURNS):
        answer = llm.chat_with_tools([tool], chat_history=messages, tool_required=True)
        messages.append(answer.message)
        calls = llm.get_tool_calls_from_response(answer)
        assert calls and all("days" in call.tool_kwargs for call in calls)
        messages += [
            ChatMessage(
                role="tool", content="sunny", additional_kwargs={"tool_call_id": call.tool_id}
            )
            for call in calls
        ]
    assert model().chat(messages)


def json_answer() -> None:
    made = model(400).as_structured_llm(Person).chat(question())
    assert isinstance(made.raw, Person)


def error() -> None:
    try:
        model().chat([ChatMessage(role="user", content=TOO_LONG)])
    except openai.BadRequestError as told:
        assert "maximum context length" in str(told)
    else:
        raise AssertionError("a prompt that is too long was taken")


tell({"chat": chat, "stream": stream, "tools": tools, "json": json_answer, "error": error})
