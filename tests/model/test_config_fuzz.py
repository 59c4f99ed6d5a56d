"""Whatever stands in a config.json, there is a model description or one ConfigError, at once."""

import json
import math
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.cache.spec import unit_tokens
from sluice.model.make_checkpoint import TINY, transformers_config
from sluice.model.registry import declare_pools, describe
from sluice.protocol.messages import ConfigError
from sluice.protocol.special_tokens import eos_token_ids

OFFICIAL = {
    name: value
    for name, value in transformers_config(TINY).items()
    if name not in ("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters")
} | {
    "compress_ratios": [0, 4, 16, 4, 16],
    "num_hash_layers": 1,
    "qk_rope_head_dim": 8,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 64},
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0},
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "layer_types": ["full_attention"] * 2,
    "quantization_config": None,
    "eos_token_id": 2,
}
QWEN = LLAMA | {
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": False,
    "sliding_window": 4096,
    "attention_bias": True,
    "rope_parameters": None,
    "rope_scaling": {"type": "linear", "factor": 2.0},
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": None}
CONFIGS = {
    "transformers": transformers_config(TINY),
    "official": OFFICIAL,
    "llama": LLAMA,
    "qwen2": QWEN,
    "mistral": MISTRAL,
}

numbers = st.one_of(
    st.sampled_from([0, -1, 1, 2, 3, 2**31, 2**63, 2**64, 10**30, -(10**30), 1e300, -0.0, 0.5]),
    st.sampled_from([math.inf, -math.inf, math.nan, 5e-324]),
    st.integers(),
    st.floats(),
)
words = st.one_of(st.sampled_from(["", "x", "default", "yarn", "4", "\0", "\ud800"]), st.text())
values = st.recursive(
    st.none() | st.booleans() | numbers | words,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(words, inner, max_size=4),
    max_leaves=8,
)


def places(data, path=()):
    """Every key of the mappings and every index of the lists within the data."""
    inside = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in inside:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def put(data, path, value):
    """A copy of the data with the value at the path."""
    copy = json.loads(json.dumps(data))
    at = copy
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return copy


def described(folder):
    """Whether the folder has a model; ConfigError is the one way for it to have none."""
    begun = time.monotonic()
    try:
        info = describe(folder)
        for specs in (declare_pools(folder, path) for path in ("auto", "native")):
            assert unit_tokens(specs) > 0
            assert all(spec.row_bytes > 0 and spec.tokens_per_page > 0 for spec in specs)
            assert all(type(i) is int for i in eos_token_ids(folder, info.vocab_size, None))
    except ConfigError as error:
        assert len(str(error)) < 2000
        return False
    finally:
        assert time.monotonic() - begun < 5, "milliseconds are usual"
    return True


@pytest.mark.parametrize("name", CONFIGS)
def test_the_configs_that_are_changed_below_have_a_model(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    assert described(tmp_path)


@pytest.mark.parametrize("name", CONFIGS)
def test_any_value_at_any_key_gives_a_model_or_one_error(name, tmp_path):
    config = CONFIGS[name]
    path = tmp_path / "config.json"

    @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(list(places(config))), values)
    def anything(place, value):
        path.write_text(json.dumps(put(config, place, value)))
        described(tmp_path)

    anything()


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("transformers", {"compress_rates": {"compressed_sparse_attention": 0}}, "is 0"),
        ("transformers", {"compress_rates": {"heavily_compressed_attention": -128}}, "is -128"),
        ("transformers", {"compress_rates": {"heavily_compressed_attention": "128"}}, "'128'"),
        ("transformers", {"compress_rates": {"heavily_compressed_attention": 10**9}}, "at most"),
        ("transformers", {"compress_rates": [4, 128]}, "compress_rates: is .4, 128."),
        ("transformers", {"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ("transformers", {"rope_parameters": []}, "rope_parameters: is .., expected an object"),
        ("llama", {"rope_parameters": ["yarn"]}, "rope_parameters: is .'yarn'."),
        ("llama", {"quantization_config": "fp8"}, "quantization_config: is 'fp8'"),
        ("mistral", {"sliding_window": "wide"}, "sliding_window is 'wide'"),
        ("official", {"compress_ratios": "0044"}, "compress_ratios is '0044'"),
        ("official", {"num_hash_layers": -1}, "num_hash_layers is -1"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(name, change, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name] | change))
    with pytest.raises(ConfigError, match=words):
        describe(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe{\x00}\x00", "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"[]", "expected a JSON object"),
        (b"", "not valid JSON"),
    ],
    ids=["utf-16", "deep", "digits", "list", "empty"],
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_file_that_is_no_json_object_is_named(content, words, file, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{file}: {words}"):
        eos_token_ids(tmp_path, describe(tmp_path).vocab_size, None)
