"""What clients may send. Strict: "5" is not 5, and a field we do not honour is refused by name.

Three kinds of fields are let through without effect, as OpenAI's clients send them unasked:
 - null, which means "not given"
 - IGNORED: bookkeeping of the caller
 - NEUTRAL: features we lack, at the value that switches them off
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, from_json

from sluice.engine.protocol import InvalidRequest

IGNORED = (
    "user",
    "metadata",
    "store",
    "safety_identifier",
    "prompt_cache_key",
    "service_tier",
)

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_SHOWN_CHARACTERS = 60


def _text_of_parts(value: Any) -> Any:
    """Message content: a string, or a list of text parts, which become its lines."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("expected a string or a list of text parts")
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ValueError(f"a part of type {kind!r} is not supported, expected type 'text'")
        if not isinstance(part.get("text"), str):
            raise ValueError("a part of type 'text' needs a string `text`")
    return "\n".join(part["text"] for part in value)


def _prompt(value: Any) -> Any:
    """A string or token ids; a list with a single prompt stands for that prompt."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(token_id) is int for token_id in value):
        return value
    if isinstance(value, list) and all(isinstance(prompt, str | list) for prompt in value):
        raise ValueError(f"{len(value)} prompts in one request, expected one: send a request each")
    raise ValueError("expected a string or a list of token ids")


def _stop(value: Any) -> Any:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
        raise ValueError("expected a string or a list of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise ValueError(f"{len(strings)} stop strings, expected at most {MAX_STOP_STRINGS}")
    if any(not 0 < len(text) <= MAX_STOP_CHARACTERS for text in strings):
        raise ValueError(f"each stop string must have 1 to {MAX_STOP_CHARACTERS} characters")
    return strings


class Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ChatMessage(Schema):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_text_of_parts)]
    name: str | None = None


class StreamOptions(Schema):
    include_usage: bool = False


class GenerationSchema(Schema):
    """Fields that both endpoints share. `max_tokens` None: as many as fit."""

    model: str
    max_tokens: int | None = Field(None, gt=0)
    max_completion_tokens: int | None = Field(None, gt=0)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)  # 0 or -1: no limit
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[list[str], BeforeValidator(_stop)] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
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
        return self

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(GenerationSchema):
    messages: list[ChatMessage] = Field(min_length=1)


class CompletionRequest(GenerationSchema):
    prompt: Annotated[str | list[int], BeforeValidator(_prompt)]


class TokenizeRequest(Schema):
    """Either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _one_input(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: expected exactly one of `prompt` and `messages`")
        return self


class DetokenizeRequest(Schema):
    model: str | None = None
    tokens: list[int]


class ScaleRequest(Schema):
    role: Literal["prefill", "decode"]
    replicas: int = Field(ge=0)


class DrainRequest(Schema):
    node: str


S = TypeVar("S", bound=Schema)


def parse(schema: type[S], body: bytes) -> S:
    """Check a JSON body. Raises InvalidRequest naming the field, its value and the expectation."""
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"body: not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise InvalidRequest(f"body: got {_shown(data)}, expected a JSON object")
    try:
        return schema.model_validate(_without_neutral(schema, _without_null(data)))
    except ValidationError as error:
        raise _explain(error.errors(include_url=False)[0]) from error


def _without_null(value: Any) -> Any:
    """Drop fields that are null; a null among list items stays, and is refused where it matters."""
    if isinstance(value, dict):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_null(item) for item in value]
    return value


def _without_neutral(schema: type[Schema], data: dict[str, Any]) -> dict[str, Any]:
    """Drop what has no effect. Raises InvalidRequest for a feature that is asked for."""
    if not issubclass(schema, GenerationSchema):
        return data
    kept = {}
    for key, value in data.items():
        if key in schema.model_fields:
            kept[key] = value
        elif key in NEUTRAL:
            if not any(_same(value, neutral) for neutral in NEUTRAL[key]):
                raise InvalidRequest(
                    f"{key}: {_shown(value)} is not supported, expected "
                    f"{' or '.join(repr(neutral) for neutral in NEUTRAL[key])}, or leave it out",
                    param=key,
                    code="unsupported_parameter",
                )
        elif key not in IGNORED:
            raise InvalidRequest(
                f"{key}: unknown field, expected one of {', '.join(schema.model_fields)}",
                param=key,
                code="unknown_parameter",
            )
    return kept


def _same(value: Any, neutral: Any) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _explain(problem: ErrorDetails) -> InvalidRequest:
    param = ".".join(str(part) for part in problem["loc"]) or None
    kind, value = problem["type"], problem["input"]
    if kind == "missing":
        return InvalidRequest(f"{param}: missing, it is required", param=param)
    if kind == "extra_forbidden":
        return InvalidRequest(f"{param}: unknown field, leave it out", param=param)
    if kind == "value_error":
        message = str(problem["ctx"]["error"])
        if param is None:  # from a check over several fields, whose message begins with the field
            return InvalidRequest(message, param=message.split(maxsplit=1)[0].rstrip(":"))
        return InvalidRequest(f"{param}: {message}", param=param)
    expectation = problem["msg"].replace("Input should be", "expected")
    return InvalidRequest(f"{param}: got {_shown(value)}, {expectation}", param=param)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else text[:MAX_SHOWN_CHARACTERS] + "..."
