"""Nodes that answer at once, and the router over them: what is left is what the router costs.

They speak the client protocols of sluice.protocol.messages within the router's process; nothing is
computed and nothing goes over a wire.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

import uvloop

from sluice.cache.spec import Full, PoolSpec
from sluice.deploy.common.collector import spare_streams
from sluice.deploy.common.logs import log_to_stderr
from sluice.protocol.config import parse_config
from sluice.protocol.messages import (
    ClusterState,
    FinishReason,
    GenerateRequest,
    InvalidRequest,
    NodeInfo,
    NodeStatus,
    PageGrant,
    PrefillResult,
    Role,
    RouterStatus,
    TokenChunk,
)
from sluice.router.http.server import serve
from sluice.router.service import RouterService

MODEL = Path(__file__).parents[1] / "deploy/models/tiny-v4"
SPEC = PoolSpec("pages", (0,), (4,), "float32", 1, 64, Full())
FIRST_TOKEN_ID = 300  # below are the special tokens, which have no text


class InstantDecode:
    """Grants everything; sends all tokens of a request, each in a step of its own, when it is told
    that the prompt is there."""

    def __init__(self) -> None:
        self.info = _info(Role.DECODE)
        self._grants = itertools.count(1)
        self._steps: asyncio.Queue[list[TokenChunk]] = asyncio.Queue()

    async def reserve(self, request: GenerateRequest) -> PageGrant:
        number = next(self._grants)
        info, num_tokens = self.info, len(request.token_ids)
        return PageGrant(
            f"grant-{number}", number, info.node_id, "1", request.request_id, num_tokens, {}, 60.0
        )

    async def release(self, request_id: str, *, in_flight: bool) -> None:
        """Nothing is kept."""

    def begin(self, request: GenerateRequest) -> None:
        """The prompt's pages have come, and its first token was told."""
        num_tokens = request.sampling.max_tokens
        for number in range(1, num_tokens):
            finish = FinishReason.LENGTH if number == num_tokens - 1 else None
            token_ids = (FIRST_TOKEN_ID + number,)
            chunk = TokenChunk(request.request_id, token_ids, finish, position=number)
            self._steps.put_nowait([chunk])

    async def tokens(self, router_id: str, number: int = 0) -> AsyncIterator[list[TokenChunk]]:
        while True:
            yield await self._steps.get()

    async def status(
        self, router_id: str, cache_version: int | None = None, *, with_metrics: bool = True
    ) -> NodeStatus:
        return _status(self.info)


class InstantPrefill:
    """Knows the first token of every prompt."""

    def __init__(self, decode: InstantDecode) -> None:
        self.info = _info(Role.PREFILL)
        self._decode = decode

    async def run(self, request: GenerateRequest, grant: PageGrant) -> PrefillResult:
        finish = FinishReason.LENGTH if request.sampling.max_tokens == 1 else None
        if finish is None:
            self._decode.begin(request)
        return PrefillResult(request.request_id, FIRST_TOKEN_ID, finish, 0)

    async def abort(self, request_id: str) -> None:
        """Nothing is under way."""

    async def status(
        self, router_id: str, cache_version: int | None = None, *, with_metrics: bool = True
    ) -> NodeStatus:
        return _status(self.info)


class FixedCluster:
    """The two nodes, for good."""

    async def state(self) -> ClusterState:
        return ClusterState(dict.fromkeys(Role, 1))

    async def routers(self) -> Sequence[RouterStatus]:
        return ()

    async def scale(self, role: Role, replicas: int) -> None:
        raise InvalidRequest(f"{role}: the benchmark's nodes are fixed")

    async def drain(self, node_id: str) -> None:
        raise InvalidRequest(f"{node_id}: the benchmark's nodes are fixed")


def run_router(
    told: Connection,
    replicas: int = 1,
    port: int = 0,
    model: Path = MODEL,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Serve a router over instant nodes, of so many that share the port; a process's whole life.

    The port is told; 0 is any free one. settings: of the config's `router`. It logs as a
    deployment's does, to nowhere.
    """
    sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - for the process's life
    log_to_stderr("text")
    uvloop.run(_run_router(told, port, model, {"replicas": replicas, **settings}))


async def _run_router(
    told: Connection, port: int, model: Path, settings: Mapping[str, Any]
) -> None:
    config = {"model": {"path": str(model), "name": MODEL.name}, "router": settings}
    service = RouterService(parse_config(config), FixedCluster())
    server = await serve(service, "127.0.0.1", port)
    decode = InstantDecode()
    service.set_nodes([InstantPrefill(decode)], [decode])
    spare_streams()  # as the router's process does
    told.send(server.port)
    await server.wait_closed()


def _status(info: NodeInfo) -> NodeStatus:
    return NodeStatus(info.node_id, 0, 0, {}, clock_s=time.monotonic())


def _info(role: Role) -> NodeInfo:
    return NodeInfo(
        node_id=f"{role.value}-0",
        incarnation="1",
        role=role,
        host="here",
        fingerprint="instant",
        specs=(SPEC,),
        max_model_len=2048,
        max_running_requests=256,
        max_batch_tokens=1 << 20,
        num_pages={SPEC.table: 1 << 16},
    )
