"""What clients may send. Strict: "5" is not 5, and a field we do not honour is refused by name."""

from __future__ import annotations

import functools
import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator
from pydantic_core import PydanticCustomError

from sluice.protocol.limits import (
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_STOP_TOKEN_IDS,
    MAX_TEMPERATURE,
    MAX_TOP_LOGPROBS,
    MIN_REPETITION_PENALTY,
)
from sluice.router.reading.fields import (
    Arguments,
    Function,
    LogitBias,
    Prompts,
    Stop,
    TemplateArguments,
    Text,
    ToolChoice,
    ToolChoiceField,
)
from sluice.router.reading.history import in_one_spelling
from sluice.router.text.answers.conversation import Effort
from sluice.router.text.v4.words import TASKS

MAX_CHOICES = 128  # answers to one HTTP request, over all its prompts
COMPLETION_TOKENS = 16  # of an answer to a plain text, OpenAI's default
MAX_SALT_CHARACTERS = 256
MAX_MESSAGES = 16_384  # each costs a kilobyte to check; the text of a million tokens is one of few
MAX_PRIORITY = 1000


UNKNOWN_FIELD = "unknown_field"

T = TypeVar("T")


class _First(FailFast):
    """FailFast that may stand in a union."""

    __hash__ = object.__hash__


# pydantic would describe what is wrong with each of a million items.
List = Annotated[list[T], _First()]


class Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: Any) -> Any:
        """One error for the first unknown field, instead of one for each."""
        if cls.model_config["extra"] == "ignore" or not isinstance(data, dict):
            return data
        if not data.keys() <= (known := _names(cls)):
            name = next(name for name in data if name not in known)
            raise PydanticCustomError(UNKNOWN_FIELD, "unknown field", {"field": name})
        return data


@functools.cache
def _names(schema: type[Schema]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in schema.model_fields.items())


class Replayed(Schema):
    """A part of a conversation's history, perhaps as another server wrote it.

    Fields that we do not know are that server's notes, of which no prompt is made.
    """

    model_config = ConfigDict(extra="ignore")


class FunctionCall(Replayed):
    name: str = Field(min_length=1)
    arguments: Arguments


class ToolCall(Replayed):
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = Field(None, exclude=True)  # of a streamed answer, sent back as it came
    function: FunctionCall


class Tool(Schema):
    type: Literal["function"]
    function: Function


class ChatMessage(Replayed):
    role: Literal["system", "developer", "user", "assistant", "tool", "latest_reminder"]
    content: Text | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: List[ToolCall] | None = None
    tool_call_id: str | None = None
    tools: List[Tool] | None = None
    prefix: Literal[True] | None = None  # of the last message: go on with this answer
    task: str | None = None  # of a user's message: a quick instruction

    @model_validator(mode="before")
    @classmethod
    def _in_one_spelling(cls, data: Any) -> Any:
        return in_one_spelling(data) if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _fields_fit_the_role(self) -> ChatMessage:
        if self.content is None and not self.tool_calls:
            raise ValueError("content: missing, it is required")
        owners = {
            "reasoning_content": ("assistant",),
            "tool_calls": ("assistant",),
            "prefix": ("assistant",),
            "tool_call_id": ("tool",),
            "tools": ("system", "developer"),
            "task": ("user", "assistant"),
        }
        for field, roles in owners.items():
            if getattr(self, field) is not None and self.role not in roles:
                raise ValueError(f"{field}: only a message of role {' or '.join(roles)} has it")
        if self.task is not None and self.task not in TASKS:
            raise ValueError(f"task: got {self.task!r}, expected one of {', '.join(TASKS)}")
        return self

    def plain(self) -> dict[str, Any]:
        """The message as chat formats read it."""
        message = self.model_dump(exclude_none=True)
        if self.content is None:
            message["content"] = ""
        if self.tools is not None:
            message["tools"] = [tool.function for tool in self.tools]
        return message


