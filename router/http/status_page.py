"""The status page at `/`: nodes, pools, load and the latest troubles, for a person's eyes.

Rendered here, without assets from anywhere. Where API keys are set, the page says nothing without
one: it asks for a key, which the browser keeps for the tab and sends as a header, never in a URL.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

import jinja2
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Route

from sluice.protocol.messages import Role, Unavailable
from sluice.router.common.auth import opens_admin
from sluice.router.http.admin import cluster_status
from sluice.router.service import RouterService

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; img-src data:; connect-src 'self'; "
    "style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; frame-ancestors 'none'",
}


def page_routes(service: RouterService) -> list[Route]:
    template = _template()

    async def page(request: Request) -> HTMLResponse:
        given = request.headers.get("authorization", "").encode()
        allowed = opens_admin(service.api_keys, given)
        view = await _view(service) if allowed else {}
        nonce = secrets.token_urlsafe(16)
        return HTMLResponse(
            template.render(allowed=allowed, refused=bool(given), nonce=nonce, **view),
            200 if allowed else 401,
            {name: value.format(nonce=nonce) for name, value in HEADERS.items()},
        )

    return [Route("/", page)]


async def _view(service: RouterService) -> dict[str, Any]:
    """What the template shows of a service."""
    status = await cluster_status(service)
    recent = service.metrics.recent
    return {
        "model": service.model_name,
        "unready": _why_unready(service),
        "roles": [
            (role.value, status["targets"][role.value], _nodes_of(status["nodes"], role))
            for role in Role
        ],
        "num_running": service.num_running,
        "num_queued": len(service.queue),
        "tokens_by_second": recent.tokens_by_second(),
        "first_token_s": recent.median_first_token_s,
        "per_token_s": recent.median_per_token_s,
        "troubles": list(service.troubles),
        "now": time.time(),
    }


def _why_unready(service: RouterService) -> str:
    try:
        service.check_ready()
    except Unavailable as error:
        return str(error)
    return ""


def _nodes_of(nodes: list[dict[str, Any]], role: Role) -> list[dict[str, Any]]:
    return [node for node in nodes if node["role"] == role.value]


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sluice.router.http", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["duration"] = _duration
    environment.filters["ago"] = _ago
    return environment.get_template("status_page.html")


def _duration(seconds: float | None) -> str:
    """Three digits or so with a unit; a dash for None."""
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{seconds * 1000:.{1 if seconds < 0.1 else 0}f} ms"
    return f"{seconds:.{2 if seconds < 10 else 0}f} s"


def _ago(seconds: float) -> str:
    """How long ago something was, in the largest unit that fits."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"
