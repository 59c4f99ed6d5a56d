"""Endpoints for operators: liveness, readiness, metrics, and the cluster's size."""

from __future__ import annotations

from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sluice.protocol.messages import NodeEntry, NodeState, Role, Unavailable
from sluice.router.common.auth import check_any_key
from sluice.router.common.body import MAX_SMALL_BODY_BYTES
from sluice.router.common.errors import response_of
from sluice.router.http.openapi import openapi
from sluice.router.reading.parsing import parse
from sluice.router.reading.schemas import DrainRequest, ScaleRequest
from sluice.router.service import RouterService


def admin_routes(service: RouterService) -> list[Route]:
    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(request: Request) -> Response:
        try:
            service.check_ready()
        except Unavailable as error:
            return response_of(error, request.url.path)
        return JSONResponse({"status": "ready"})

    async def metrics(request: Request) -> Response:
        if service.config.router.metrics_key:
            check_any_key(
                service.api_keys, request.headers.get("authorization", "").encode("latin-1")
            )
        return Response(await service.rendered_metrics(), media_type=CONTENT_TYPE_LATEST)

    async def description(_: Request) -> Response:
        return JSONResponse(openapi(service.model_name))

    async def status(_: Request) -> Response:
        return JSONResponse(await cluster_status(service))

    async def scale(request: Request) -> Response:
        async with service.bodies.read(request, MAX_SMALL_BODY_BYTES) as body:
            schema = parse(ScaleRequest, body)
        await service.cluster.scale(Role(schema.role), schema.replicas)
        return await status(request)

    async def drain(request: Request) -> Response:
        async with service.bodies.read(request, MAX_SMALL_BODY_BYTES) as body:
            schema = parse(DrainRequest, body)
        await service.cluster.drain(schema.node)
        return await status(request)

    return [
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", metrics),
        Route("/openapi.json", description),
        Route("/admin/status", status),
        Route("/admin/scale", scale, methods=["POST"]),
        Route("/admin/drain", drain, methods=["POST"]),
    ]


async def cluster_status(service: RouterService) -> dict[str, Any]:
    """The cluster's nodes with the numbers the router has of them."""
    await service.refresh()
    state = await service.cluster.state()
    return {
        "nodes": [_node(service, entry) for entry in state.nodes],
        "targets": {role.value: state.targets.get(role, 0) for role in Role},
    }


def _node(service: RouterService, entry: NodeEntry) -> dict[str, Any]:
    view = service.nodes.find(entry.node_id)
    status = view.status if view is not None else None
    state, detail = entry.state, entry.detail
    if view is not None and view.lost_because is not None and state is NodeState.READY:
        state, detail = NodeState.DEAD, view.lost_because  # the router notices before the cluster
    elif view is not None and view.breaker.is_open:
        detail = "its last requests failed; one at a time tries it again"
    return {
        "id": entry.node_id,
        "role": entry.role.value,
        "state": state.value,
        "host": entry.host,
        "running": status.running if status is not None else 0,
        "waiting": status.waiting if status is not None else 0,
        "pools": {name: dict(pages) for name, pages in status.pools.items()} if status else {},
        "detail": detail,
    }
