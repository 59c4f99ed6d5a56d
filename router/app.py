"""create_app: the router's HTTP surface over a RouterService.

The app neither starts nor stops the service; sluice.router.server does.
"""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from sluice.engine.protocol import SluiceError
from sluice.router.admin import admin_routes
from sluice.router.canary_border import CanaryBorder
from sluice.router.completions import completion_routes
from sluice.router.errors import response_of, response_of_status
from sluice.router.middleware import Border
from sluice.router.service import RouterService
from sluice.router.status_page import page_routes
from sluice.router.streaming import CLIENT_CLOSED_REQUEST, ClientGone


def create_app(service: RouterService) -> FastAPI:
    """Every error, whoever raises it, leaves in OpenAI's shape and with an x-request-id."""
    app = FastAPI(title="Sluice", openapi_url=None, redirect_slashes=False)
    app.include_router(completion_routes(service))
    app.include_router(admin_routes(service))
    app.include_router(page_routes(service))
    if service.canary is not None:
        app.add_middleware(CanaryBorder, service=service, canary=service.canary)
    app.add_middleware(Border, api_keys=service.api_keys)
    if origins := service.config.router.cors_origins:  # outermost: preflights bear no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-request-id"],
            expose_headers=["x-request-id", "retry-after"],
        )

    @app.exception_handler(SluiceError)
    async def expected(_: Request, error: SluiceError) -> Response:
        return response_of(error)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return response_of_status(error.status_code, message, dict(error.headers or {}))

    @app.exception_handler(ClientGone)
    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    return app
