"""The OpenAI endpoints: chat, completions, models, and the tokenizer's two."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, Literal, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from sluice.router.admission import check_token_ids, make_job
from sluice.router.body import read_body
from sluice.router.responses import Answer
from sluice.router.schemas import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationSchema,
    TokenizeRequest,
    parse,
)
from sluice.router.service import Job, RouterService
from sluice.router.streaming import EventStream, unless_gone

LONG_BODY_BYTES = 32 << 10  # above this, encoding takes long enough to hold up other streams

T = TypeVar("T")


def completion_routes(service: RouterService) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        arrived = time.monotonic()
        body = await read_body(request)
        schema = parse(ChatRequest, body)
        service.check_model(schema.model)
        messages = _plain(schema.messages)
        token_ids = await _encode(body, lambda: service.encoder.encode_chat(messages))
        return await _respond(service, request, schema, token_ids, "chat", arrived)

    @routes.post("/v1/completions")
    async def complete(request: Request) -> Response:
        arrived = time.monotonic()
        body = await read_body(request)
        schema = parse(CompletionRequest, body)
        service.check_model(schema.model)
        prompt = schema.prompt
        if isinstance(prompt, str):
            token_ids = await _encode(body, lambda: service.encoder.encode_text(prompt))
        else:
            token_ids = tuple(prompt)
        return await _respond(service, request, schema, token_ids, "text", arrived)

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service)]}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return _model(service)

    @routes.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        body = await read_body(request)
        schema = parse(TokenizeRequest, body)
        service.check_model(schema.model)
        token_ids = await _encode(body, lambda: _tokenize(service, schema))
        return {
            "tokens": token_ids,
            "count": len(token_ids),
            "max_model_len": service.checkpoint.max_model_len,
        }

    @routes.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, str]:
        schema = parse(DetokenizeRequest, await read_body(request))
        service.check_model(schema.model)
        check_token_ids(service, schema.tokens, "tokens")
        return {"prompt": service.encoder.decode(schema.tokens)}

    return routes


async def _respond(
    service: RouterService,
    request: Request,
    schema: GenerationSchema,
    token_ids: tuple[int, ...],
    kind: Literal["chat", "text"],
    arrived: float,
) -> Response:
    request_id = request.state.request_id
    job = make_job(
        service,
        schema,
        token_ids,
        prompt_field="messages" if kind == "chat" else "prompt",
        request_id=request_id,
        arrived=arrived,
    )
    answer = Answer(kind, request_id, service.model_name, len(token_ids))
    if schema.stream:
        return EventStream(_events(service, job, answer, with_usage=schema.include_usage))
    return JSONResponse(await unless_gone(request.receive, _whole(service, job, answer)))


async def _whole(service: RouterService, job: Job, answer: Answer) -> dict[str, Any]:
    async with contextlib.aclosing(service.answer(job)) as stream:
        return answer.whole([delta async for delta in stream])


async def _events(
    service: RouterService, job: Job, answer: Answer, *, with_usage: bool
) -> AsyncGenerator[dict[str, Any], None]:
    """The stream's JSON objects; the first comes with the first token."""
    opening = answer.first(with_usage=with_usage)
    async with contextlib.aclosing(service.answer(job)) as stream:
        async for delta in stream:
            if opening is not None:
                yield opening
                opening = None
            for chunk in answer.chunks(delta, with_usage=with_usage):
                yield chunk
    if with_usage:
        yield answer.usage_chunk()


async def _encode(body: bytes, encode: Callable[[], T]) -> T:
    """Run an encoding where it holds nobody up."""
    return encode() if len(body) < LONG_BODY_BYTES else await asyncio.to_thread(encode)


def _plain(messages: list[ChatMessage]) -> list[dict[str, str]]:
    return [message.model_dump(exclude_none=True) for message in messages]


def _tokenize(service: RouterService, schema: TokenizeRequest) -> tuple[int, ...]:
    if schema.messages is not None:
        return service.encoder.encode_chat(
            _plain(schema.messages), add_generation_prompt=schema.add_generation_prompt
        )
    assert schema.prompt is not None, "the schema demands one of the two"
    return service.encoder.encode_text(schema.prompt, add_special_tokens=schema.add_special_tokens)


def _model(service: RouterService) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "sluice",
        "max_model_len": service.checkpoint.max_model_len,
    }
