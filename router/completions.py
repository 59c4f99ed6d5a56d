"""The OpenAI endpoints: chat, completions, models, and the tokenizer's two."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sluice.router.admission import Asked, make_jobs
from sluice.router.choices import ChatChoice, Choice, TextChoice
from sluice.router.merge import merged
from sluice.router.reading import conversation
from sluice.router.responses import Answer
from sluice.router.schemas import GenerationSchema
from sluice.router.service import Job, RouterService
from sluice.router.streaming import EventStream, unless_gone
from sluice.router.text import Delta

LONG_BODY_BYTES = 32 << 10  # above this, encoding takes long enough to hold up other streams

T = TypeVar("T")


def completion_routes(service: RouterService) -> list[Route]:
    async def read_as(reader: Callable[[bytes], Awaitable[T]], request: Request) -> T:
        async with service.bodies.read(request) as body:  # which nobody holds afterwards
            return await reader(body)

    async def chat(request: Request) -> Response:
        arrived = time.monotonic()
        read = await read_as(service.readers.chat, request)
        schema = read.schema
        service.check_model(schema.model)
        messages, options = conversation(schema)
        options = service.encoder.with_prompt_end(options, read.prompts[0])
        grammar = await _encode(read.body, lambda: service.encoder.grammar(messages, options))

        def choice(index: int) -> Choice:
            return ChatChoice(
                index,
                service.token_texts,
                parser=service.encoder.parser(messages, options),
                with_logprobs=schema.logprobs,
                must_call=schema.must_call is not None,
            )

        asked = Asked(
            request.state.request_id,
            read.body,
            schema,
            read.prompts,
            arrived,
            request.headers.get("traceparent", ""),
            grammar,
            service.encoder.end_of_reasoning(messages, options),
            service.encoder.begin_of_calls(messages, options),
        )
        return await _respond(service, request, asked, choice)

    async def complete(request: Request) -> Response:
        arrived = time.monotonic()
        read = await read_as(service.readers.completion, request)
        schema = read.schema
        service.check_model(schema.model)

        def choice(index: int) -> Choice:
            return TextChoice(
                index,
                service.token_texts,
                prefix=read.shown[index // schema.n] if schema.echo else "",
                with_logprobs=schema.logprobs is not None,
            )

        asked = Asked(
            request.state.request_id,
            read.body,
            schema,
            read.prompts,
            arrived,
            request.headers.get("traceparent", ""),
        )
        return await _respond(service, request, asked, choice)

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(service)]})

    async def model(request: Request) -> Response:
        service.check_model(request.path_params["name"])
        return JSONResponse(_model(service))

    async def tokenize(request: Request) -> Response:
        model, count, tokens = await read_as(service.readers.tokenize, request)
        service.check_model(model)
        max_model_len = service.checkpoint.max_model_len
        text = f'{{"tokens": {tokens}, "count": {count}, "max_model_len": {max_model_len}}}'
        return Response(text, media_type="application/json")

    async def detokenize(request: Request) -> Response:
        model, text = await read_as(service.readers.detokenize, request)
        service.check_model(model)
        return JSONResponse({"prompt": text})

    return [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]


async def _respond(
    service: RouterService, request: Request, asked: Asked, choice: Callable[[int], Choice]
) -> Response:
    schema = asked.schema
    await service.grammars.check(schema.response_format.schema_text or "", asked.grammar)
    jobs = make_jobs(service, asked)
    answer = Answer(
        "chat" if asked.is_chat else "text",
        asked.request_id,
        service.model_name,
        [choice(index) for index in range(len(jobs))],
        [len(prompt) for prompt in asked.prompts],
    )
    if schema.stream:
        return EventStream(_events(service, jobs, answer, schema))
    return JSONResponse(await unless_gone(request.receive, _whole(service, jobs, answer)))


async def _whole(service: RouterService, jobs: list[Job], answer: Answer) -> dict[str, Any]:
    deltas: list[list[Delta]] = [[] for _ in jobs]
    async with contextlib.aclosing(merged([service.answer(job) for job in jobs])) as stream:
        async for index, delta in stream:
            deltas[index].append(delta)
    return answer.whole(deltas)


async def _events(
    service: RouterService, jobs: list[Job], answer: Answer, schema: GenerationSchema
) -> AsyncGenerator[dict[str, Any], None]:
    """The stream's JSON objects; the first comes with the first token."""
    with_usage, continuously = schema.include_usage, schema.continuous_usage
    async with contextlib.aclosing(merged([service.answer(job) for job in jobs])) as stream:
        async for index, delta in stream:
            for chunk in answer.chunks(
                index, delta, with_usage=with_usage, continuously=continuously
            ):
                yield chunk
    if with_usage:
        yield answer.usage_chunk()


async def _encode(body: bytes, encode: Callable[[], T]) -> T:
    """Run an encoding where it holds nobody up."""
    return encode() if len(body) < LONG_BODY_BYTES else await asyncio.to_thread(encode)


def _model(service: RouterService) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "sluice",
        "max_model_len": service.checkpoint.max_model_len,
    }
