"""The OpenAI endpoints: chat, completions, models, and the tokenizer's two."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sluice.router.openai.admission import Asked
from sluice.router.openai.answer import Answer
from sluice.router.openai.choices import ChatChoice, Choice, TextChoice
from sluice.router.openai.generation import read_as, read_conversation, respond
from sluice.router.service import RouterService


def completion_routes(service: RouterService) -> list[Route]:
    async def chat(request: Request) -> Response:
        read = await read_conversation(service, request)
        with_logprobs = read.schema.logprobs

        def choice(index: int) -> Choice:
            return ChatChoice(
                index, service.token_texts, read.output(), with_logprobs=with_logprobs
            )

        return await _respond(service, request, read.asked, choice)

    async def complete(request: Request) -> Response:
        arrived = time.monotonic()
        read = await read_as(service, request, service.readers.completion)
        schema = read.schema
        service.check_model(schema.model)

        def choice(index: int) -> Choice:
            return TextChoice(
                index,
                service.token_texts,
                prefix=read.shown[index // schema.n] if schema.echo else "",
                with_logprobs=schema.logprobs is not None,
                prompt=read.prompts[index // schema.n],
                prompt_logprobs=schema.prompt_logprobs,
            )

        traceparent = request.headers.get("traceparent", "")
        asked = Asked(request.state.request_id, schema, read.prompts, arrived, traceparent)
        return await _respond(service, request, asked, choice)

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(service)]})

    async def model(request: Request) -> Response:
        service.check_model(request.path_params["name"])
        return JSONResponse(_model(service))

    async def tokenize(request: Request) -> Response:
        model, count, tokens = await read_as(service, request, service.readers.tokenize)
        service.check_model(model)
        max_model_len = service.checkpoint.max_model_len
        text = f'{{"tokens": {tokens}, "count": {count}, "max_model_len": {max_model_len}}}'
        return Response(text, media_type="application/json")

    async def detokenize(request: Request) -> Response:
        model, text = await read_as(service, request, service.readers.detokenize)
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

    def form(num_answers: int) -> Answer:
        return Answer(
            "chat" if asked.is_chat else "text",
            asked.request_id,
            service.model_name,
            [choice(index) for index in range(num_answers)],
            [len(prompt) for prompt in asked.prompts],
            with_usage=schema.include_usage,
            continuous_usage=schema.continuous_usage,
        )

    return await respond(service, request, asked, form)


def _model(service: RouterService) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "sluice",
        "max_model_len": service.checkpoint.max_model_len,
    }
