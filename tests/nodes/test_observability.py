"""What an operator sees of a whole system: real nodes in this process, asked over HTTP."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import httpx
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from sluice.benchmarks.in_process import InProcess
from sluice.protocol import tracing
from sluice.router.http.app import create_app

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "deploy/models/tiny-v4"  # small, trained, with a tokenizer
CACHED = {"prefix_cache": True}
PROMPT = list(range(100, 700))


@pytest.fixture
async def http(config_of):
    """A client of a router over one prefill and one decode node."""
    async with InProcess(config_of(MODEL, prefill=CACHED, decode=CACHED)) as system:
        transport = httpx.ASGITransport(app=create_app(system.service))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client


async def complete(http, headers=None):
    body = {"model": "tiny-v4", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    answer = await http.post("/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text


async def scrape(http):
    text = (await http.get("/metrics")).text
    return {family.name: family for family in text_string_to_metric_families(text)}


def totals(families, name, label):
    """Sums of a counter's samples by one label."""
    found = {}
    for sample in families[name].samples:
        found[sample.labels[label]] = found.get(sample.labels[label], 0) + sample.value
    return found


async def test_the_metrics_are_the_documented_ones(http):
    families = (await scrape(http)).values()
    found = {f.name + ("_total" if f.type == "counter" else "") for f in families}
    text = (ROOT / "docs/observability.md").read_text(encoding="utf-8")
    assert found == set(re.findall(r"^\| `(sluice:\w+)` \|", text, re.MULTILINE))


async def test_a_repeated_prompt_shows_as_hits_on_both_roles_and_as_rows_of_their_pools(http):
    await complete(http)
    before = await scrape(http)
    assert set(totals(before, "sluice:prefix_cache_hits", "role").values()) == {0}
    await complete(http)
    after = await scrape(http)
    assert totals(after, "sluice:prefix_cache_queries", "role") == {"prefill": 1200, "decode": 1200}
    hits = totals(after, "sluice:prefix_cache_hits", "role")
    assert 0 < hits["decode"] <= hits["prefill"] < len(PROMPT)
    rows = totals(after, "sluice:pool_reused_rows", "pool")
    assert rows.keys() == totals(after, "sluice:pool_pages", "pool").keys()
    assert max(rows.values()) == hits["prefill"] // 4 + hits["decode"] // 4  # one row for 4 tokens


@pytest.fixture
def spans():
    """Ends of spans in this process, as they come."""
    exporter = InMemorySpanExporter()
    tracing.record(SimpleSpanProcessor(exporter), "test")
    yield exporter.get_finished_spans
    tracing.stop()


async def test_a_request_is_one_trace_under_the_client_s_own_span(http, spans):
    headers = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "x-request-id": "mine"}
    await complete(http, headers)
    found = {span.name: span for span in spans()}
    assert found.keys() == {"request", "prefill", "transfer", "decode"}
    assert {span.context.trace_id for span in found.values()} == {int("a" * 32, 16)}
    parents = {name: span.parent.span_id for name, span in found.items()}
    request, prefill = (found[name].context.span_id for name in ("request", "prefill"))
    assert parents == {
        "request": int("b" * 16, 16), "prefill": request, "transfer": prefill, "decode": request,
    }  # fmt: skip
    assert all(span.attributes["request_id"].startswith("mine-") for span in found.values())
    assert found["decode"].attributes["output_tokens"] == 4
    assert found["request"].start_time <= found["prefill"].start_time <= found["decode"].start_time


async def test_a_traceparent_that_is_none_starts_a_trace_of_its_own(http, spans):
    await complete(http, {"traceparent": "secret words"})
    assert {span.name for span in spans() if span.parent is None} == {"request"}
    assert "secret" not in str([span.to_json() for span in spans()])


async def test_one_id_finds_every_event_of_a_request_in_the_logs_of_all_nodes(http, caplog):
    caplog.set_level(logging.INFO, logger="sluice")
    await complete(http, {"x-request-id": "mine"})
    lines = [line for line in caplog.messages if "request_id=mine-" in line]
    events = [line.split()[0].removeprefix("event=") for line in lines]
    assert sorted(events) == [
        "decode_started", "dispatched", "finished", "prefill_started",
        "prefilled", "released", "reserved",
    ]  # fmt: skip
    text = (ROOT / "docs/observability.md").read_text(encoding="utf-8").partition("## Logs")[2]
    assert set(events) <= set(re.findall(r"`(\w+)`", text))
