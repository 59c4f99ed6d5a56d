"""Endpoints for operators: liveness, readiness, metrics, and the cluster's size."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from sluice.engine.protocol import NodeEntry, NodeState, Role, Unavailable
from sluice.router.body import read_body
from sluice.router.errors import response_of
from sluice.router.openapi import openapi
from sluice.router.parsing import parse
from sluice.router.schemas import DrainRequest, ScaleRequest
from sluice.router.service import RouterService


def admin_routes(service: RouterService) -> APIRouter:
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @routes.get("/ready")
    async def ready() -> Response:
        try:
            service.check_ready()
        except Unavailable as error:
            return response_of(error)
        return JSONResponse({"status": "ready"})

    @routes.get("/metrics")
    async def metrics() -> Response:
        await service.refresh()
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @routes.get("/openapi.json")
    async def description() -> dict[str, Any]:
        return openapi(service.model_name)

    @routes.get("/admin/status")
    async def status() -> dict[str, Any]:
        return await cluster_status(service)

    @routes.post("/admin/scale")
    async def scale(request: Request) -> dict[str, Any]:
        schema = parse(ScaleRequest, await read_body(request))
        await service.cluster.scale(Role(schema.role), schema.replicas)
        return await cluster_status(service)

    @routes.post("/admin/drain")
    async def drain(request: Request) -> dict[str, Any]:
        schema = parse(DrainRequest, await read_body(request))
        await service.cluster.drain(schema.node)
        return await cluster_status(service)

    return routes


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
