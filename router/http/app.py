"""create_app: the router's HTTP surface over a RouterService.

The app neither starts nor stops the service; `server` does. Its routes are Starlette's:
those that FastAPI makes of functions took an eighth of a request's time, for nothing that is used.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from sluice.protocol.messages import SluiceError
from sluice.router.anthropic.api import messages_routes
from sluice.router.common.errors import response_of, response_of_status
from sluice.router.http.admin import admin_routes
from sluice.router.http.canary_border import CanaryBorder
from sluice.router.http.middleware import Border
from sluice.router.http.status_page import page_routes
from sluice.router.openai.completions import completion_routes
from sluice.router.openai.responses.api import responses_routes
from sluice.router.openai.streaming import CLIENT_CLOSED_REQUEST, ClientGone
from sluice.router.service import RouterService


def create_app(service: RouterService) -> FastAPI:
    """Every error, whoever raises it, leaves in OpenAI's shape and with an x-request-id."""
    return FastAPI(
        title="Sluice",
        openapi_url=None,
        redirect_slashes=False,
        routes=[
            *completion_routes(service),
            *responses_routes(service),
            *messages_routes(service),
            *admin_routes(service),
            *page_routes(service),
        ],
        middleware=_middleware(service),
        exception_handlers={
            SluiceError: _expected,
            HTTPException: _refused,
            ClientGone: _gone,
            ClientDisconnect: _gone,
        },
    )


def _middleware(service: RouterService) -> list[Middleware]:
    """From the outside in."""
    layers = [Middleware(Border, api_keys=service.api_keys)]
    if origins := service.config.router.cors_origins:  # outermost: preflights bear no key
        cors = Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=[
                *("authorization", "content-type", "x-request-id"),
                *("x-api-key", "anthropic-version", "anthropic-beta"),
            ],
            expose_headers=["x-request-id", "retry-after"],
        )
        layers.insert(0, cors)
    if service.canary is not None:
        layers.append(Middleware(CanaryBorder, service=service, canary=service.canary))
    return layers


async def _expected(request: Request, error: SluiceError) -> Response:
    return response_of(error, request.url.path)


async def _refused(request: Request, error: HTTPException) -> Response:
    message = f"{request.method} {request.url.path}: {error.detail}"
    headers = dict(error.headers or {})
    return response_of_status(error.status_code, message, headers, request.url.path)


async def _gone(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
