"""A request of Anthropic's Messages API as the chat request that asks for the same."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from sluice.protocol.messages import InvalidRequest
from sluice.router.reading.parsing import SHORT, check, check_part
from sluice.router.reading.requests import Body, Translated
from sluice.router.reading.schemas import List, Replayed, Schema

NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
UNSUPPORTED = {
    "mcp_servers": "let the client call its servers, and give their tools as `tools`",
    "container": "leave it out: no code runs here",
    "context_management": "leave it out, and shorten `messages` where they become too long",
}
# Chat's fields by the same name, those of the API and those that other servers have too.
SHARED = (
    *("model", "temperature", "top_p", "top_k", "stream", "metadata", "service_tier"),
    *("seed", "min_p", "min_tokens", "stop_token_ids", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "ignore_eos", "cache_salt", "priority"),
    "chat_template_kwargs",
)


class TextBlock(Replayed):
    """cache_control, as of other blocks, changes nothing: what can be reused is found anyway."""

    type: Literal["text"] = "text"
    text: str


Texts = Annotated[list[TextBlock], BeforeValidator(lambda value: _blocks(value or []))]


class ToolUse(Replayed):
    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: dict[str, Any]


class ToolResult(Replayed):
    """is_error is for the client: what the model is to know of it stands in the content."""

    tool_use_id: str = Field(min_length=1)
    content: Texts = Field([])


class Thought(Replayed):
    """Its signature is for servers that keep their reasoning secret."""

    thinking: str


class Message(Replayed):
    role: Literal["user", "assistant"]
    content: Annotated[list[dict[str, Any]], BeforeValidator(lambda value: _blocks(value))]


class Tool(Replayed):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(Schema):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Schema):
    """budget_tokens, display: taken and without effect; max_tokens ends thinking as it ends all."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, gt=0)
    display: str | None = None


class OutputFormat(Schema):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Schema):
    format: OutputFormat | None = None
    effort: str | None = None


class CountRequest(Schema):
    """What decides about the prompt, and may be sent to be counted."""

    model: Any
    messages: List[dict[str, Any]] = Field(min_length=1)
    system: Texts = Field([])
    tools: List[Tool] = Field([])
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    output_format: OutputFormat | None = None
    stop_sequences: Any = None
    cache_control: Any = None  # see TextBlock


class MessagesRequest(CountRequest):
    """The fields of the API itself; those of SHARED are chat's."""

    max_tokens: int = Field(gt=0)


def translate(body: Body) -> Translated:
    """Raises InvalidRequest naming the field as this API calls it."""
    return _translated(body, MessagesRequest)


def translate_count(body: Body) -> Translated:
    """The same for a request whose prompt is only counted."""
    return _translated({k: v for k, v in body.items() if k != "max_tokens"}, CountRequest)


def _translated(body: Body, schema: type[CountRequest]) -> Translated:
    for name, way_out in UNSUPPORTED.items():
        if body.get(name):
            raise InvalidRequest(
                f"{name}: {SHORT.repr(body[name])} is not supported; {way_out}", param=name
            )
    shared = {name: body[name] for name in SHARED if body.get(name) is not None}
    own = {k: v for k, v in body.items() if k not in UNSUPPORTED and k not in SHARED[1:]}
    asked = check(schema, own)
    messages, places = _messages(asked)
    chat: Body = {
        **shared,
        "messages": messages,
        "max_tokens": getattr(asked, "max_tokens", None),
        "stop": asked.stop_sequences,
        "tools": [_tool(tool) for tool in asked.tools],
        "thinking": _thinking(asked),
        "reasoning_effort": asked.output_config.effort,
        **_tool_choice(asked.tool_choice),
    }
    if (wanted := asked.output_config.format or asked.output_format) is not None:
        named = {"name": "output", "schema": wanted.schema_}
        chat["response_format"] = {"type": "json_schema", "json_schema": named}
    return Translated(chat, {}, NAMES, places)


