"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sluice.router.anthropic.answer import MessagesAnswer
from sluice.router.anthropic.request import NAMES, translate, translate_count
from sluice.router.openai.generation import Form, read_as, read_conversation, respond
from sluice.router.reading.requests import fields_named
from sluice.router.service import RouterService


def messages_routes(service: RouterService) -> list[Route]:
    async def messages(request: Request) -> Response:
        read = await read_conversation(service, request, translate, NAMES)

        def form(_: int) -> Form:
            return MessagesAnswer(
                read.asked.request_id,
                service.model_name,
                read.output(),
                len(read.asked.prompts[0]),
            )

        with fields_named(NAMES):
            return await respond(service, request, read.asked, form)

    async def count_tokens(request: Request) -> Response:
        async def reader(body: bytes) -> int:
            read = await service.readers.chat(body, translate_count)
            service.check_model(read.schema.model)
            return len(read.prompts[0])

        return JSONResponse({"input_tokens": await read_as(service, request, reader)})

    return [
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]
