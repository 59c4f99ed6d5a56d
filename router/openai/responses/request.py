"""A request of OpenAI's Responses API as the chat request that asks for the same.

Nothing is stored here, so a conversation comes whole: what earlier answers gave as `output` goes
back in as `input`. Reasoning, message and calls of one turn are one message of a chat.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field

from sluice.protocol.messages import InvalidRequest
from sluice.router.reading.fields import Arguments, Text
from sluice.router.reading.parsing import SHORT, check, check_part
from sluice.router.reading.requests import Body, Translated
from sluice.router.reading.schemas import MAX_MESSAGES, List, Replayed, Schema

MAX_REPEATED_CHARACTERS = (
    64 << 10
)  # of instructions, and of tools; an answer leaves out longer ones

NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "logprobs": "include",
}
LOGPROBS: Final = "message.output_text.logprobs"
STORED = "nothing is stored here: send the whole conversation as `input`"
UNSUPPORTED = {
    "previous_response_id": STORED,
    "conversation": STORED,
    "background": "leave it out, and stream the answer or wait for it",
    "prompt": "send the prompt itself as `instructions` and `input`",
    "context_management": "leave it out, and shorten `input` where it becomes too long",
}
# Chat's fields by the same name, those of OpenAI and those that other servers have too.
SHARED = (
    *("model", "temperature", "top_p", "stream", "parallel_tool_calls", "top_logprobs", "user"),
    *("metadata", "safety_identifier", "service_tier", "prompt_cache_key"),
    *("prompt_cache_retention", "seed", "stop", "stop_token_ids", "top_k", "min_p", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "ignore_eos"),
    *("cache_salt", "priority", "chat_template_kwargs"),
)


class TextFormat(Schema):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    def for_chat(self) -> Body:
        if self.type != "json_schema":
            return {"type": self.type}
        if self.schema_ is None:
            raise InvalidRequest(
                "text.format.schema: missing, it is required", "text.format.schema"
            )
        named = self.model_dump(include={"name", "description", "strict"}, exclude_none=True)
        return {"type": self.type, "json_schema": named | {"schema": self.schema_}}


class TextOptions(Schema):
    format: TextFormat = TextFormat()
    verbosity: str | None = None


class Reasoning(Schema):
    """summary: none is made, as the reasoning itself is in the answer."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class FunctionTool(Schema):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class StreamOptions(Schema):
    include_obfuscation: bool = False  # no padding is ever sent


def _text_or_items(value: Any) -> Any:
    if isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(item, dict) for item in value)
    ):
        return value
    raise ValueError("expected a text or a list of items, which are objects")


