"""response_format: the schema travels to the nodes as it was written, or is refused at once."""

from __future__ import annotations

import json

import pytest

from sluice.protocol.messages import InvalidRequest

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", None]}}, "required": ["a"]}


@pytest.mark.parametrize("kind", ["complete", "chat"])
async def test_the_schema_reaches_the_nodes_with_its_nulls(world, kind):
    seen = world.seen_requests()
    form = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}
    assert (await getattr(world, kind)(response_format=form)).status_code == 200
    assert json.loads(seen[0].sampling.json_schema) == SCHEMA


async def test_json_object_asks_for_any_object_and_text_for_nothing(world):
    seen = world.seen_requests()
    for kind in ("json_object", "text"):
        await world.complete(response_format={"type": kind})
    schemas = [request.sampling.json_schema for request in seen]
    assert json.loads(schemas[0]) == {"type": "object"} and schemas[1] == ""


async def test_a_node_that_cannot_follow_the_schema_refuses_the_request(world, caplog):
    problem = InvalidRequest("response_format: too large", param="response_format")
    world.decodes["decode-0"].faults = [problem]
    answer = await world.complete(response_format={"type": "json_object"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "response_format"
    await world.until(world.quiescent)
    assert "background_task_failed" not in caplog.text


@pytest.mark.parametrize("schema", [{"type": "nothing"}, {"not": {}}, {"$ref": "http://x/y"},
                                    {"type": "string", "pattern": "("}])  # fmt: skip
async def test_schemas_that_no_grammar_follows_are_refused(world, schema):
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    answer = await world.complete(response_format=form)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "response_format"
    assert not world.prefills["prefill-0"].calls