def _blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _messages(asked: CountRequest) -> tuple[list[Body], list[str]]:
    """The conversation, and the place of each message in the request."""
    messages: list[Body] = []
    places: list[str] = []
    if asked.system:
        text = "\n".join(block.text for block in asked.system)
        messages.append({"role": "system", "content": text})
        places.append("system")
    for index, given in enumerate(asked.messages):
        place = f"messages.{index}"
        message = check_part(Message, given, place)
        read = _answer if message.role == "assistant" else _questions
        said = read(message.content, f"{place}.content")
        messages += said
        places += [place] * len(said)
    if (last := messages[-1])["role"] == "assistant" and "tool_calls" not in last:
        last["prefix"] = True  # the answer begins with it
        if asked.thinking is not None and asked.thinking.type == "enabled":
            raise InvalidRequest(
                "thinking: the last message begins the answer, before which no thinking fits; "
                "end with a user's message, or leave `thinking` out",
                param="thinking",
            )
    return messages, places


def _questions(blocks: list[Body], place: str) -> list[Body]:
    """A user's turn: results of tools and texts, in their order."""
    messages: list[Body] = []
    for index, block in enumerate(blocks):
        here = f"{place}.{index}"
        if block.get("type") == "tool_result":
            result = check_part(ToolResult, block, here)
            text = "\n".join(part.text for part in result.content)
            messages.append({"role": "tool", "tool_call_id": result.tool_use_id, "content": text})
            continue
        text = _text(block, here, "'text' or 'tool_result'")
        if messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += f"\n{text}"
        else:
            messages.append({"role": "user", "content": text})
    if not messages:
        raise InvalidRequest(f"{place}: it is empty, expected a text or blocks", place)
    return messages


def _answer(blocks: list[Body], place: str) -> list[Body]:
    """An assistant's turn is one message."""
    message: Body = {"role": "assistant"}
    for index, block in enumerate(blocks):
        here, kind = f"{place}.{index}", block.get("type")
        if kind == "redacted_thinking":
            continue
        if kind == "thinking":
            thought = check_part(Thought, block, here).thinking
            message["reasoning_content"] = message.get("reasoning_content", "") + thought
        elif kind == "tool_use":
            use = check_part(ToolUse, block, here)
            function = {"name": use.name, "arguments": json.dumps(use.input, ensure_ascii=False)}
            calls = message.setdefault("tool_calls", [])
            calls.append({"id": use.id, "type": "function", "function": function})
        else:
            text = _text(block, here, "'text', 'thinking' or 'tool_use'")
            message["content"] = message.get("content", "") + text
    return [message]


def _text(block: Body, place: str, expected: str) -> str:
    if block.get("type") != "text":
        raise InvalidRequest(
            f"{place}.type: {SHORT.repr(block.get('type'))} is not supported here, expected "
            f"{expected}",
            param=f"{place}.type",
        )
    return check_part(TextBlock, block, place).text


def _tool(tool: Tool) -> Body:
    function = tool.model_dump(include={"name", "description", "strict"}, exclude_none=True)
    return {"type": "function", "function": {**function, "parameters": tool.input_schema}}


def _tool_choice(choice: ToolChoice | None) -> Body:
    if choice is None:
        return {}
    modes: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none"}
    if (choice.type == "tool") != (choice.name is not None):
        raise InvalidRequest(
            "tool_choice.name: expected with type 'tool', and with no other",
            param="tool_choice.name",
        )
    named = {"type": "function", "function": {"name": choice.name}}
    parallel = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    return {"tool_choice": modes.get(choice.type, named), **parallel}


def _thinking(asked: CountRequest) -> Body | None:
    """Thinking is for those who ask for it; `adaptive` and an effort leave it to the model."""
    if asked.thinking is not None:
        kind = asked.thinking.type
        return None if kind == "adaptive" else {"type": kind}
    return None if asked.output_config.effort is not None else {"type": "disabled"}
