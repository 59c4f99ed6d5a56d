"""config.json in both dialects, and what is refused by name."""

import json
import re
import subprocess
import sys

import pytest

from sluice.model.make_checkpoint import TINY, make_checkpoint, transformers_config
from sluice.model.presets import V4_FLASH, V4_PRO
from sluice.model.registry import declare_pools, describe
from sluice.model.v4.config import LayerType, parse_config
from sluice.protocol.messages import ConfigError

OFFICIAL = {  # as DeepSeek publishes it, for Flash
    "architectures": ["DeepseekV4ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 1.5,
    "num_hash_layers": 3,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "scoring_func": "sqrtsoftplus",
    "swiglu_limit": 10.0,
    "sliding_window": 128,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "max_position_embeddings": 1048576,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def test_the_official_dialect_gives_the_flash_preset():
    assert parse_config(OFFICIAL) == V4_FLASH


@pytest.mark.parametrize("config", [TINY, V4_FLASH, V4_PRO])
def test_the_dialects_mean_the_same(config):
    assert parse_config(transformers_config(config)) == config


def test_a_coarse_ratio_other_than_128_is_hca():
    config = parse_config(OFFICIAL | {"num_hidden_layers": 3, "compress_ratios": [4, 16, 0, 0]})
    assert config.layer_types == (LayerType.CSA, LayerType.HCA, LayerType.SLIDING)
    assert (config.csa_ratio, config.hca_ratio) == (4, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types has 2 entries"),
        ({"layer_types": ["linear_attention"] * 5}, r"layer_types\[0\] is 'linear_attention'"),
        ({"mlp_layer_types": ["dense"] * 5}, r"mlp_layer_types\[0\] is 'dense'"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8"),
        ({"o_groups": 3}, "expected a multiple of o_groups"),
        ({"num_experts_per_tok": 9}, "expected at most n_routed_experts"),
    ],
)
def test_a_config_that_cannot_work_is_refused_by_name(change, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(transformers_config(TINY) | change)


def test_two_coarse_ratios_are_refused():
    with pytest.raises(ConfigError, match=r"compress_ratios holds \[16, 128\]"):
        parse_config(OFFICIAL | {"num_hidden_layers": 2, "compress_ratios": [16, 128]})


def write_config(folder, change):
    data = transformers_config(TINY) | change
    (folder / "config.json").write_text(json.dumps(data), encoding="utf-8")


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path):
    write_config(tmp_path, {"architectures": ["GPT2LMHeadModel"]})
    with pytest.raises(ConfigError, match="GPT2LMHeadModel.*known: DeepseekV4ForCausalLM"):
        describe(tmp_path)


def test_a_folder_or_a_config_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "nowhere"))):
        describe(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"config\.json: No such file"):
        describe(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="not valid JSON"):
        describe(tmp_path)


def test_describe_reads_what_a_checkpoint_says_of_itself(tmp_path):
    make_checkpoint(tmp_path / "small")
    info = describe(tmp_path / "small")
    assert (info.name, info.vocab_size) == ("small", 512)
    assert info.architecture == "DeepseekV4ForCausalLM"
    assert info.max_model_len == TINY.max_model_len


def test_an_unknown_cache_path_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="cache_path is 'seven'.*has hybrid and native only"):
        declare_pools(TINY, "seven")


def test_pools_can_be_planned_without_torch():
    code = (
        "import sys; from sluice.model.presets import preset_pools; preset_pools('v4-pro');"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
