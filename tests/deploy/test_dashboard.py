"""The Grafana dashboard: Grafana can load it, it asks for every metric there is and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sluice.engine.metrics import NodeMetrics
from sluice.router.metrics import RouterMetrics

PATH = Path(__file__).parents[2] / "deploy/grafana/dashboard.json"
SOURCE = {
    "type": "object",
    "required": ["type", "uid"],
    "properties": {"type": {"const": "prometheus"}, "uid": {"const": "${datasource}"}},
}
TARGET = {
    "type": "object",
    "required": ["refId", "expr", "datasource", "legendFormat"],
    "properties": {"expr": {"type": "string", "minLength": 1}, "datasource": SOURCE},
}
PANEL = {
    "type": "object",
    "required": ["id", "type", "title", "gridPos"],
    "properties": {
        "gridPos": {"type": "object", "required": ["h", "w", "x", "y"]},
        "targets": {"type": "array", "minItems": 1, "items": TARGET},
    },
    "if": {"properties": {"type": {"const": "timeseries"}}},
    "then": {"required": ["targets", "datasource", "fieldConfig", "description"]},
}
SCHEMA = {
    "type": "object",
    "required": ["uid", "title", "schemaVersion", "panels", "templating", "time", "refresh"],
    "properties": {
        "panels": {"type": "array", "minItems": 1, "items": PANEL},
        "templating": {
            "type": "object",
            "properties": {
                "list": {"contains": {"properties": {"type": {"const": "datasource"}}}},
            },
            "required": ["list"],
        },
    },
}


@pytest.fixture(scope="module")
def dashboard():
    return json.loads(PATH.read_text(encoding="utf-8"))


def queries(dashboard):
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


def registered():
    """Every metric of router and nodes, with the endings its samples have."""
    text = RouterMetrics(list, lambda: 0, lambda: 0).render().decode()
    families = [(f.name, f.type) for f in text_string_to_metric_families(text)]
    families += [(f.name, f.kind) for f in NodeMetrics().families()]
    endings = {"counter": "_total", "histogram": "_bucket", "gauge": ""}
    return {name + endings[kind] for name, kind in families}


def test_it_has_the_form_that_grafana_loads(dashboard):
    jsonschema.validate(dashboard, SCHEMA)
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


def test_it_asks_for_every_metric_there_is_and_no_other(dashboard):
    asked = {name for query in queries(dashboard) for name in re.findall(r"sluice:\w+", query)}
    assert asked == registered()


def test_no_query_names_a_pool_or_a_node(dashboard):
    for query in queries(dashboard):
        assert not re.search(r'\b(pool|node)\s*=~?\s*"(?!\$)', query), query


def test_panels_do_not_overlap(dashboard):
    taken = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
