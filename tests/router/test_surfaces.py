"""Everything around the answers: ids, keys, models, tokenizer, metrics, operators' endpoints."""

from __future__ import annotations

import asyncio
import json
import logging
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sluice.protocol.messages import ConfigError
from sluice.router.anthropic.api import messages_routes
from sluice.router.http.admin import admin_routes
from sluice.router.openai.completions import completion_routes
from sluice.router.openai.responses.api import responses_routes
from sluice.router.reading.schemas import ChatRequest


def samples(text: str) -> dict[tuple, float]:
    families = text_string_to_metric_families(text)
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


async def test_request_ids_are_echoed_and_unique_inside(world):
    headers = {"x-request-id": "mine-1"}
    answers = [await world.http.get("/health", headers=headers)]
    body = {"model": "tiny", "prompt": "a", "max_tokens": 2}
    for _ in range(2):
        answers.append(await world.http.post("/v1/completions", json=body, headers=headers))
    assert {answer.headers["x-request-id"] for answer in answers} == {"mine-1"}
    assert answers[1].json()["id"] != answers[2].json()["id"]
    odd = await world.http.get("/health", headers={"x-request-id": "no spaces please"})
    assert odd.headers["x-request-id"] != "no spaces please"


async def test_keys_open_everything_but_probes(make_world, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# ours\nfirst\nsecond\n")
    world = await make_world(router={"api_keys_file": str(keys)})
    for path in ("/health", "/metrics"):
        assert (await world.http.get(path)).status_code == 200
    for given in ("", "Bearer third", "Basic second", "Bearer "):
        answer = await world.http.get("/v1/models", headers={"authorization": given})
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["x-request-id"]
    good = await world.http.get("/v1/models", headers={"authorization": "Bearer second"})
    assert good.status_code == 200


async def test_admin_endpoints_want_an_admin_key_where_the_file_has_some(make_world, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("user\nadmin: operator\n")
    world = await make_world(router={"api_keys_file": str(keys)})
    seen = {}
    for key in ("user", "operator", "admin:operator", "admin:", "admin:user"):
        headers = {"authorization": f"Bearer {key}"}
        paths = ("/v1/models", "/admin/status")
        seen[key] = [(await world.http.get(path, headers=headers)).status_code for path in paths]
        body = {"node": "decode-0"}
        drain = await world.http.post("/admin/drain", json=body, headers=headers)
        assert drain.status_code != 200
    assert seen.pop("user") == [200, 403] and seen.pop("operator") == [200, 200]
    assert set(map(tuple, seen.values())) == {(401, 401)}


async def test_no_key_is_shown_in_logs_or_answers(make_world, tmp_path, caplog):
    keys = tmp_path / "keys"
    keys.write_text("user-secret\nadmin:admin-secret\n")
    caplog.set_level(0)
    world = await make_world(router={"api_keys_file": str(keys)})
    answers = [
        await world.http.get("/admin/status", headers={"authorization": f"Bearer {key}"})
        for key in ("user-secret", "guess-secret")
    ]
    shown = caplog.text + "".join(answer.text for answer in answers) + repr(world.service.api_keys)
    assert "secret" not in shown.replace("secrets", "")


async def test_browsers_of_other_origins_are_let_in_by_configuration_alone(make_world):
    asked = {"origin": "https://chat.test", "access-control-request-method": "POST"}
    for settings, allowed in (({}, None), ({"cors_origins": ["https://chat.test"]}, asked)):
        world = await make_world(router=settings)
        for headers in (asked, {**asked, "origin": "https://evil.test"}):
            answer = await world.http.options("/v1/chat/completions", headers=headers)
            shown = answer.headers.get("access-control-allow-origin")
            assert shown == (allowed["origin"] if allowed and headers is asked else None)


def test_key_files_that_cannot_work_are_refused(checkpoint, tmp_path):
    from sluice.protocol.config import parse_config
    from sluice.router.service import RouterService

    (tmp_path / "empty").write_text("# none\n")
    (tmp_path / "half").write_text("key\nadmin:\n")
    for name in ("empty", "missing", "half"):
        model, keys = {"path": str(checkpoint)}, {"api_keys_file": str(tmp_path / name)}
        with pytest.raises(ConfigError, match="api_keys_file"):
            RouterService(parse_config({"model": model, "router": keys}), None)


async def test_only_who_asks_for_metrics_gets_them_from_the_nodes(world):
    node, asked = world.prefills["prefill-0"], []
    status = node.status

    async def noted(*args, with_metrics: bool):
        asked.append(with_metrics)
        return await status(*args, with_metrics=with_metrics)

    node.status = noted
    await world.until(lambda: len(asked) == 1)  # a heartbeat
    told = (await world.http.get("/metrics")).text
    assert asked[0] is False and True in asked
    assert 'sluice:transfer_bytes_total{node="prefill-0"' in told


async def test_models_tokenize_and_detokenize(world):
    models = (await world.http.get("/v1/models")).json()["data"]
    assert models[0]["id"] == "tiny" and models[0]["max_model_len"] == 256
    assert (await world.http.get("/v1/models/tiny")).json() == models[0]
    tokens = (await world.http.post("/tokenize", json={"prompt": "the ☕"})).json()
    assert tokens["tokens"] == list(world.ids("the ☕")) and tokens["count"] == len(
        tokens["tokens"]
    )
    messages = [{"role": "user", "content": "hi"}]
    chat = (await world.http.post("/tokenize", json={"messages": messages})).json()
    body = {"tokens": chat["tokens"]}
    text = (await world.http.post("/detokenize", json=body)).json()["prompt"]
    assert text == "<bos><user>hi<assistant>"
    assert (await world.http.post("/tokenize", json={})).status_code == 400
    assert (await world.http.post("/detokenize", json={"tokens": [9999]})).status_code == 400


async def test_metrics_count_requests_and_carry_the_nodes_own(world):
    await world.complete(max_tokens=5)
    found = samples((await world.http.get("/metrics")).text)
    assert found[("sluice:generation_tokens_total",)] == 5
    assert found[("sluice:prompt_tokens_total",)] == len(world.ids("the cat"))
    assert found[("sluice:request_success_total", ("finished_reason", "length"))] == 1
    for name in ("time_to_first_token", "time_per_output_token", "e2e_request_latency"):
        assert found[(f"sluice:{name}_seconds_count",)] == 1
    node = (("node", "decode-0"), ("pool", "pages"), ("role", "decode"))
    assert found[("sluice:transfer_bytes_total", *node)] == 7
    assert found[("sluice:pool_pages", *node, ("state", "free"))] == 64
    assert found[("sluice:num_requests_running", *node[:1], *node[2:])] == 0
    assert found[("sluice:num_requests_waiting", ("node", "router"), ("role", "router"))] == 0


async def test_metrics_take_a_key_where_the_config_says_so(make_world, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("user\nadmin:operator\n")
    world = await make_world(router={"api_keys_file": str(keys), "metrics_key": True})
    for given in ("", "Bearer nobody", "Basic user"):
        answer = await world.http.get("/metrics", headers={"authorization": given})
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    for key in ("user", "operator"):
        headers = {"authorization": f"Bearer {key}"}
        assert (await world.http.get("/metrics", headers=headers)).status_code == 200
    assert (await world.http.get("/health")).status_code == 200
    with pytest.raises(ConfigError, match="metrics_key is true, expected api_keys_file"):
        await make_world(router={"metrics_key": True})


async def test_a_hundred_scrapers_ask_each_node_as_often_as_one(world):
    [prefill] = world.prefills.values()
    asked, status = 0, prefill.status

    async def counted(*arguments, **options):
        nonlocal asked
        asked += 1
        return await status(*arguments, **options)

    prefill.status = counted
    paths = ["/metrics", "/admin/status"] * 50
    answers = await asyncio.gather(*(world.http.get(path) for path in paths))
    assert {answer.status_code for answer in answers} == {200}
    assert asked <= 4, "one collection, the heartbeats beside it, and one more if they came late"
    await world.complete(max_tokens=5)
    found = samples((await world.http.get("/metrics")).text)
    assert found[("sluice:generation_tokens_total",)] == 5, "what was asked later is newer"


async def test_metric_families_of_several_nodes_are_one_family(world):
    world.add_decode("decode-1")
    text = (await world.http.get("/metrics")).text
    assert text.count("# TYPE sluice:transfer_bytes_total counter") == 1
    assert text.count("sluice:transfer_bytes_total{") == 3


SALTS = [
    None,
    *({"cache_salt": salt} for salt in ("", "a", "b", "A", "a ", "a\0", "\u00e9", "e\u0301")),
]


async def salts_that_nodes_get(world):
    world.add_decode("decode-0")
    prefill = world.add_prefill("prefill-0")
    for salt in SALTS:
        prefill.gate.clear()
        body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
        asked = asyncio.create_task(
            world.http.post("/v1/completions", json=body | ({} if salt is None else salt))
        )
        await world.until(lambda: prefill.at_work)
        yield next(iter(prefill.at_work.values())).cache_salt
        prefill.gate.set()
        assert (await asked).status_code == 200


async def test_what_nodes_get_of_a_salt_hangs_on_it_and_on_a_secret(make_world):
    got = []
    for secret in ("s" * 16, "s" * 16, "t" * 16, None):
        world = await make_world(router={} if secret is None else {"prefix_secret": secret})
        got.append([salt async for salt in salts_that_nodes_get(world)])
    same, again, other, without = got
    assert same == again and same[0] == same[1]  # no salt is the empty one
    assert len(set(same)) == len(SALTS) - 1
    assert not set(same) & set(other) and not set(other) & set(without)


async def test_admin_status_has_the_contracted_shape(world):
    status = (await world.http.get("/admin/status")).json()
    assert status["targets"] == {"prefill": 1, "decode": 1}
    decode = next(node for node in status["nodes"] if node["id"] == "decode-0")
    assert decode["role"] == "decode" and decode["state"] == "ready" and decode["host"] == "here"
    assert decode["running"] == 0 and decode["waiting"] == 0
    assert decode["pools"]["pages"] == {"free": 64, "used": 0, "cached": 0}


async def test_admin_scale_and_drain(world):
    scaled = await world.http.post("/admin/scale", json={"role": "prefill", "replicas": 3})
    assert scaled.json()["targets"] == {"prefill": 3, "decode": 1}
    for body in ({"role": "both", "replicas": 1}, {"role": "decode", "replicas": 9},
                 {"role": "decode", "replicas": -1}, {"role": "decode"}):  # fmt: skip
        assert (await world.http.post("/admin/scale", json=body)).status_code == 400
    assert (await world.http.post("/admin/drain", json={"node": "x"})).status_code == 400
    assert (await world.http.post("/admin/drain", json={"node": "decode-0"})).status_code == 200
    assert (await world.complete()).status_code == 503


async def test_the_last_line_of_a_request_says_all_of_it(world, caplog):
    caplog.set_level(logging.INFO, logger="sluice")
    await world.complete(max_tokens=5)
    [record] = [r for r in caplog.records if "event=finished" in r.getMessage()]
    fields = record.fields
    assert fields["reason"] == "length" and fields["tokens"] == 5
    assert fields["prompt_tokens"] == len(world.ids("the cat")) and fields["cached_tokens"] == 0
    assert (fields["prefill"], fields["decode"]) == ("prefill-0", "decode-0")
    assert 0 < fields["first_token_s"] <= fields["took_s"]


async def test_a_refused_request_is_logged_by_id_and_status_only(world, caplog):
    caplog.set_level(logging.INFO, logger="sluice")
    await world.complete(prompt="secret", temperature="secret")
    [line] = caplog.messages
    assert line.startswith("event=refused request_id=") and "secret" not in line
    assert line.endswith("path=/v1/completions status=400")


async def test_logs_follow_a_request_by_id_without_its_text(world, caplog):
    caplog.set_level(logging.INFO, logger="sluice")
    ledger = world.service.nodes.find("decode-0").ledger
    ledger.take("everything", 64 * 16)
    answer = asyncio.create_task(
        world.http.post(
            "/v1/completions",
            json={"model": "tiny", "prompt": "secret words", "max_tokens": 3},
            headers={"x-request-id": "trace-me"},
        )
    )
    await world.until(lambda: len(world.service.queue) == 1)
    ledger.give_back("everything")
    await answer
    lines = [line for line in caplog.messages if "request_id=trace-me" in line]
    names = [line.split()[0] for line in lines]
    assert names == ["event=queued", "event=dispatched", "event=finished"]
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", None),
        ("config.json", "{"),
        ("config.json", '{"vocab_size": "many"}'),
        ("tokenizer.json", None),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}'),
    ],
)
def test_broken_checkpoints_are_config_errors(checkpoint_writer, tmp_path, file, content):
    from sluice.protocol.config import parse_config
    from sluice.router.service import RouterService

    folder = checkpoint_writer(tmp_path / "broken")
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    with pytest.raises(ConfigError, match=r"checkpoint|template"):
        RouterService(parse_config({"model": {"path": str(folder)}}), None)


async def test_the_description_names_every_path_and_every_field(world):
    document = (await world.http.get("/openapi.json")).json()
    served = {
        (method.lower(), route.path.replace("{name:path}", "{name}"))
        for routes in (completion_routes, responses_routes, messages_routes, admin_routes)
        for route in routes(world.service)
        for method in route.methods - {"HEAD"}
    }
    described = {(method, path) for path, item in document["paths"].items() for method in item}
    assert described == served
    schemas = document["components"]["schemas"]
    assert schemas["ChatRequest"]["properties"].keys() == ChatRequest.model_fields.keys()
    assert schemas["CompletionRequest"]["properties"]["model"]["enum"] == ["tiny"]
    for body in ("MessagesRequest", "ResponsesRequest"):
        assert schemas[body]["properties"].keys() >= {"stream", "temperature", "top_p", "model"}
    text = json.dumps(document)
    for reference in re.findall(r'"#/components/schemas/(\w+)"', text):
        assert reference in schemas
