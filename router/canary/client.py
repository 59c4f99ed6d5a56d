"""CanaryClient: asks the canary over HTTP; whatever goes wrong there is CanaryFailed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from sluice.protocol.config import CanaryConfig
from sluice.protocol.messages import ConfigError, SluiceError
from sluice.router.canary.transcript import DONE, split_events
from sluice.router.common.auth import read_api_keys

MARK = "x-sluice-canary"  # on what we send: two deployments that are each other's canary end there
MAX_BYTES = 1 << 20  # of a request or of an answer; longer ones are not tried
CONNECT_LIMIT_S = 5.0


class CanaryFailed(SluiceError):
    """The canary did not answer, or broke off."""

    status = 502
    code = "canary_failed"


class CanaryRefused(CanaryFailed):
    """It lives, but says that the request is not one it can answer (4xx)."""


@dataclass(frozen=True)
class Sent:
    """A client's request as it came: the JSON body, which may be malformed, and where it went."""

    path: str
    body: bytes
    request_id: str


class CanaryClient:
    """Belongs to one event loop. Raises ConfigError if the URL or the key file cannot be used."""

    def __init__(self, config: CanaryConfig, max_connections: int) -> None:
        self._model = config.model
        self._http = _connect(config, max_connections)

    async def close(self) -> None:
        await self._http.aclose()

    def fields(self, sent: Sent) -> dict[str, Any] | None:
        """The client's body as it is sent on, or None if it is no JSON object."""
        try:
            fields = json.loads(sent.body)
        except (ValueError, RecursionError):
            return None
        if not isinstance(fields, dict):
            return None
        return fields | ({"model": self._model} if self._model else {})

    async def events(
        self, sent: Sent, fields: Mapping[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The JSON objects of the canary's answer: one if it is whole."""
        headers = {"x-request-id": sent.request_id, "content-type": "application/json"}
        content = json.dumps(fields).encode()
        with failures_mapped():
            async with self._http.stream(
                "POST", sent.path, content=content, headers=headers
            ) as answer:
                if answer.status_code != httpx.codes.OK:
                    failure = CanaryRefused if answer.is_client_error else CanaryFailed
                    raise failure(f"the canary answered with status {answer.status_code}")
                body = _limited(answer.aiter_bytes())
                if fields.get("stream") is True:
                    async for event in _events_in(body):
                        yield event
                else:
                    yield _object(b"".join([chunk async for chunk in body]))


@contextlib.contextmanager
def failures_mapped() -> Iterator[None]:
    """A connection that breaks, or a limit that passes, as CanaryFailed."""
    try:
        yield
    except TimeoutError as error:
        raise CanaryFailed("no answer from the canary within router.canary.timeout_s") from error
    except httpx.HTTPError as error:
        raise CanaryFailed(f"the canary's connection: {type(error).__name__}: {error}") from error


def _connect(config: CanaryConfig, max_connections: int) -> httpx.AsyncClient:
    keys = read_api_keys(config.api_keys_file, "router.canary.api_keys_file")
    key = keys.for_serving
    headers = {MARK: "1"} | ({"authorization": f"Bearer {key.decode()}"} if key else {})
    connect_s = min(CONNECT_LIMIT_S, config.timeout_s)
    try:
        return httpx.AsyncClient(
            base_url=config.url,
            headers=headers,
            timeout=httpx.Timeout(config.timeout_s, connect=connect_s),
            limits=httpx.Limits(max_connections=max_connections),
            trust_env=False,
        )
    except (httpx.InvalidURL, ValueError) as error:
        raise ConfigError(
            f"router.canary.url {config.url!r}: {error}; expected one such as http://127.0.0.1:8001"
        ) from error


async def _limited(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    num_bytes = 0
    async for chunk in chunks:
        num_bytes += len(chunk)
        if num_bytes > MAX_BYTES:
            raise CanaryFailed(f"the canary's answer has more than {MAX_BYTES} bytes")
        yield chunk


async def _events_in(chunks: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """Server-sent events up to [DONE]."""
    rest = b""
    async for chunk in chunks:
        events, rest = split_events(rest + chunk)
        for event in events:
            if event == DONE:
                return
            yield _object(event)
    raise CanaryFailed("the canary's stream ended without [DONE]")


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise CanaryFailed(f"the canary's answer is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CanaryFailed(
            f"the canary's answer is a {type(value).__name__}, expected a JSON object"
        )
    return value
