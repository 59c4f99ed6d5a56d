"""The config refuses what cannot work, and says what would."""

import pickle

import pytest

from sluice.protocol.config import load_config, parse_config, with_prefix_secret
from sluice.protocol.messages import ConfigError


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"model": {"path": "m", "cach_path": 1}}, "cach_path: .* did you mean 'cache_path'"),
        ({"modle": {"path": "m"}}, "modle: unknown key; did you mean 'model'"),
        ({"model": {}}, "model.path: missing"),
        ({"model": {"path": "m", "weights": "fp8"}}, "model.weights: .*'stored' or 'dequantized'"),
        ({"model": {"path": "m", "v4_release": 473}}, "model.v4_release: .*'v0731', got 473"),
        ({"model": {"path": "m"}, "decode": {"replicas": -1}}, "decode.replicas: .*got -1"),
        ({"model": {"path": "m"}, "decode": {"replicas": 99}}, "replicas is 99, expected 0"),
        ({"model": {"path": "m"}, "router": {"port": "http"}}, "router.port: .*got 'http'"),
        ({"model": {"path": "m"}, "prefill": {"pools": {"x": {"span": 4}}}}, "tokens_per_page"),
        ({"model": {"path": "m"}, "decode": {"resume_every_tokens": 9}}, "under `prefill`"),
        ({"model": {"path": "m"}, "prefill": {"tensor_parallel": 1}}, "leave it out"),
        ({"model": {"path": "m"}, "router": {"otlp_endpoint": "http://x"}}, "at the top level"),
        ({"model": {"path": "m"}, "router": {"canary": {"config": "x"}}}, "starts no second"),
        ({"model": {"path": "m"}, "otlp_endpoint": "x"}, "expected a URL"),
    ],
)  # fmt: skip
def test_a_wrong_key_or_value_is_named_with_the_way_out(data, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(data)


@pytest.mark.parametrize(
    ("router", "message"),
    [
        ({"otlp_endpoint": "http://x"}, "router: `otlp_endpoint` is no key here"),
        ({"metrics_key": True}, "router: metrics_key is true, expected api_keys_file"),
        ({"tls_key_file": "k"}, "router: expected both tls_cert_file and tls_key_file"),
        ({"canary": {"config": "x"}}, "router.canary: `config` is no key here"),
        ({"port": "http"}, "router.port: "),
        ({"prot": 1}, "router.prot: unknown key"),
    ],
)
def test_a_fault_of_a_section_does_not_show_its_secret(router, message):
    secret = "never to be seen"
    with pytest.raises(ConfigError, match=message) as info:
        parse_config({"model": {"path": "m"}, "router": router | {"prefix_secret": secret}})
    assert secret not in str(info.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no-such.yaml: No such file"):
        load_config(tmp_path / "no-such.yaml")


def test_broken_yaml_and_a_list_are_refused(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("a: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(path)
    path.write_text("- a")
    with pytest.raises(ConfigError, match="expected keys such as `model:`, got list"):
        load_config(path)


def test_paths_are_relative_to_the_config_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model: {path: ../weights}")
    config = load_config(path)
    assert config.model.path.resolve() == tmp_path.parent / "weights"
    assert config.model.served_name == "weights"


@pytest.mark.parametrize(
    ("key", "value"),
    [("tls_cert_file", "cert.pem"), ("cors_origins", ["chat.test"]), ("prefill_policy", "best")],
)
def test_a_router_setting_that_cannot_work_is_named(key, value):
    with pytest.raises(ConfigError, match=key):
        parse_config({"model": {"path": "m"}, "router": {key: value}})


def test_a_deployment_draws_its_secret_once_and_shows_it_nowhere():
    config = parse_config({"model": {"path": "m"}})
    drawn = with_prefix_secret(config)
    secret = drawn.router.prefix_secret.get_secret_value()
    assert len(secret) == 64 and secret != with_prefix_secret(config).router.prefix_secret
    assert with_prefix_secret(drawn) == drawn == pickle.loads(pickle.dumps(drawn))
    assert secret not in repr(drawn) and secret not in str(drawn.model_dump())
    with pytest.raises(ConfigError, match="prefix_secret: .*16") as caught:
        parse_config({"model": {"path": "m"}, "router": {"prefix_secret": "hunter2"}})
    assert "hunter2" not in str(caught.value)
