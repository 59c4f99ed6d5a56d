"""POST /v1/responses."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sluice.router.openai.generation import Form, read_conversation, respond
from sluice.router.openai.responses.answer import ResponsesAnswer
from sluice.router.openai.responses.request import NAMES, translate
from sluice.router.reading.requests import fields_named
from sluice.router.service import RouterService


def responses_routes(service: RouterService) -> list[Route]:
    async def responses(request: Request) -> Response:
        read = await read_conversation(service, request, translate, NAMES)

        def form(_: int) -> Form:
            return ResponsesAnswer(
                read.asked.request_id,
                service.model_name,
                read.output(),
                len(read.asked.prompts[0]),
                read.repeated,
                service.token_texts,
                with_logprobs=read.schema.logprobs,
            )

        with fields_named(NAMES):
            return await respond(service, request, read.asked, form)

    return [Route("/v1/responses", responses, methods=["POST"])]
