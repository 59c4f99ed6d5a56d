"""Requests of a hostile client, as the bytes that go over the wire.

MARK in a request is replaced by the attempt's number, so that nothing kept of the last one helps.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

MARK = "@@@@@@@@"
SEED = 12
LONGEST_PROMPT_TOKENS = 8_000  # the shipped model takes 8,192
TEXT_TOKENS = range(300, 1_800)
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

Requests = Sequence[bytes]


def http(path: str, content: bytes, headers: str = "", method: str = "POST") -> bytes:
    """A whole request, on a connection of its own."""
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: sluice\r\nconnection: close\r\n{headers}"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode("latin-1") + content


def get(path: str, headers: str = "") -> bytes:
    return http(path, b"", headers, "GET")


def head(lines: bytes) -> bytes:
    """A request's head of these lines; nothing ends it."""
    return b"GET /health HTTP/1.1\r\nhost: sluice\r\n" + lines


def tiny_chunks(num_chunks: int) -> bytes:
    """A body that comes in chunks of one byte."""
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: sluice\r\nconnection: close\r\n"
        "content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    return head.encode() + b"1\r\n \r\n" * num_chunks + b"0\r\n\r\n"


def completions(model: str, *odd: dict[str, Any]) -> Requests:
    """Each with these fields."""
    usual = {"model": model, "prompt": f"{MARK} Define love.", "max_tokens": 8}
    return [http(COMPLETIONS, json.dumps({**usual, **fields}).encode()) for fields in odd]


def chats(model: str, *odd: dict[str, Any]) -> Requests:
    """Each with these fields."""
    messages = [{"role": "user", "content": f"{MARK} Define love."}]
    usual = {"model": model, "messages": messages, "max_tokens": 8}
    return [http(CHAT, json.dumps({**usual, **fields}).encode()) for fields in odd]


def written_out(model: str, path: str, *fields: str) -> Requests:
    """Bodies that json.dumps cannot write or would write otherwise; `fields` follow the model's."""
    return [http(path, f'{{"model": "{model}", {text}}}'.encode()) for text in fields]


def schemas(model: str, *odd: dict[str, Any]) -> Requests:
    """Answers that have to follow these JSON schemas."""

    def response(schema: dict[str, Any]) -> dict[str, Any]:
        json_schema = {"name": "odd", "schema": {"description": MARK, **schema}}
        return {"response_format": {"type": "json_schema", "json_schema": json_schema}}

    return completions(model, *(response(schema) for schema in odd))


def nested_schemas(model: str, depth: int) -> Requests:
    """A schema inside a schema inside a schema."""
    opened_and_closed = (
        ('{"type": "array", "items": ', "}"),
        ('{"type": "object", "properties": {"a": ', "}}"),
        ('{"anyOf": [{"type": "null"}, ', "]}"),
    )
    return written_out(
        model,
        COMPLETIONS,
        *(
            f'"prompt": "{MARK}", "max_tokens": 8, "response_format": {{"type": "json_schema", '
            f'"json_schema": {{"schema": {opened * depth}{{"type": "integer"}}{closed * depth}}}}}'
            for opened, closed in opened_and_closed
        ),
    )


def flat_object(num_properties: int, **more: Any) -> dict[str, Any]:
    """A schema of so many strings."""
    names = (f"property_{i}" for i in range(num_properties))
    return {"type": "object", "properties": {n: {"type": "string"} for n in names}, **more}


def tools(model: str, *parameters: Any) -> Requests:
    """Calls of a tool with such parameters, left to the model and forced."""

    def fields(schema: Any, choice: str) -> dict[str, Any]:
        tool = {"name": "odd", "description": MARK, "parameters": schema}
        return {"tools": [{"type": "function", "function": tool}], "tool_choice": choice}

    return chats(model, *(fields(s, choice) for s in parameters for choice in ("auto", "required")))


def past_calls(model: str, *arguments: str) -> Requests:
    """Conversations whose earlier tool call had such arguments."""

    def messages(text: str) -> list[dict[str, Any]]:
        call = {"id": "1", "type": "function", "function": {"name": "odd", "arguments": text}}
        return [
            {"role": "user", "content": MARK},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "done"},
        ]

    return chats(model, *({"messages": messages(text)} for text in arguments))


def texts(model: str, num_characters: int, text: str = "a") -> Requests:
    """A text of so many characters at each place where there may be one."""
    long = (text * (num_characters // len(text) + 1))[:num_characters]
    return [
        *chats(model, {"messages": [{"role": "user", "content": long}]}),
        *completions(model, {"prompt": long}),
        http("/tokenize", json.dumps({"model": model, "prompt": long}).encode()),
    ]


def repeated(item: str, num_bytes: int) -> str:
    """A JSON array of the same item over and over."""
    return "[" + ",".join([item] * (num_bytes // (len(item) + 1))) + "]"


def longest_prompts(model: str, num_requests: int) -> Requests:
    """Prompts that just fit, of random tokens, none of which is cached."""
    rng = random.Random(SEED)
    prompts = (rng.choices(TEXT_TOKENS, k=LONGEST_PROMPT_TOKENS) for _ in range(num_requests))
    return completions(
        model, *({"prompt": p, "cache_salt": MARK, "max_tokens": 16} for p in prompts)
    )
