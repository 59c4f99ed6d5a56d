"""Spans: nothing without a collector, and what reaches one."""

from __future__ import annotations

import queue
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from sluice.protocol import tracing
from sluice.protocol.messages import ConfigError


@pytest.fixture
def collector():
    """The URL of an HTTP server, and a queue of (path, body) of what is posted to it."""
    posted = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            posted.put((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", posted
        server.shutdown()


def test_without_a_collector_a_span_is_a_constant():
    tracing.export_to(None, "here")
    span = tracing.begin_span("work", "", request_id="r")
    assert span is tracing.NO_SPAN and span.traceparent == ""
    with span:
        span.fail("nobody hears it")


def test_spans_reach_the_collector_with_their_attributes(collector):
    url, posted = collector
    tracing.export_to(url, "decode-7")
    with pytest.raises(RuntimeError), tracing.begin_span("work", "", request_id="r-1") as span:
        assert span.traceparent.startswith("00-")
        raise RuntimeError("secret words")
    tracing.stop()
    path, body = posted.get(timeout=10)
    assert path == "/v1/traces" and b"secret" not in body
    assert all(word in body for word in (b"work", b"r-1", b"decode-7", b"RuntimeError"))


def test_without_the_extra_an_endpoint_is_a_config_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"otlp_endpoint.*\.\[otel\]"):
        tracing.export_to("http://127.0.0.1:1", "here")
