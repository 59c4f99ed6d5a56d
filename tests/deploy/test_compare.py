"""Comparing two deployments: prompts, agreement, figures, and one real run."""

import csv
import http.server
import importlib.util
import json
import shutil
import threading
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from sluice.deploy.common.http_client import RouterClient
from sluice.deploy.compare import plot as compare_plot
from sluice.deploy.compare.compare import compare, make_side
from sluice.deploy.compare.measures import Measure, PoolCost, decode_specs, measure
from sluice.deploy.compare.prompts import Prompt, passages, read_prompts
from sluice.deploy.compare.result import pair_up
from sluice.protocol.config import load_config
from sluice.protocol.messages import ConfigError, SluiceError

ROOT = Path(__file__).parents[2]
LOCAL = ROOT / "deploy/configs/local.yaml"
NATIVE = ROOT / "deploy/configs/native.yaml"
NAMES = ("A: one", "B: other")
POOLS = (PoolCost("rows", 2, 2048, 1000, 3), PoolCost("state", 1, 512, 100, 1))


@pytest.fixture
def tokenizer(tiny_checkpoint):
    return Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))


def measured(text, num_prompt_tokens=64, ttft_s=0.2):
    return Measure(num_prompt_tokens, 16, text, ttft_s, 0.01, POOLS)


def test_passages_have_their_lengths_and_share_no_beginning(tokenizer):
    prompts = [prompt.content for prompt in passages(tokenizer, 3000)]
    assert sorted({len(ids) for ids in prompts}) == [64, 128, 256, 512, 1024, 2048]
    assert len({tuple(ids[:8]) for ids in prompts}) == len(prompts) == 18
    with pytest.raises(ConfigError, match="lower --max-tokens"):
        passages(tokenizer, 50)


def test_prompts_come_as_text_or_json(tmp_path):
    path = tmp_path / "prompts"
    path.write_text('plain\n\n{"prompt": "a {text}"}\n{"prompt_token_ids": [1, 2]}\n')
    assert read_prompts(path) == [Prompt("plain"), Prompt("a {text}"), Prompt([1, 2])]


