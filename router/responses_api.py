"""POST /v1/responses."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sluice.router.generation import Form, read_conversation, respond
from sluice.router.reading import fields_named
from sluice.router.responses_answer import ResponsesAnswer
from sluice.router.responses_request import NAMES, translate
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
