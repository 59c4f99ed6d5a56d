"""The OpenAPI description of everything the router serves, made of the schemas that check it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic.json_schema import models_json_schema

from sluice.router.anthropic import request as messages_request
from sluice.router.anthropic.request import CountRequest, MessagesRequest
from sluice.router.common.errors import ANTHROPIC_PATHS
from sluice.router.openai.responses import request as responses_request
from sluice.router.openai.responses.request import ResponsesRequest
from sluice.router.reading.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    DrainRequest,
    ScaleRequest,
    Schema,
    TokenizeRequest,
)

REFERENCE = "#/components/schemas/{model}"
ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
ANTHROPIC_ERROR = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            "required": ["type", "message"],
        },
    },
    "required": ["type", "error"],
}


@dataclass(frozen=True)
class Endpoint:
    """One operation. `answer`: required fields of its JSON answer, or None for another format."""

    method: str
    path: str
    summary: str
    body: type[Schema] | None = None
    answer: tuple[str, ...] | None = ()
    streams: bool = False


# Fields that these take as chat does.
SHARED: dict[type[Schema], tuple[str, ...]] = {
    MessagesRequest: messages_request.SHARED,
    ResponsesRequest: responses_request.SHARED,
}
COMPLETION = ("id", "object", "created", "model", "choices", "usage")
ENDPOINTS = (
    Endpoint(
        "post", "/v1/chat/completions", "Answer a conversation", ChatRequest, COMPLETION, True
    ),
    Endpoint("post", "/v1/completions", "Continue a text", CompletionRequest, COMPLETION, True),
    Endpoint(
        "post",
        "/v1/responses",
        "Answer a conversation, as OpenAI's newer API has it",
        ResponsesRequest,
        ("id", "object", "status", "model", "output", "usage"),
        True,
    ),
    Endpoint(
        "post",
        "/v1/messages",
        "Answer a conversation, as Anthropic's API has it",
        MessagesRequest,
        ("id", "type", "role", "model", "content", "stop_reason", "usage"),
        True,
    ),
    Endpoint(
        "post",
        "/v1/messages/count_tokens",
        "The length of such a conversation",
        CountRequest,
        ("input_tokens",),
    ),
    Endpoint("get", "/v1/models", "The models served here", answer=("object", "data")),
    Endpoint("get", "/v1/models/{name}", "One model", answer=("id", "object", "created")),
    Endpoint("post", "/tokenize", "Text to token ids", TokenizeRequest, ("tokens", "count")),
    Endpoint("post", "/detokenize", "Token ids to text", DetokenizeRequest, ("prompt",)),
    Endpoint("get", "/health", "Whether the process lives", answer=("status",)),
    Endpoint("get", "/ready", "Whether requests are answered", answer=("status",)),
    Endpoint("get", "/metrics", "Prometheus metrics of router and nodes", answer=None),
    Endpoint("get", "/openapi.json", "This description", answer=("openapi", "paths")),
    Endpoint("get", "/admin/status", "Nodes and targets", answer=("nodes", "targets")),
    Endpoint("post", "/admin/scale", "Set a role's size", ScaleRequest, ("nodes", "targets")),
    Endpoint("post", "/admin/drain", "Take a node away", DrainRequest, ("nodes", "targets")),
)


def openapi(model_name: str) -> dict[str, Any]:
    """The document, as it is served at /openapi.json. model_name: the one model there is."""
    bodies = [endpoint.body for endpoint in ENDPOINTS if endpoint.body is not None]
    _, definitions = models_json_schema(
        [(body, "validation") for body in bodies], ref_template=REFERENCE
    )
    of_chat = definitions["$defs"][ChatRequest.__name__]["properties"]
    for body, names in SHARED.items():
        shared = {name: of_chat[name] for name in names if name in of_chat}
        own = definitions["$defs"][body.__name__]
        own["properties"] = shared | own["properties"]
    for definition in definitions["$defs"].values():
        if "model" in definition["properties"]:
            definition["properties"]["model"] = {"type": "string", "enum": [model_name]}
    paths: dict[str, Any] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Sluice", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"] | {"Error": ERROR, "AnthropicError": ANTHROPIC_ERROR},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "anthropic_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        # A key is needed only where the operator has set some.
        "security": [{}, {"key": []}, {"anthropic_key": []}],
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    shape = "AnthropicError" if endpoint.path.startswith(ANTHROPIC_PATHS) else "Error"
    error = {"application/json": {"schema": {"$ref": REFERENCE.format(model=shape)}}}
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "responses": {
            "200": {"description": "The answer", "content": _content(endpoint)},
            "4XX": {"description": "The request is at fault", "content": error},
            "5XX": {"description": "It cannot be answered now", "content": error},
        },
    }
    if endpoint.body is not None:
        schema = {"$ref": REFERENCE.format(model=endpoint.body.__name__)}
        content = {"application/json": {"schema": schema}}
        operation["requestBody"] = {"required": True, "content": content}
    if "{name}" in endpoint.path:
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [name]
    return operation


def _content(endpoint: Endpoint) -> dict[str, Any]:
    if endpoint.answer is None:
        return {"text/plain": {"schema": {"type": "string"}}}
    answer = {"type": "object", "required": list(endpoint.answer)}
    content: dict[str, Any] = {"application/json": {"schema": answer}}
    if endpoint.streams:
        content["text/event-stream"] = {}  # a schema would be taken for the stream's or an event's
    return content
