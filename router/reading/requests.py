"""Reading: a body to token ids.

These functions run in the router where a body is short, and in a helper process where it is not.
There they leave the long part behind: what comes back are the token ids, and the body without the
text they were made of, which the router reads in its turn.
"""

from __future__ import annotations

import array
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sluice.protocol.config import ModelConfig
from sluice.protocol.messages import InvalidRequest
from sluice.router.reading.parsing import check, parse, read_object
from sluice.router.reading.schemas import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from sluice.router.text.answers.conversation import ChatOptions, Message
from sluice.router.text.chat import ChatEncoder
from sluice.router.text.checkpoint import read_checkpoint

MAX_REST_BYTES = 1 << 20
A_TOOL = {"type": "function", "function": {"name": "-"}}

Ids = tuple[int, ...]
Body = dict[str, Any]
Packed = list[bytes]  # prompts as 32-bit numbers

T = TypeVar("T")


@dataclass(frozen=True)
class Translated:
    """Another API's request as a chat request.

    chat: the body of /v1/chat/completions that asks for the same. repeated: what the answer repeats
    of the request, or is made by; plain data without its long texts. names: the API's own names of
    chat's fields, where they differ. places: where each message stands in the request.
    """

    chat: Body
    repeated: Body = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    places: Sequence[str] = ()

    @contextlib.contextmanager
    def in_its_words(self) -> Iterator[None]:
        """Errors in the block name the fields as the client wrote them."""
        with fields_named(self.names, self.places):
            yield


@contextlib.contextmanager
def fields_named(names: Mapping[str, str], places: Sequence[str] = ()) -> Iterator[None]:
    """An InvalidRequest in the block that names one of these fields names the other instead."""
    try:
        yield
    except InvalidRequest as error:
        if (param := error.param) is None:
            raise
        named = _named(param, names, places)
        message = named + str(error).removeprefix(param)
        raise InvalidRequest(
            message if str(error).startswith(param) else str(error), param=named, code=error.code
        ) from error


def _named(param: str, names: Mapping[str, str], places: Sequence[str]) -> str:
    head, *rest = param.split(".")
    if head == "messages" and rest and rest[0].isdecimal() and int(rest[0]) < len(places):
        return ".".join([places[int(rest[0])], *rest[1:]])
    return ".".join([names.get(head, head), *rest])


# From the body of another API. Raises InvalidRequest. Helper processes find it by its name.
Translate = Callable[[Body], Translated]

_encoder: ChatEncoder  # of a helper process


def load(model: ModelConfig) -> None:
    """Once in each helper process. Raises ConfigError."""
    global _encoder
    _encoder = ChatEncoder(read_checkpoint(model))


def try_template() -> None:
    """Render a few words. Raises ConfigError where no conversation can be rendered."""
    _encoder.try_template()


def conversation(schema: ChatRequest | TokenizeRequest) -> tuple[list[Message], ChatOptions]:
    """What chat formats are given."""
    response = schema.response_format
    options = ChatOptions(
        tools=tuple(tool.function for tool in schema.tools if schema.tool_choice.mode != "none"),
        must_call=schema.must_call,
        parallel_calls=schema.parallel_tool_calls,
        thinking=None if schema.thinking is None else schema.thinking.type == "enabled",
        effort=schema.reasoning_effort,
        json_schema=response.schema_text,
        show_schema=response.type == "json_schema",
        template_arguments=tuple(schema.chat_template_kwargs.items()),
        add_generation_prompt=isinstance(schema, ChatRequest) or schema.add_generation_prompt,
    )
    return [message.plain() for message in schema.messages or ()], options


def completion_ids(encoder: ChatEncoder, schema: CompletionRequest) -> list[Ids]:
    return [encoder.encode_prompt(prompt) for prompt in schema.prompt]


def shown_prompts(encoder: ChatEncoder, schema: CompletionRequest) -> list[str]:
    """The prompts as text, if the answer begins with them."""
    if not schema.echo:
        return []
    return [p if isinstance(p, str) else encoder.decode(p) for p in schema.prompt]


def text_ids(encoder: ChatEncoder, schema: TokenizeRequest) -> Ids:
    assert schema.prompt is not None, "the schema demands one of prompt and messages"
    return encoder.encode_text(schema.prompt, add_special_tokens=schema.add_special_tokens)


# Whole readings, which come to plain data.


def with_encoder(read: Callable[..., T], *args: Any) -> T:
    """In a helper process: one of the functions below, with the encoder there."""
    return read(_encoder, *args)


def packed_chat_ids(encoder: ChatEncoder, messages: list[Message], options: ChatOptions) -> bytes:
    return _packed([encoder.encode_chat(messages, options)])[0]


def as_chat(body: Body) -> Translated:
    """The API that the others are translated to."""
    return Translated(body)


def translated(body: bytes, translate: Translate) -> tuple[Translated, ChatRequest]:
    """The chat request, as it is and checked."""
    asked = translate(read_object(body))
    with asked.in_its_words():
        return asked, check(ChatRequest, asked.chat)


def read_chat(
    encoder: ChatEncoder, body: bytes, translate: Translate
) -> tuple[bytes, Packed, Body]:
    asked, schema = translated(body, translate)
    with asked.in_its_words():
        rest = _rest(asked.chat, messages=_outline(schema.messages))
        return rest, [packed_chat_ids(encoder, *conversation(schema))], asked.repeated


def read_completion(encoder: ChatEncoder, body: bytes) -> tuple[bytes, Packed, list[str]]:
    data = read_object(body)
    schema = check(CompletionRequest, data)
    rest = _rest(data, prompt=["-"] * len(schema.prompt))
    return rest, _packed(completion_ids(encoder, schema)), shown_prompts(encoder, schema)


def read_tokenize(encoder: ChatEncoder, body: bytes) -> tuple[str | None, int, str]:
    """The model asked for, the number of tokens, and the tokens as JSON."""
    schema = parse(TokenizeRequest, body)
    if schema.messages is None:
        ids = text_ids(encoder, schema)
    else:
        ids = encoder.encode_chat(*conversation(schema))
    return schema.model, len(ids), json.dumps(ids)


def read_detokenize(encoder: ChatEncoder, body: bytes) -> tuple[str | None, str]:
    """The model asked for, and the text."""
    schema = parse(DetokenizeRequest, body)
    return schema.model, encoder.decode_checked(schema.tokens)


def unpacked(prompts: Packed) -> list[Ids]:
    return [tuple(array.array("I", prompt)) for prompt in prompts]


def _packed(prompts: list[Ids]) -> Packed:
    return [array.array("I", prompt).tobytes() for prompt in prompts]


def _rest(data: dict[str, Any], **shortened: Any) -> bytes:
    """The body with its long part shortened. Raises InvalidRequest if that was not the long one."""
    rest = json.dumps(data | shortened).encode()
    if len(rest) > MAX_REST_BYTES:
        [field] = shortened
        raise InvalidRequest(
            f"body: {len(rest)} bytes beside `{field}`, expected at most {MAX_REST_BYTES}"
        )
    return rest


def _outline(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """A conversation without its text, whose answers are read as the conversation's own are."""
    last = messages[-1].model_dump(include={"role", "prefix", "task"}, exclude_none=True)
    outline = [last | {"content": ""}]
    if any(message.tools for message in messages):
        outline.insert(0, {"role": "system", "content": "", "tools": [A_TOOL]})
    return outline
