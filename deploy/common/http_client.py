"""RouterClient: what the command line asks of a running deployment, over HTTP."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from sluice.protocol.messages import InvalidRequest, SluiceError, Unavailable

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 60.0  # for everything but generation, which takes as long as it takes


class RouterClient:
    """A connection to a router. Raises Unavailable if it cannot be reached.

    certificate: of a deployment of ours, which is trusted whatever name it bears.
    An error answer is raised as InvalidRequest (4xx) or SluiceError with the router's message.
    """

    def __init__(
        self, url: str, api_key: str | None = None, certificate: Path | None = None
    ) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        self.url = url
        self._http = httpx.Client(
            base_url=url,
            headers=headers,
            timeout=timeout,
            trust_env=False,
            verify=True if certificate is None else _trusting(certificate),
        )

    def __enter__(self) -> RouterClient:
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()

    def status(self) -> dict[str, Any]:
        """The cluster's nodes and targets, as GET /admin/status gives them."""
        return dict(self._call("GET", "/admin/status"))

    def scale(self, role: str, replicas: int) -> None:
        self._call("POST", "/admin/scale", {"role": role, "replicas": replicas})

    def drain(self, node_id: str) -> None:
        self._call("POST", "/admin/drain", {"node": node_id})

    def model(self) -> str:
        """The name of the model that is served."""
        return str(self._call("GET", "/v1/models")["data"][0]["id"])

    def count_tokens(self, text: str) -> int:
        """How many tokens a plain text has."""
        return len(self._call("POST", "/tokenize", {"prompt": text})["tokens"])

    def metrics(self) -> str:
        """The text of GET /metrics."""
        with _reachable(self.url):
            answer = self._http.get("/metrics")
        _check(answer)
        return answer.text

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], **sampling: object
    ) -> Iterator[str]:
        """Pieces of the assistant's answer as they arrive."""
        body = {"messages": list(messages), **sampling}
        for choice in self._stream("/v1/chat/completions", body):
            if text := choice["delta"].get("content"):
                yield text

    def complete(self, prompt: str | Sequence[int], **sampling: object) -> dict[str, Any]:
        """The whole answer to a text or to token ids, as POST /v1/completions gives it."""
        body = {"model": self.model(), "prompt": prompt, **sampling}
        endless = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        with _reachable(self.url):
            answer = self._http.post("/v1/completions", json=body, timeout=endless)
        _check(answer)
        return dict(answer.json())

    def _stream(self, path: str, body: dict[str, object]) -> Iterator[dict[str, Any]]:
        """The choices of a streamed answer. Raises SluiceError if it ends with an error."""
        body = {"model": self.model(), "stream": True, **body}
        endless = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        with (
            _reachable(self.url),
            self._http.stream("POST", path, json=body, timeout=endless) as answer,
        ):
            if answer.is_error:
                answer.read()
            _check(answer)
            for event in _events(answer.iter_lines()):
                if "error" in event:
                    raise SluiceError(event["error"]["message"])
                yield from event["choices"]

    def _call(self, method: str, path: str, body: object = None) -> Any:
        with _reachable(self.url):
            answer = self._http.request(method, path, json=body)
        _check(answer)
        return answer.json()


def _trusting(certificate: Path) -> ssl.SSLContext:
    """Trust this very certificate, and no authority."""
    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False  # it may be reached by an address that it does not name
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


@contextmanager
def _reachable(url: str) -> Iterator[None]:
    """Map httpx's transport errors from the block to Unavailable."""
    try:
        yield
    except httpx.TransportError as error:
        raise Unavailable(
            f"{url} does not answer ({error or type(error).__name__}); "
            "`sluice status` says whether a deployment runs, `sluice up CONFIG` starts one"
        ) from error


def _check(answer: httpx.Response) -> None:
    if answer.is_success:
        return
    try:
        message = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = answer.text[:200]
    if answer.is_client_error:
        raise InvalidRequest(message)
    raise SluiceError(f"the router answered {answer.status_code}: {message}")


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event, up to [DONE]."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        yield json.loads(data)