@pytest.mark.parametrize(
    "line",
    ["{", '{"text": "a"}', '{"prompt": 1}', '{"prompt": "a", "seed": 1}', '{"prompt": ""}',
     '{"prompt_token_ids": []}', '{"prompt_token_ids": [true]}', '{"prompt_token_ids": [-1]}'],
)  # fmt: skip
def test_a_bad_prompt_is_named_by_its_line(tmp_path, line):
    path = tmp_path / "prompts"
    path.write_text(f"good\n{line}\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_prompts(path)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="no prompt"):
        read_prompts(path)


def test_the_first_differing_token_is_found(tokenizer):
    ids = tokenizer.encode("Anne walked home through the rain", add_special_tokens=False).ids
    for theirs, place in [
        (ids, None),
        ([*ids[:2], ids[0], *ids[3:]], 2),
        ([*ids[:-1], ids[0]], len(ids) - 1),
        (ids[:-1], len(ids) - 1),
    ]:
        a, b = (measured(tokenizer.decode(token_ids)) for token_ids in (ids, theirs))
        (pair,) = pair_up(NAMES, [a], [b], tokenizer).pairs
        assert pair.agreement.first_difference == place
        assert pair.agreement.num_agreed == (len(ids) if place is None else place)


def test_cache_bytes_follow_the_layout_of_decode_nodes(config_file):
    config = load_config(config_file({("decode", "pools"): {"c4_kv": {"tokens_per_page": 128}}}))
    specs = {spec.name: spec for spec in decode_specs(config)}
    default = {spec.name: spec for spec in decode_specs(load_config(LOCAL))}
    assert specs["c4_kv"].page_bytes * 2 == default["c4_kv"].page_bytes
    assert {**specs, "c4_kv": default["c4_kv"]} == default


def test_a_figure_is_what_one_request_adds_to_the_metrics(scripted_router):
    router, served = scripted_router
    specs = decode_specs(load_config(NATIVE))
    with RouterClient(router) as client:
        found = measure(client, Prompt("x"), max_tokens=5, specs=specs)
        assert (found.ttft_s, found.tpot_s, found.text) == (0.5, 0.25, "yes")
        assert (found.transfer_bytes, found.transfer_descriptors) == (700, 3)
        assert found.cache_bytes == 2 * specs[0].page_bytes  # 65 tokens in pages of 64
        assert served["body"]["ignore_eos"] is True and served["body"]["temperature"] == 0
        served["others"] = 1
        with pytest.raises(SluiceError, match="nobody else uses"):
            measure(client, Prompt("x"), max_tokens=5, specs=specs)


def test_token_ids_are_not_sent_to_another_tokenizer(config_file, tiny_checkpoint, tmp_path):
    other = shutil.copytree(tiny_checkpoint, tmp_path / "other")
    with (other / "tokenizer.json").open("a") as file:
        file.write("\n")
    config = config_file({("model", "path"): str(other)})
    sides = (make_side("A", LOCAL, None), make_side("B", config, None))
    with pytest.raises(ConfigError, match="tokenizer.json differ"):
        compare(sides, prompts_file=None, max_tokens=2, out=tmp_path / "out", plot=False)


def test_a_missing_matplotlib_is_said_before_anything_starts(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    sides = (make_side("A", LOCAL, None), make_side("B", NATIVE, None))
    with pytest.raises(ConfigError, match=r"\.\[plot\].*--no-plot"):
        compare(sides, prompts_file=None, max_tokens=2, out=tmp_path, plot=True)


def test_a_plot_is_drawn_of_one_length_and_of_many(tokenizer, tmp_path):
    for lengths in ([64], [5, 64, 64, 4000]):
        a, b = ([measured("x", n, seconds) for n in lengths] for seconds in (0.1, 0.2))
        compare_plot.plot(tmp_path / "a.png", pair_up(NAMES, a, b, tokenizer), "caption")
        assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.live
def test_a_deployment_agrees_with_itself(live, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Anne\nSir Walter Elliot, of Kellynch Hall, in Somersetshire\n")
    sides = (make_side("A", LOCAL, live.url), make_side("B", LOCAL, live.url))
    found = compare(sides, prompts_file=prompts, max_tokens=4, out=tmp_path / "out", plot=True)
    assert all(pair.agreement.exact for pair in found.pairs)
    assert all(pair.a.transfer_bytes > 0 and pair.b.ttft_s > 0 for pair in found.pairs)
    rows = list(csv.DictReader((tmp_path / "out/requests.csv").open()))
    assert [row["deployment"] for row in rows] == ["A: local"] * 2 + ["B: local"] * 2
    assert all(
        row["machine"] and row["commit"] and "sluice compare" in row["command"] for row in rows
    )
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "requests.csv", "pools.csv", "report.txt", "lengths.png",
    }  # fmt: skip


@pytest.fixture
def scripted_router():
    """A server that counts as a router does; `others`: requests of somebody else meanwhile."""
    served = {"others": 0, "requests": 0, "body": None}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            n = served["requests"]
            lines = [f"sluice:{name}_seconds_{kind} {value * n}"
                     for name, seconds in (("time_to_first_token", 0.5),
                                           ("time_per_output_token", 0.25))
                     for kind, value in (("sum", seconds), ("count", 1))]  # fmt: skip
            lines += [f'sluice:transfer_bytes_total{{pool="kv",node="p-{i}"}} {350 * n}'
                      for i in range(2)]  # fmt: skip
            lines += [f'sluice:transfer_descriptors_total{{pool="kv"}} {3 * n}']
            models = json.dumps({"data": [{"id": "m"}]})
            self.reply(models if self.path == "/v1/models" else "\n".join(lines) + "\n")

        def do_POST(self):
            served["requests"] += 1 + served["others"]
            served["body"] = json.loads(self.rfile.read(int(self.headers["content-length"])))
            usage = {"prompt_tokens": 60, "completion_tokens": 5, "total_tokens": 65}
            self.reply(json.dumps({"choices": [{"text": "yes"}], "usage": usage}))

        def reply(self, text):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            return

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", served
        server.shutdown()
        thread.join()
