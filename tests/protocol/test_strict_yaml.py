"""A config file is read as it was meant, or refused with its line, whatever stands in it."""

import copy
import math
import time

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.protocol.config import SluiceConfig, load_config, parse_config
from sluice.protocol.messages import ConfigError

FULL = {
    "model": {"path": "m", "name": "n", "max_model_len": 9},
    "prefill": {"replicas": 1, "pools": {"kv": {"tokens_per_page": 64, "device": "cpu"}}},
    "decode": {"max_replicas": 2, "cache_bytes": 1 << 20, "num_gpus": 1},
    "router": {
        "host": "127.0.0.1",
        "port": 1,
        "api_keys_file": "k",
        "request_timeout_s": 1.5,
        "cors_origins": ["https://a.test"],
        "canary": {"url": "http://a.test", "weight": 0.5, "api_keys_file": "k"},
    },
    "transfer": {"backend_params": {"engine_config": "TLS=tcp"}, "lease_s": 3, "interface": "lo"},
    "ray": {"address": "auto", "namespace": "n"},
}
words = st.sampled_from(["", "x", "~nosuchuser/x", "\0", "\ud800", "on", "1_000"]) | st.text()
numbers = st.integers() | st.floats() | st.sampled_from([0, -1, 2**63, 10**30, math.inf, math.nan])
values = st.recursive(
    st.none() | st.booleans() | numbers | words,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)


def load(tmp_path, content):
    path = tmp_path / "config.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return load_config(path)


def places(data, path=()):
    for key, value in data.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from places(value, (*path, key))


def test_the_config_that_is_changed_below_is_one():
    assert parse_config(FULL).transfer.interface == "lo"


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(place=st.sampled_from(list(places(FULL))), value=values)
def test_any_value_at_any_key_gives_a_config_or_one_error(place, value, tmp_path):
    data = copy.deepcopy(FULL)
    at = data
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    for read in (parse_config, lambda data: load(tmp_path, yaml.safe_dump(data))):
        try:
            assert isinstance(read(data), SluiceConfig)
        except ConfigError as error:
            assert len(str(error)) < 5000


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=st.text(alphabet=st.sampled_from("ab1:-[]{},&*!|>'\"\n #?~.<%@\t0x_"), max_size=80))
def test_any_text_gives_a_config_or_one_error(text, tmp_path):
    with pytest.raises(ConfigError):
        load(tmp_path, text)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{after}: &{after} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, after in zip("abcdefghi", "bcdefghij", strict=True)
)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("# gr\xfc\xdfe\nmodel: {path: m}".encode("latin-1"), "not UTF-8"),
        ("model: {path: m}".encode("utf-16"), "not UTF-8"),
        ("a: " + "[" * 3000, "line 1: nested more than 20 deep"),
        ("".join(f"{' ' * n}a:\n" for n in range(30)), "nested more than 20 deep"),
        ("router:\n  port: " + "9" * 5000, "digits"),
        ("router:\n  port: 0x" + "f" * 5000, "router.port"),
        (BOMB, "line .*: more than 10000 values"),
        ("a: &a [*a]", "line 1: an alias stands within what it repeats"),
        ("a: &a {b: *a}", "line 1: an alias stands within what it repeats"),
        ("model: {path: ~nosuchuser/x}", "path ~nosuchuser/x: .*whole path"),
        ('router: {host: "a\\0b"}\nmodel: {path: m}', "router.host: .*control characters"),
        ('model: {path: "a\\0b"}', "model.path: .*control characters"),
        ('transfer: {backend_params: {k: "\\0"}}\nmodel: {path: m}', "params.k: .*control"),
        ("model: {path: m}\ntransfer: {lease_s: .inf}", "transfer.lease_s: .*finite"),
        ("a: !!python/object/apply:os.system [x]", "line 1|not valid YAML"),
        ("a: !!int x", "line 1: 'x' is a int"),
        ("a: 2001-99-99", "line 1: '2001-99-99' is a timestamp, .*quotes"),
        ("on: 1", "line 1: key 'on' is no text"),
        ("[a]: 1", "line 1: key 'a list or mapping' is no text"),
        ("a: 1\n---\nb: 1", "not valid YAML"),
        ("", "expected keys such as"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value[:24].encode("ascii", "replace"),
)
def test_what_no_config_holds_is_named(tmp_path, content, words):
    begun = time.monotonic()
    with pytest.raises(ConfigError, match=words) as caught:
        load(tmp_path, content)
    assert "config.yaml" in str(caught.value) or "path" in words
    assert time.monotonic() - begun < 5, "milliseconds are usual"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {path: m}\nrouter: {port: 1}\nrouter: {port: 2}", "'router' .*line 2 .*line 3"),
        ("model:\n  path: m\n  name: a\n  'name': b", "'name' .*line 3 .*line 4"),
        ("model: {path: m}\ndecode: {pools: {kv: {}, kv: {}}}", "'kv' .*line 2 .*line 2"),
    ],
)
def test_a_key_that_stands_twice_is_named_with_both_lines(tmp_path, text, words):
    with pytest.raises(ConfigError, match=f"key {words}"):
        load(tmp_path, text)


def test_sections_may_share_what_an_anchor_names(tmp_path):
    shared = "prefill: &both {num_cpus: 2, replicas: 3}\ndecode: {<<: *both, replicas: 1}"
    config = load(tmp_path, f"model: {{path: m}}\n{shared}")
    assert (config.prefill.num_cpus, config.decode.num_cpus) == (2, 2)
    assert (config.prefill.replicas, config.decode.replicas) == (3, 1)


def test_what_is_no_file_is_refused_unread(tmp_path):
    with pytest.raises(ConfigError, match="is a folder, expected a file"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="is a pipe or a device"):
        load_config(type(tmp_path)("/dev/zero"))
    with (tmp_path / "large.yaml").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(ConfigError, match="has 1024 MiB, expected at most 1"):
        load_config(tmp_path / "large.yaml")
