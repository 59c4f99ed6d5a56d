"""Border: what holds for every HTTP answer: a request id, the API key, no error without shape."""

from __future__ import annotations

import logging
import re
import uuid
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sluice.router.common.auth import ApiKeys, check_api_key
from sluice.router.common.errors import Forbidden, Unauthorized, internal_error, response_of
from sluice.router.common.events import log_event

logger = logging.getLogger(__name__)

SANE_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


class Border:
    """ASGI middleware. Brings `scope["path"]` into one form, and sets
    `scope["state"]["request_id"]`, unique within the deployment.

    A client's own x-request-id is echoed as it is; inside it gets a unique end, so that two
    requests with the same header never meet.
    """

    def __init__(self, app: ASGIApp, api_keys: ApiKeys) -> None:
        self._app = app
        self._api_keys = api_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = {**scope, "path": _plain_path(scope["path"])}
        headers = dict(scope["headers"])
        shown, unique = _request_ids(headers.get(b"x-request-id", b""))
        scope.setdefault("state", {})["request_id"] = unique
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", shown),
                    (b"request-id", shown),  # what Anthropic's clients look for
                ]
                if (status := message["status"]) >= HTTPStatus.BAD_REQUEST:
                    log_event(
                        logger, "refused", request_id=unique, path=scope["path"], status=status
                    )
            await send(message)

        try:
            check_api_key(self._api_keys, scope["path"], _key_of(headers))
            await self._app(scope, receive, send_with_id)
        except (Unauthorized, Forbidden) as error:
            await response_of(error, scope["path"])(scope, receive, send_with_id)
        except Exception:
            logger.exception("event=internal_error request_id=%s", unique)
            if started:
                raise  # the server then cuts the connection: nobody takes half an answer for one
            await internal_error(scope["path"])(scope, receive, send_with_id)


def _key_of(headers: dict[bytes, bytes]) -> bytes:
    """The authorization that a client gives; Anthropic's give their key alone."""
    if (key := headers.get(b"x-api-key")) is not None and b"authorization" not in headers:
        return b"Bearer " + key
    return headers.get(b"authorization", b"")


def _plain_path(path: str) -> str:
    """Without slashes that clients write twice or at the end: one path for keys and routes."""
    return "/" + "/".join(part for part in path.split("/") if part)


def _request_ids(given: bytes) -> tuple[bytes, str]:
    """The id to show and the id to use."""
    random = uuid.uuid4().hex
    if SANE_REQUEST_ID.fullmatch(given):
        return given, f"{given.decode('ascii')}-{random[:12]}"
    return random.encode("ascii"), random
