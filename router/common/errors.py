"""Errors as HTTP answers, and the few that exist only at the HTTP border.

All have OpenAI's shape but those of ANTHROPIC_PATHS, whose clients look for another.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse

from sluice.protocol.messages import InvalidRequest, QueueFull, SluiceError, Unavailable

RETRY_AFTER_S = 1
MAX_MESSAGE_CHARACTERS = 2000
MAX_PARAM_CHARACTERS = 200
ANTHROPIC_PATHS = "/v1/messages"
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class BodyTooLarge(InvalidRequest):
    status = 413
    code = "body_too_large"


class WrongContentType(InvalidRequest):
    status = 415
    code = "unsupported_media_type"


class Unauthorized(SluiceError):
    status = 401
    code = "invalid_api_key"


class Forbidden(SluiceError):
    status = 403
    code = "admin_key_required"


class TooManyLargeBodies(Unavailable):
    code = "too_many_large_bodies"


class TemplateFailed(SluiceError):
    """The checkpoint's own chat template does not come to an end."""

    code = "chat_template_failed"


def too_long(problem: str, *, max_context_tokens: int, param: str) -> InvalidRequest:
    """For more tokens than fit. Clients look for the code, or these very words, and shorten it."""
    return InvalidRequest(
        f"{problem}. This model's maximum context length is {max_context_tokens} tokens, "
        "prompt and output together",
        param=param,
        code="context_length_exceeded",
    )


def error_body(
    message: str, *, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`, with an end to what a client wrote."""
    message, param = (
        _cut(message, MAX_MESSAGE_CHARACTERS),
        param and _cut(param, MAX_PARAM_CHARACTERS),
    )
    return {"error": {"message": message, "type": _type_of(status), "param": param, "code": code}}


def body_of(error: SluiceError) -> dict[str, Any]:
    return error_body(
        str(error), status=error.status, param=getattr(error, "param", None), code=error.code
    )


def anthropic_error(body: dict[str, Any], *, status: int) -> dict[str, Any]:
    """The same error in Anthropic's shape; its message begins with the field."""
    usual = "api_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    kind = ANTHROPIC_TYPES.get(status, usual)
    return {"type": "error", "error": {"type": kind, "message": body["error"]["message"]}}


def response_of(error: SluiceError, path: str) -> JSONResponse:
    headers = {}
    if isinstance(error, QueueFull | Unavailable):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return _response(body_of(error), error.status, headers, path)


def _response(
    body: dict[str, Any], status: int, headers: dict[str, str] | None, path: str
) -> JSONResponse:
    if path.startswith(ANTHROPIC_PATHS):
        body = anthropic_error(body, status=status)
    return JSONResponse(body, status, headers)


def error_of_status(status: int, message: str) -> dict[str, Any]:
    """For refusals that come from below the application; the code is the status in words."""
    code = HTTPStatus(status).phrase.lower().replace(" ", "_")
    return error_body(message, status=status, code=code)


def response_of_status(
    status: int, message: str, headers: dict[str, str] | None, path: str
) -> JSONResponse:
    """For refusals that come from the web framework, such as an unknown path."""
    return _response(error_of_status(status, message), status, headers, path)


def internal_error(path: str) -> JSONResponse:
    """For a bug: the log has the details, the client gets the request id in the header."""
    message = "internal error; the server's log has the details under this x-request-id"
    return _response(error_body(message, status=500, code="internal_error"), 500, None, path)


def _cut(text: str, max_characters: int) -> str:
    return text if len(text) <= max_characters else text[:max_characters] + "..."


def _type_of(status: int) -> str:
    if status == HTTPStatus.UNAUTHORIZED:
        return "authentication_error"
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    return "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
