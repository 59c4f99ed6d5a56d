"""What a person reads when a config, a checkpoint or a command cannot work: one clear message."""

import json
import shutil
import socket
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from sluice.deploy import state
from sluice.deploy.cli import app
from sluice.engine.protocol import ConfigError

TINY = "deploy/models/tiny-v4"


@pytest.fixture(autouse=True)
def own_state_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def failed(*arguments):
    """The message of a command that must end with exit code 2."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return result.output


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({("router", "prot"): 1}, ["router.prot", "did you mean 'port'"]),
        ({("router", "port"): 70000}, ["router.port", "70000"]),
        ({("decode", "replicas"): 99}, ["replicas is 99", "max_replicas"]),
        ({("model", "path"): "nowhere"}, ["nowhere", "no such folder", "make-checkpoint"]),
        ({("model", "max_model_len"): 10**6}, ["max_model_len is 1000000", "8192"]),
        ({("prefill", "pools"): {"swa_kvv": {}}}, ["prefill.pools.swa_kvv", "'swa_kv'"]),
        (
            {("decode", "pools"): {"swa_kv": {"dtype": "fp4"}}},
            ["decode.pools.swa_kv", "dtype is 'fp4'", "fp8_v4"],
        ),
        ({("prefill", "device"): "cuda"}, ["prefill.num_gpus is 0", "1 or more"]),
        ({("transfer", "backend"): "local"}, ["transfer.backend", "UCX"]),
        ({("ray", "namespace"): "a b"}, ["ray.namespace", "'a b'"]),
        ({("router", "api_keys_file"): "nowhere"}, ["api_keys_file", "nowhere"]),
    ],
    ids=lambda value: "-".join(map(str, next(iter(value)))) if isinstance(value, dict) else "",
)
def test_a_bad_value_is_named_with_the_way_out(config_file, change, expected):
    message = failed("up", config_file(change))
    assert all(part in message for part in expected), message


def test_a_missing_config_file_is_named():
    assert "none.yaml" in failed("up", "none.yaml")


def test_an_unsupported_architecture_is_named_with_the_known_ones(config_file, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    message = failed("up", config_file({("model", "path"): str(tmp_path)}))
    assert "GPT2LMHeadModel" in message
    assert "DeepseekV4ForCausalLM" in message


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_a_missing_checkpoint_file_is_named(config_file, tiny_checkpoint, tmp_path, name):
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "copy")
    (folder / name).unlink()
    message = failed("up", config_file({("model", "path"): str(folder)}))
    assert name.replace("model.", "*.") in message


def test_a_taken_port_is_named_with_the_way_out(config_file):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = failed("up", config_file({("router", "port"): port}))
    assert f"router.port {port}" in message
    assert "--port" in message


def test_a_second_start_of_a_namespace_is_told_that_it_runs_not_that_its_port_is_taken(config_file):
    with socket.create_server(("127.0.0.1", 0)) as taken, state.hold("sluice"):
        port = taken.getsockname()[1]
        message = failed("up", config_file({("router", "port"): port}))
    assert "'sluice' is already running" in message
    assert "sluice down --namespace sluice" in message


@pytest.mark.parametrize(
    "command", [["status"], ["down"], ["scale", "decode", "2"], ["chat", "hi"]]
)
def test_a_command_without_a_deployment_says_how_to_start_one(command):
    assert "sluice up CONFIG" in failed(*command)


def test_debug_shows_where_an_error_came_from():
    result = CliRunner().invoke(app, ["status", "--debug"])
    assert isinstance(result.exception, ConfigError)


def test_a_router_that_does_not_answer_is_named():
    result = CliRunner().invoke(app, ["status", "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 1
    assert "http://127.0.0.1:9 does not answer" in result.output


def test_the_command_line_loads_neither_ray_nor_torch():
    code = "import sys, sluice.deploy.cli; sys.exit(bool({'ray', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_made_checkpoint_is_accepted_by_every_check(config_file, tmp_path):
    folder = tmp_path / "made"
    made = CliRunner().invoke(app, ["make-checkpoint", str(folder), "--hca-ratio", "16"])
    assert made.exit_code == 0, made.output
    with socket.create_server(("127.0.0.1", 0)) as taken:  # the last of the checks
        port = taken.getsockname()[1]
        change = {("model", "path"): str(folder), ("router", "port"): port}
        assert "router.port" in failed("up", config_file(change))