class ResponsesRequest(Schema):
    """The fields of the API itself; those of SHARED are chat's."""

    input: Annotated[Any, AfterValidator(_text_or_items)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None  # of built-in tools, which there are none of
    tools: List[FunctionTool] = Field([])
    tool_choice: Any = "auto"
    text: TextOptions = TextOptions()
    reasoning: Reasoning = Reasoning()
    include: List[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field(
        []
    )
    store: bool = False
    truncation: Literal["disabled"] = "disabled"
    stream_options: StreamOptions | None = None


class Said(Replayed):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text


class Called(Replayed):
    call_id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    arguments: Arguments


class Returned(Replayed):
    call_id: str = Field(min_length=1)
    output: Text


class ReasoningPart(Replayed):
    text: str


class Thought(Replayed):
    content: List[ReasoningPart] | None = None
    summary: List[ReasoningPart] | None = None

    @property
    def text(self) -> str:
        """Nothing where another server keeps its reasoning to itself."""
        return "\n".join(part.text for part in self.content or self.summary or ())


def translate(body: Body) -> Translated:
    """Raises InvalidRequest naming the field as this API calls it."""
    for name, way_out in UNSUPPORTED.items():
        if body.get(name) not in (None, False):
            raise InvalidRequest(
                f"{name}: {SHORT.repr(body[name])} is not supported; {way_out}",
                param=name,
                code="unsupported_parameter",
            )
    shared = {name: body[name] for name in SHARED if body.get(name) is not None}
    own = {k: v for k, v in body.items() if k not in UNSUPPORTED and k not in SHARED}
    asked = check(ResponsesRequest, own)
    messages, places = _messages(asked)
    chat: Body = {
        **shared,
        "messages": messages,
        "max_completion_tokens": asked.max_output_tokens,
        "tools": [_tool(tool) for tool in asked.tools],
        "tool_choice": _tool_choice(asked.tool_choice),
        "response_format": asked.text.format.for_chat(),
        "verbosity": asked.text.verbosity,
        "reasoning_effort": asked.reasoning.effort,
    }
    if shared.get("top_logprobs") or LOGPROBS in asked.include:
        chat["logprobs"] = True
    return Translated(chat, _repeated(asked, shared), NAMES, places)


def _messages(asked: ResponsesRequest) -> tuple[list[Body], list[str]]:
    """The conversation, and the place of each message in the request."""
    turns = _Turns()
    if asked.instructions is not None:
        turns.say({"role": "system", "content": asked.instructions}, "instructions")
    if isinstance(asked.input, str):
        turns.say({"role": "user", "content": asked.input}, "input")
    else:
        for index, item in enumerate(asked.input):
            turns.take(item, f"input.{index}")
    if not turns.messages:
        raise InvalidRequest("input: it is empty, expected a text or at least one item", "input")
    return turns.messages, turns.places


class _Turns:
    """Items to messages: an assistant's turn goes on until somebody else speaks."""

    def __init__(self) -> None:
        self.messages: list[Body] = []
        self.places: list[str] = []
        self._turn: Body | None = None  # the assistant's, as long as it lasts

    def say(self, message: Body, place: str) -> None:
        if len(self.messages) == MAX_MESSAGES:
            raise InvalidRequest(f"input: expected at most {MAX_MESSAGES} items", "input")
        self._turn = message if message["role"] == "assistant" else None
        self.messages.append(message)
        self.places.append(place)

    def take(self, item: Body, place: str) -> None:
        kind = item.get("type") or "message"
        if kind == "message":
            self._said(check_part(Said, item, place), place)
        elif kind == "function_call":
            call = check_part(Called, item, place)
            function = {"name": call.name, "arguments": call.arguments}
            calls = self._assistant(place).setdefault("tool_calls", [])
            calls.append({"id": call.call_id, "type": "function", "function": function})
        elif kind == "function_call_output":
            returned = check_part(Returned, item, place)
            message = {"role": "tool", "tool_call_id": returned.call_id}
            self.say({**message, "content": returned.output}, place)
        elif kind == "reasoning":
            self._thought(check_part(Thought, item, place).text, place)
        else:
            raise InvalidRequest(
                f"{place}.type: {SHORT.repr(kind)} is not supported, expected 'message', "
                "'function_call', 'function_call_output' or 'reasoning'",
                param=f"{place}.type",
            )

    def _said(self, said: Said, place: str) -> None:
        if said.role != "assistant":
            self.say({"role": said.role, "content": said.content}, place)
        elif (turn := self._turn) is None or "content" in turn or "tool_calls" in turn:
            self.say({"role": "assistant", "content": said.content}, place)
        else:
            turn["content"] = said.content

    def _thought(self, text: str, place: str) -> None:
        if not text:
            return
        if (turn := self._turn) is None or "content" in turn or "tool_calls" in turn:
            self.say({"role": "assistant", "reasoning_content": text}, place)
        else:
            turn["reasoning_content"] += f"\n{text}"

    def _assistant(self, place: str) -> Body:
        if self._turn is None:
            self.say({"role": "assistant"}, place)
        assert self._turn is not None, "an assistant's message was said"
        return self._turn


def _tool(tool: FunctionTool) -> Body:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _tool_choice(choice: Any) -> Any:
    """A choice of some function; chat checks the modes."""
    if isinstance(choice, str):
        return choice
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    raise InvalidRequest(
        f"tool_choice: {SHORT.repr(choice)} is not supported, expected 'auto', 'none', 'required' "
        "or {'type': 'function', 'name': ...}",
        param="tool_choice",
    )


def _repeated(asked: ResponsesRequest, shared: Body) -> Body:
    """What the answer shows of its request."""
    tools = [tool.model_dump(exclude_none=True) for tool in asked.tools]
    for tool in tools:
        tool.setdefault("parameters", None)
        tool.setdefault("strict", None)
    return {
        "instructions": _unless_long(asked.instructions, None),
        "max_output_tokens": asked.max_output_tokens,
        "metadata": _unless_long(shared.get("metadata"), {}) or {},
        "parallel_tool_calls": shared.get("parallel_tool_calls", True),
        "reasoning": {"effort": asked.reasoning.effort, "summary": None},
        "temperature": shared.get("temperature", 1.0),
        "text": {
            "format": _unless_long(
                asked.text.format.model_dump(by_alias=True, exclude_none=True), {"type": "text"}
            ),
            "verbosity": "medium",
        },
        "tool_choice": asked.tool_choice,
        "tools": _unless_long(tools, []),
        "top_logprobs": shared.get("top_logprobs", 0),
        "top_p": shared.get("top_p", 1.0),
    }


def _unless_long(value: Any, otherwise: Any) -> Any:
    return value if len(json.dumps(value)) <= MAX_REPEATED_CHARACTERS else otherwise
