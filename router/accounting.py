"""A request's own record: its last log line and its share of the metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator

from sluice.protocol.messages import SluiceError
from sluice.router.common.events import log_event
from sluice.router.metrics import RouterMetrics
from sluice.router.output_text import Delta

logger = logging.getLogger(__name__)


class RequestRecord:
    """Told of every delta; knows when the first and the last one came. Times: time.monotonic."""

    def __init__(
        self, metrics: RouterMetrics, request_id: str, num_prompt_tokens: int, arrived: float
    ) -> None:
        self._metrics = metrics
        self._request_id = request_id
        self._num_prompt_tokens = num_prompt_tokens
        self._arrived = arrived
        self._first_at: float | None = None
        self._num_tokens = 0
        self._num_cached_tokens = 0
        self._nodes = ("-", "-")
        self._finished = False

    def delta(self, delta: Delta, nodes: tuple[str, str]) -> None:
        now = time.monotonic()
        self._nodes, self._num_cached_tokens = nodes, delta.num_cached_tokens
        if self._first_at is None:
            self._first_token(now)
        self._metrics.generation_tokens.inc(delta.num_tokens - self._num_tokens)
        self._metrics.recent.add_tokens(delta.num_tokens - self._num_tokens)
        self._num_tokens = delta.num_tokens
        if delta.finish_reason is not None:
            self._finish(now, delta.finish_reason.value)

    def fail(self, code: str, detail: object) -> None:
        if self._finished:
            return
        self._metrics.failures.labels(code).inc()
        level = logging.INFO if code == "cancelled" else logging.WARNING
        self._log_end("failed", time.monotonic(), level, code=code, detail=detail)

    def _first_token(self, now: float) -> None:
        self._first_at = now
        self._metrics.first_token_s.observe(now - self._arrived)
        self._metrics.recent.add_first_token(now - self._arrived)
        self._metrics.prompt_tokens.inc(self._num_prompt_tokens)

    def _finish(self, now: float, reason: str) -> None:
        self._finished = True
        self._metrics.successes.labels(reason).inc()
        self._metrics.request_s.observe(now - self._arrived)
        if self._first_at is not None and self._num_tokens > 1:
            per_token_s = (now - self._first_at) / (self._num_tokens - 1)
            self._metrics.per_token_s.observe(per_token_s)
            self._metrics.recent.add_per_token(per_token_s)
        self._log_end("finished", now, reason=reason)

    def _log_end(self, event: str, now: float, level: int = logging.INFO, **why: object) -> None:
        """The one line that says all of a request."""
        prefill, decode = self._nodes
        log_event(
            logger,
            event,
            level=level,
            request_id=self._request_id,
            **why,
            prompt_tokens=self._num_prompt_tokens,
            cached_tokens=self._num_cached_tokens,
            tokens=self._num_tokens,
            first_token_s=None if self._first_at is None else self._first_at - self._arrived,
            took_s=now - self._arrived,
            prefill=prefill,
            decode=decode,
        )


@contextlib.contextmanager
def recorded(
    metrics: RouterMetrics, request_id: str, num_prompt_tokens: int, arrived: float
) -> Iterator[RequestRecord]:
    """Count and log a request from arrival to whatever ends it."""
    record = RequestRecord(metrics, request_id, num_prompt_tokens, arrived)
    try:
        yield record
    except SluiceError as error:
        record.fail(error.code, error)
        raise
    except (asyncio.CancelledError, GeneratorExit):
        record.fail("cancelled", "the client left")
        raise
    except Exception as error:
        record.fail("internal_error", type(error).__name__)  # its words may hold the answer's text
        raise
