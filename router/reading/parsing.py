"""parse: a JSON body to its schema, or an error that names the field.

Some kinds of fields are let through without effect, as OpenAI's clients send them unasked:
 - null, which means "not given"
 - IGNORED: bookkeeping of the caller
 - NEUTRAL: features we lack, at the value that switches them off
 - for /tokenize, OF_ANSWERS: fields of the answer to the prompt that is counted
"""

from __future__ import annotations

import math
import reprlib
from typing import Any, TypeVar

import jiter
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from sluice.protocol.messages import InvalidRequest
from sluice.router.reading.schemas import (
    UNKNOWN_FIELD,
    ChatRequest,
    CompletionRequest,
    GenerationSchema,
    Schema,
    TokenizeRequest,
)

IGNORED = (
    "user",
    "metadata",
    "store",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "service_tier",
    "prediction",  # it may make an answer faster, never another one
    "request_id",
)

# A field of one endpoint may stand here for the other.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "top_logprobs": (0,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "no_stop_trim": (False,),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "chat_template_kwargs": ({},),
}

# Of a request that is sent to be counted first: what comes after its prompt.
OF_ANSWERS = frozenset({*ChatRequest.model_fields, *CompletionRequest.model_fields})

# They hold JSON of the client's own, where null is a value.
AS_WRITTEN = frozenset(
    {
        *("tools", "response_format", "arguments", "chat_template_kwargs"),
        *("schema", "input", "input_schema"),  # of the Responses and the Messages API
    }
)

SHORT = reprlib.Repr()  # of values of any size, without writing all of it
SHORT.maxstring = SHORT.maxlong = SHORT.maxother = 60
SHORT.maxlevel = 3

S = TypeVar("S", bound=Schema)


def parse(schema: type[S], body: bytes) -> S:
    """Check a JSON body. Raises InvalidRequest naming the field, its value and the expectation."""
    return check(schema, read_object(body))


def read_object(body: bytes) -> dict[str, Any]:
    """A body's fields. Raises InvalidRequest for what is no JSON object.

    So is what readers take in different ways, such as a key twice, and what Python's own reader
    would take longer for than it took to send: numbers of thousands of digits, nesting without end.
    """
    try:
        data = jiter.from_json(body, allow_inf_nan=False, catch_duplicate_keys=True)
    except ValueError as error:
        raise InvalidRequest(f"body: not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise InvalidRequest(f"body: got {_shown(data)}, expected a JSON object")
    return data


def check(schema: type[S], data: dict[str, Any]) -> S:
    """Check a body's fields, and drop those that are null.

    Raises InvalidRequest as `parse` does, for the first fault.
    """
    _drop_null(data)
    return check_part(schema, _without_neutral(schema, data), "")


def check_part(schema: type[S], data: Any, place: str) -> S:
    """Check what stands at `place` of a body. Raises InvalidRequest as `parse` does."""
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False)[0], place) from error


def _drop_null(value: Any, *, as_written: bool = False) -> None:
    """Drop fields that are null; a null among list items stays, and is refused where it matters.

    as_written: keep them. Raises InvalidRequest for numbers that are none, such as 1e999.
    """
    if isinstance(value, dict):
        if not as_written:
            for key in [key for key, item in value.items() if item is None]:
                del value[key]
        for key, item in value.items():
            _drop_null(item, as_written=as_written or key in AS_WRITTEN)
    elif isinstance(value, list):
        for item in value:
            if type(item) not in (int, str):
                _drop_null(item, as_written=as_written)
    elif isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest("body: a number is too large to be one, leave it out")


def _without_neutral(schema: type[Schema], data: dict[str, Any]) -> dict[str, Any]:
    """Drop what has no effect. Raises InvalidRequest for a feature that is asked for."""
    if not issubclass(schema, GenerationSchema | TokenizeRequest):
        return data
    kept = {}
    for key, value in data.items():
        if key in schema.model_fields:
            kept[key] = value
        elif issubclass(schema, TokenizeRequest) and key in OF_ANSWERS:
            continue
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


def _explain(problem: ErrorDetails, place: str) -> InvalidRequest:
    """place: where what was checked stands in the body; "" for the body itself."""
    param = ".".join(str(part) for part in (place, *problem["loc"]) if part != "") or None
    kind, value = problem["type"], problem["input"]
    if kind == "missing":
        return InvalidRequest(f"{param}: missing, it is required", param=param)
    if kind == UNKNOWN_FIELD:
        param = ".".join(part for part in (param, problem["ctx"]["field"]) if part)
        return InvalidRequest(f"{param}: unknown field, leave it out", param=param)
    if kind == "value_error":
        message = str(problem["ctx"]["error"])
        if param is None:  # from a check over several fields, whose message begins with the field
            return InvalidRequest(message, param=message.split(maxsplit=1)[0].rstrip(":"))
        return InvalidRequest(f"{param}: {message}", param=param)
    expectation = problem["msg"].replace("Input should be", "expected")
    return InvalidRequest(f"{param}: got {_shown(value)}, {expectation}", param=param)


def _shown(value: Any) -> str:
    return SHORT.repr(value)
