"""Tracing: one trace for each request, from the router through prefill and transfers to decode.

Optional, by the extra `otel`. Until `export_to` is called a span is a constant that does nothing.
A span's place in its trace travels between processes as a W3C traceparent, in GenerateRequest.
Spans have ids, counts and reasons but no text of prompts or answers.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sluice.protocol.messages import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

EXPORT_LIMIT_S = 3.0  # for one batch, repeats included, so that no process ends late by more

_provider: TracerProvider | None = None  # one for each process, as OpenTelemetry has it


class Span:
    """A piece of a request's work. As it is here, it records nothing."""

    traceparent = ""

    def fail(self, reason: str) -> None:
        """Mark the work as failed; it still has to end."""

    def end(self, **attributes: str | int | float) -> None:
        """The work is over; call it once."""

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if kind is not None and issubclass(kind, Exception):  # no leaving client
            self.fail(kind.__name__)
        self.end()


NO_SPAN = Span()


class _RecordedSpan(Span):
    def __init__(self, span: Any) -> None:
        self._span = span
        context = span.get_span_context()
        ids = f"{context.trace_id:032x}-{context.span_id:016x}"
        self.traceparent = f"00-{ids}-{context.trace_flags:02x}"

    def fail(self, reason: str) -> None:
        from opentelemetry.trace import StatusCode

        self._span.set_status(StatusCode.ERROR, reason)

    def end(self, **attributes: str | int | float) -> None:
        self._span.set_attributes(attributes)
        self._span.end()


def begin_span(
    name: str, parent: str, *, seconds_ago: float = 0.0, **attributes: str | int | float
) -> Span:
    """A span that began so many seconds ago. parent: a traceparent; any other text starts a trace.

    Any thread. Give `request_id`, by which logs are searched too.
    """
    if _provider is None:
        return NO_SPAN
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract({"traceparent": parent})
    began = time.time_ns() - int(seconds_ago * 1e9)
    tracer = _provider.get_tracer("sluice")
    return _RecordedSpan(tracer.start_span(name, context, attributes=attributes, start_time=began))


def make_exporter(endpoint: str) -> SpanExporter:
    """Sends spans to an OTLP collector over HTTP. Raises ConfigError without the extra `otel`."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(
            f"otlp_endpoint {endpoint}: {error}; run `pip install '.[otel]'` in Sluice's "
            "folder on every host, or leave the key out"
        ) from error
    return OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_LIMIT_S)


def export_to(endpoint: str | None, process: str) -> None:
    """Record this process's spans from now on and send them to a collector; None: record none.

    process: what it is called in traces. Raises ConfigError.
    """
    if endpoint is not None:
        exporter = make_exporter(endpoint)
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        record(BatchSpanProcessor(exporter), process)


def record(processor: SpanProcessor, process: str) -> None:
    """Hand this process's spans to `processor` from now on."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    global _provider
    resource = Resource.create({"service.name": "sluice", "service.instance.id": process})
    _provider = TracerProvider(resource=resource)
    _provider.add_span_processor(processor)


def stop() -> None:
    """Send what has ended, and record nothing more."""
    global _provider
    if _provider is not None:
        _provider.force_flush()
        _provider = None
