"""Canary: a second deployment that a share of the requests is tried on, over HTTP.

With `shadow` a copy of a request goes to it once the client has its answer. Nobody waits for that:
copies beyond MAX_PENDING are dropped, MAX_AT_ONCE are sent at a time, each may take `timeout_s`.
Only reproducible requests are compared, those at temperature 0 or with a seed.

Without `shadow` the canary answers its share of the clients, and whoever asks it falls back to our
own nodes if it fails before the first piece. After a failure it is left alone for REST_S, so that
a dead or hanging one delays few clients.

Life: 1. constructed  2. `draws` for each request, then `shadow`, or `whole` or `stream`
      3. retire: nothing new  4. close: what runs may end within a limit, connections end
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import Any, Literal

from sluice.protocol.config import CanaryConfig
from sluice.router.canary.client import (
    CanaryClient,
    CanaryFailed,
    CanaryRefused,
    Sent,
    failures_mapped,
)
from sluice.router.canary.transcript import Said, first_difference, transcript, transcript_of_body
from sluice.router.common.background import Background
from sluice.router.common.events import log_event

logger = logging.getLogger(__name__)

MAX_PENDING = 64  # copies, or clients, that the canary has to do with at a time
MAX_AT_ONCE = 4  # copies under way
REST_S = 5.0

Result = Literal["agreed", "disagreed", "failed", "skipped", "answered"]


class Canary:
    """Belongs to one event loop. `count` is told what became of each request that was drawn.

    Raises ConfigError if the URL or the key file cannot be used.
    """

    def __init__(
        self,
        config: CanaryConfig,
        count: Callable[[Result], None],
        rng: random.Random | None = None,
    ) -> None:
        self._config = config
        self._count = count
        self._rng = rng or random.Random()
        self._client = CanaryClient(config, MAX_PENDING)
        self._background = Background()
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)
        self._num_pending = 0
        self._rests_until = 0.0  # time.monotonic()
        self._retired = False

    @property
    def shadows(self) -> bool:
        return self._config.shadow

    def draws(self) -> bool:
        """Whether the next request is one of the canary's share."""
        return not self._retired and self._rng.random() < self._config.weight

    def retire(self) -> None:
        self._retired = True

    async def close(self, limit_s: float) -> None:
        await self._background.drain(limit_s)
        await self._client.close()

    def shadow(self, sent: Sent | None, answer: bytes | None) -> None:
        """Try the request on the canary, later, and compare. `answer`: the body our client got.

        None stands for one that is too long, or was an error.
        """
        if sent is None or answer is None or self._num_pending >= MAX_PENDING:
            self._count("skipped")
            return
        self._num_pending += 1
        self._background.spawn(self._try(sent, answer))

    async def _try(self, sent: Sent, answer: bytes) -> None:
        try:
            self._count(await self._compare(sent, answer))
        finally:
            self._num_pending -= 1

    async def _compare(self, sent: Sent, answer: bytes) -> Result:
        fields = await asyncio.to_thread(self._client.fields, sent)
        ours = await asyncio.to_thread(transcript_of_body, answer)
        if fields is None or ours is None or not _is_reproducible(fields):
            return "skipped"
        try:
            async with self._slots:
                _, theirs = await self._ask(sent, fields)
        except CanaryFailed as error:
            self._log("canary_failed", sent, logging.WARNING, detail=error)
            return "failed"
        difference = first_difference(ours, theirs)
        if difference is None:
            return "agreed"
        place = {"choice": difference.choice, "character": difference.character}
        self._log("canary_disagreed", sent, logging.WARNING, **place)
        return "disagreed"

    def request(self, sent: Sent) -> dict[str, Any] | None:
        """The body to ask the canary with, or None if our own nodes had better answer."""
        busy = self._num_pending >= MAX_PENDING or time.monotonic() < self._rests_until
        fields = None if busy else self._client.fields(sent)
        if fields is None:
            self._count("skipped")
        return fields

    async def whole(self, sent: Sent, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The canary's answer. Raises CanaryFailed, within `timeout_s`."""
        with self._answering(sent):
            (answer,), _ = await self._ask(sent, fields)
            return answer

    async def stream(
        self, sent: Sent, fields: Mapping[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The events of its answer. Raises CanaryFailed if `timeout_s` pass without one."""
        with self._answering(sent):
            async with contextlib.aclosing(self._client.events(sent, fields)) as events:
                empty = True
                while (event := await self._next(events)) is not None:
                    empty = False
                    yield event
            if empty:
                raise CanaryFailed("the canary's stream has no event")

    async def _ask(
        self, sent: Sent, fields: Mapping[str, Any]
    ) -> tuple[list[dict[str, Any]], tuple[Said, ...]]:
        """All events of the canary's answer and what they say. Raises CanaryFailed."""
        with failures_mapped():
            async with asyncio.timeout(self._config.timeout_s):
                events = [event async for event in self._client.events(sent, fields)]
        if (said := transcript(events)) is None:
            raise CanaryFailed("the canary's answer is not a whole one")
        return events, said

    async def _next(self, events: AsyncGenerator[dict[str, Any], None]) -> dict[str, Any] | None:
        async with asyncio.timeout(self._config.timeout_s):
            event = await anext(events, None)
        if event is not None and "error" in event:
            raise CanaryFailed("the canary broke off its answer; send the request again")
        return event

    @contextlib.contextmanager
    def _answering(self, sent: Sent) -> Iterator[None]:
        """Counts, and lets the canary rest after a failure."""
        started = time.monotonic()
        self._num_pending += 1
        try:
            with failures_mapped():
                yield
        except CanaryFailed as error:
            if not isinstance(error, CanaryRefused):
                self._rests_until = time.monotonic() + REST_S
            self._count("failed")
            self._log("canary_failed", sent, logging.WARNING, detail=error)
            raise
        finally:
            self._num_pending -= 1
        self._count("answered")
        self._log("canary_answered", sent, took_s=time.monotonic() - started)

    @staticmethod
    def _log(event: str, sent: Sent, level: int = logging.INFO, **fields: object) -> None:
        log_event(logger, event, level=level, request_id=sent.request_id, **fields)


def _is_reproducible(fields: Mapping[str, Any]) -> bool:
    """Whether the request alone decides the answer."""
    return fields.get("temperature") == 0 or fields.get("seed") is not None
