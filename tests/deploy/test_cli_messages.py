"""What a person reads when a config, a checkpoint or a command cannot work: one clear message."""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from sluice.deploy.cli import app
from sluice.deploy.commands.preflight import GPU_DRIVERS
from sluice.deploy.common import state
from sluice.deploy.common.reporting import reporting
from sluice.protocol.messages import ConfigError
from sluice.protocol.reading import reading

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
        ({("router", "api_keys_file"): "/dev/zero"}, ["api_keys_file /dev/zero", "no such file"]),
        ({("router", "host"): "a\0b"}, ["router.host", "control characters"]),
        ({("router", "host"): "x" * 300}, ["router.port", "cannot be used"]),
        ({("router", "host"): "a..b"}, ["router.port", "cannot be used"]),
        ({("model", "path"): "~nosuchuser/x"}, ["~nosuchuser/x", "whole path"]),
        ({("model", "path"): "x" * 5000}, ["model.path", "name too long"]),
        ({("model", "path"): "/dev/null"}, ["model.path /dev/null", "no such folder"]),
        (
            {("decode", "pools"): {"c4_kv": {"device": "host"}}},
            ["decode.pools.c4_kv.device is 'host'", "expected 'cpu'", "leave it out"],
        ),
        (
            {("prefill", "pools"): {"swa_kv": {"device": "cuda"}}},
            ["prefill.pools.swa_kv.device is 'cuda'", "expected 'cpu'"],
        ),
        ({("decode", "cache_bytes"): 1 << 49}, ["cache_bytes", "this machine's memory"]),
        ({("decode", "cache_bytes"): 10**30}, ["decode.cache_bytes"]),
        ({("transfer", "interface"): "eth77"}, ["transfer.interface is 'eth77'", "it has", "lo"]),
        ({("ray", "address"): "ray://a:1"}, ["ray.address is 'ray://a:1'", "HOST:PORT"]),
        ({("ray", "address"): "127.0.0.1:9"}, ["'127.0.0.1:9'", "refused", "ray start --head"]),
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


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("model.safetensors", lambda whole: whole[: len(whole) // 2], "copy it again"),
        ("model.safetensors", lambda whole: b"\xff" * 8 + whole[8:], "cannot be read as safet"),
        ("model.safetensors", lambda whole: b"", "cannot be read as safetensors"),
        ("model.safetensors", lambda whole: whole + b"more", "cannot be read as safetensors"),
        ("tokenizer.json", lambda whole: whole[:-9], "cannot be read"),
        ("tokenizer.json", lambda whole: b"not JSON", "cannot be read"),
        ("config.json", lambda whole: b"\xff\xfe", "not UTF-8"),
        ("tokenizer_config.json", lambda whole: b"[", "not valid JSON"),
        ("generation_config.json", lambda whole: b'{"eos_token_id": "x"}', "eos_token_id is 'x'"),
        (
            "model.safetensors.index.json",
            lambda _: b'{"weight_map": {"a": "one.safetensors"}}',
            "one.safetensors named in model.safetensors.index.json is not there",
        ),
        (
            "model.safetensors.index.json",
            lambda _: b'{"weight_map": {"a": "../../../etc/passwd"}}',
            "weight_map holds '../../../etc/passwd'",
        ),
        ("model.safetensors.index.json", lambda _: b'{"weight_map": [1]}', "weight_map holds"),
    ],
)
def test_a_damaged_checkpoint_file_is_named_before_anything_starts(
    config_file, tiny_checkpoint, tmp_path, name, content, expected
):
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "copy")
    path = folder / name
    path.write_bytes(content(path.read_bytes() if path.exists() else b""))
    message = failed("up", config_file({("model", "path"): str(folder)}))
    assert name in message
    assert expected in " ".join(message.split())


def test_a_config_that_is_no_readable_file_is_named(tmp_path):
    assert "is a folder" in failed("up", tmp_path)
    assert "a pipe or a device" in failed("up", "/dev/zero")
    assert "Not a directory" in failed("up", "/dev/null/x.yaml")
    assert "name too long" in failed("up", "x" * 5000)
    assert "Missing argument" in failed("up")


def test_what_listens_at_the_clusters_address_and_is_no_ray_is_named(config_file):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def refuse():
            with server.accept()[0] as connection:
                connection.recv(64)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        with ThreadPoolExecutor() as pool:
            answered = pool.submit(refuse)
            message = failed("up", config_file({("ray", "address"): address}))
            answered.result(10)
    assert address in message
    assert "does not speak gRPC" in message


def test_a_state_folder_that_cannot_be_written_is_named(config_file, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    for command in (["up", config_file({("router", "port"): 0})], ["status"], ["down"]):
        assert "set XDG_STATE_HOME to a folder" in " ".join(failed(*command).split())


def test_a_folder_for_rays_files_that_cannot_be_made_is_named(config_file, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    owner = hashlib.sha256(str(state.folder("blocked").absolute()).encode()).hexdigest()
    blocked = Path("/tmp") / f"sluice-{owner[:10]}"
    blocked.write_text("somebody else's")
    try:
        config = config_file({("router", "port"): 0, ("ray", "namespace"): "blocked"})
        done = subprocess.run(
            [sys.executable, "-m", "sluice.deploy.cli", "up", config],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "TMPDIR": "/tmp"},
        )
    finally:
        blocked.unlink()
    assert done.returncode == 2
    assert "a folder for Ray's files cannot be made" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_an_error_that_nobody_foresaw_is_one_line_with_a_file_behind_it(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    @reporting
    def command():
        with reading("config x.yaml"):
            raise LookupError("nobody thought of this")

    with pytest.raises(typer.Exit) as ended:
        command()
    assert ended.value.exit_code == 1
    [file] = tmp_path.iterdir()
    assert "nobody thought of this" in file.read_text()
    assert file.stat().st_mode & 0o077 == 0


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


@pytest.mark.skipif(any(p.exists() for p in GPU_DRIVERS), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_named_before_anything_starts(config_file):
    config = config_file({("decode", "device"): "cuda", ("decode", "num_gpus"): 1})
    assert "decode.num_gpus is 1 and this machine has no GPU" in failed("up", config)


@pytest.mark.parametrize(
    "option",
    ["--seed=-1", f"--seed={10**23}", "--hca-ratio=0", "--csa-ratio=99999", "--window=0",
     "--vocab-size=-1", f"--vocab-size={10**11}", "--max-model-len=0"],
)  # fmt: skip
def test_a_checkpoint_that_cannot_be_made_is_refused_by_option(tmp_path, option):
    assert option.partition("=")[0] in failed("make-checkpoint", tmp_path / "new", option)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_made_is_named():
    assert "/dev/null/x: Not a directory" in failed("make-checkpoint", "/dev/null/x")
    assert "/dev/null: Not a directory" in failed("make-checkpoint", "/dev/null")


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