class StreamOptions(Schema):
    """include_obfuscation: no padding is ever sent."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # in every chunk, as it stands
    include_obfuscation: bool = False


class JsonSchema(Schema):
    name: str | None = None
    description: str | None = None
    strict: bool | None = None  # the answer follows the schema in any case
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Schema):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_with_its_type(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema: expected with type 'json_schema', and with no other")
        return self

    @property
    def schema_text(self) -> str | None:
        """The JSON schema that the answer must satisfy; None for any text."""
        if self.json_schema is not None:
            return json.dumps(self.json_schema.schema_, ensure_ascii=False)
        return '{"type": "object"}' if self.type == "json_object" else None


class GenerationSchema(Schema):
    """Fields that both endpoints share. `max_tokens` None: see `usual_max_tokens`."""

    model: str
    max_tokens: int | None = Field(None, gt=0)
    max_completion_tokens: int | None = Field(None, gt=0)
    min_tokens: int = Field(0, ge=0)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    temperature: float = Field(1.0, ge=0, le=MAX_TEMPERATURE)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)  # 0, -1 or more than there are tokens: no limit
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-MAX_PENALTY, le=MAX_PENALTY)
    frequency_penalty: float = Field(0.0, ge=-MAX_PENALTY, le=MAX_PENALTY)
    repetition_penalty: float = Field(1.0, ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)
    logit_bias: LogitBias = {}
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)  # in the queue the lower goes first
    cache_salt: str = Field("", max_length=MAX_SALT_CHARACTERS)  # others share nothing cached
    stop: Stop = []
    stop_token_ids: List[int] = Field([], max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool = False
    response_format: ResponseFormat = ResponseFormat(type="text")
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _consistent(self) -> GenerationSchema:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: given without stream, expected `stream: true` too")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ValueError(
                f"max_tokens is {both[0]} and max_completion_tokens {both[1]}, expected one of them"
            )
        if self.min_tokens and self.response_format.schema_text is not None:
            raise ValueError("min_tokens: a JSON answer ends where it is complete, leave it out")
        return self

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def only_prompt(self) -> bool:
        """Whether no output is wanted, only what is known of the prompt."""
        return False

    @property
    def num_prompt_logprobs(self) -> int | None:
        """None: no log-probabilities of the prompt are asked for."""
        return None

    @property
    def usual_max_tokens(self) -> int | None:
        """Where the request sets no limit, at most so many tokens; None: as many as fit."""
        return None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def num_top_logprobs(self) -> int | None:
        """None: no log-probabilities are asked for."""
        raise NotImplementedError


class Thinking(Schema):
    type: Literal["enabled", "disabled"]


class ConversationSchema(Schema):
    """Fields that decide what a conversation's prompt is, and how its answer is read."""

    tools: List[Tool] = []
    tool_choice: ToolChoiceField = ToolChoice()
    parallel_tool_calls: bool = True
    thinking: Thinking | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: TemplateArguments = {}
    response_format: ResponseFormat = ResponseFormat(type="text")

    @model_validator(mode="after")
    def _tools_to_choose_from(self) -> ConversationSchema:
        names = [tool.function["name"] for tool in self.tools]
        if not names and not self.parallel_tool_calls:
            raise ValueError("parallel_tool_calls: given without tools, expected `tools` too")
        if not names and self.tool_choice.mode == "required":
            raise ValueError("tool_choice: a call is required, expected `tools` too")
        if self.tool_choice.name not in (None, *names):
            raise ValueError(
                f"tool_choice: no tool {self.tool_choice.name!r}, expected one of "
                f"{', '.join(names)}"
            )
        return self

    @property
    def must_call(self) -> frozenset[str] | None:
        """Functions of which one has to be called; None leaves it to the model."""
        if self.tool_choice.mode != "required":
            return None
        names = [tool.function["name"] for tool in self.tools]
        return frozenset(names if self.tool_choice.name is None else [self.tool_choice.name])


class ChatRequest(ConversationSchema, GenerationSchema):
    messages: List[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)

    @model_validator(mode="after")
    def _logprobs_are_on(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: given without logprobs, expected `logprobs: true` too")
        return self

    @property
    def num_top_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


class CompletionRequest(GenerationSchema):
    prompt: Prompts
    max_tokens: int | None = Field(None, ge=0)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @model_validator(mode="after")
    def _not_too_many(self) -> CompletionRequest:
        if self.n * len(self.prompt) > MAX_CHOICES:
            raise ValueError(
                f"prompt: {len(self.prompt)} prompts with {self.n} answers each, expected at most "
                f"{MAX_CHOICES} answers in all"
            )
        return self

    @property
    def usual_max_tokens(self) -> int | None:
        return COMPLETION_TOKENS

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def only_prompt(self) -> bool:
        return self.max_tokens == 0

    @property
    def num_prompt_logprobs(self) -> int | None:
        """An echo has them for the prompt, too, where it has them for the output."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((number for number in asked if number is not None), default=None)


class TokenizeRequest(ConversationSchema):
    """Either a prompt or messages, with all that makes a prompt of them."""

    model: str | None = None
    prompt: str | None = None
    messages: List[ChatMessage] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _one_input(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: expected exactly one of `prompt` and `messages`")
        return self


class DetokenizeRequest(Schema):
    model: str | None = None
    tokens: List[int]


class ScaleRequest(Schema):
    role: Literal["prefill", "decode"]
    replicas: int = Field(ge=0)


class DrainRequest(Schema):
    node: str
