"""Dense models compute transformers' logits, whatever the chunks, the batch and the pages."""

import dataclasses
import json
import random

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from sluice.model.registry import declare_pools, describe, load_model
from sluice.protocol.messages import ConfigError

transformers.utils.logging.disable_progress_bar()

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
}
MODELS = {
    "llama": (LlamaConfig, {}),
    "llama-biases-tied": (
        LlamaConfig,
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama-one-kv-head": (LlamaConfig, {"num_key_value_heads": 1, "head_dim": 24}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "qwen3-biases": (Qwen3Config, {"head_dim": 20, "attention_bias": True}),
}


def saved(folder, model="llama", rope="default", seed=0, **changes):
    """transformers' model of random weights, every bias and norm included, saved to a folder."""
    kind, own = MODELS[model]
    sizes = {
        "vocab_size": 131,
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    config = kind(**(sizes | {"rope_parameters": ROPES[rope]} | own | changes))
    torch.manual_seed(seed)
    reference = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    reference.save_pretrained(folder)
    return reference.eval()


@torch.no_grad()
def full_forward(reference, ids):
    return reference(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def random_ids(seed, num_tokens):
    rng = random.Random(seed)
    return [rng.randrange(131) for _ in range(num_tokens)]


def equal(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("model", MODELS)
def test_logits_equal_transformers(model, rope, tmp_path, driver):
    reference, ids = saved(tmp_path, model, rope), random_ids(1, 213)
    logits = driver(load_model(tmp_path)).run("a", ids, [64, 1, 1, 100, 47])
    equal(logits, full_forward(reference, ids))


@pytest.mark.parametrize("seed", range(6))
def test_any_chunks_batch_and_page_span_give_the_same_logits(seed, tmp_path, driver):
    rng = random.Random(seed)
    reference, model = saved(tmp_path, rng.choice(list(MODELS)), seed=seed), load_model(tmp_path)
    [spec] = model.specs
    span = rng.choice([1, 3, 16, 64, 100])
    run = driver(model, specs=(dataclasses.replace(spec, tokens_per_page=span),), num_pages=600)
    prompts = {name: random_ids(seed + n, rng.randrange(3, 150)) for n, name in enumerate("abcd")}
    left, found = {name: list(ids) for name, ids in prompts.items()}, {n: [] for n in prompts}
    while left:  # each step takes chunks of some requests: decode-sized ones, long ones, or both
        names = rng.sample(sorted(left), rng.randint(1, len(left)))
        longest = rng.choice([1, 40])
        step = {name: left[name][: rng.randint(1, longest)] for name in names}
        for name, logits in run.step(step).items():
            found[name].append(logits)
            left[name] = left[name][len(step[name]) :]
        left = {name: ids for name, ids in left.items() if ids}
    for name, ids in prompts.items():
        equal(torch.cat(found[name]), full_forward(reference, ids))


def test_only_last_logits_are_returned_unless_all_are_asked_for(tmp_path, driver):
    reference, ids = saved(tmp_path), random_ids(3, 30)
    logits = driver(load_model(tmp_path)).step({"a": ids, "b": ids[:7]}, all_logits=False)
    expected = full_forward(reference, ids)
    equal(torch.cat([logits["a"], logits["b"]]), expected[[29, 6]])


def test_bfloat16_stays_near_fp32(tmp_path, driver):
    reference, ids = saved(tmp_path, "qwen3"), random_ids(4, 90)
    model = load_model(tmp_path, dtype="bfloat16")
    assert model.specs[0].dtype == "bfloat16"
    logits, expected = driver(model).run("a", ids, [60, 1, 29]), full_forward(reference, ids)
    assert logits.dtype == torch.float32
    assert torch.cosine_similarity(logits.flatten(), expected.flatten(), dim=0) > 0.999


def test_a_pool_may_store_another_type_than_the_model_computes_in(tmp_path, driver):
    reference, ids, model = saved(tmp_path), random_ids(5, 50), load_model(tmp_path)
    specs = (dataclasses.replace(model.specs[0], dtype="float16"),)
    logits = driver(model, specs=specs).run("a", ids, [20, 29, 1])
    torch.testing.assert_close(logits, full_forward(reference, ids), atol=0.05, rtol=0.05)


def test_a_mistral_window_that_no_request_can_outgrow_is_full_attention(tmp_path, driver):
    reference, ids = saved(tmp_path, "mistral", sliding_window=512), random_ids(6, 300)
    equal(driver(load_model(tmp_path)).run("a", ids, [300]), full_forward(reference, ids))


def test_the_pool_and_the_model_are_described_without_weights(tmp_path):
    saved(tmp_path / "qwen", "qwen3")
    [spec] = declare_pools(tmp_path / "qwen")
    assert (spec.name, spec.row_shape, spec.tokens_per_row) == ("kv", (2, 2, 16), 1)
    info = describe(tmp_path / "qwen")
    assert (info.architecture, info.max_model_len) == ("Qwen3ForCausalLM", 512)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("mistral", {"sliding_window": 128}, "sliding_window is 128, expected null or at least .*"),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 1}, "layer_types holds"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu', only 'silu'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type is 'dynamic', expected one of default",
        ),
    ],
)
def test_what_would_give_other_answers_is_refused_by_name(model, changes, message, tmp_path):
    saved(tmp_path, model, **changes)
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path)


def test_the_older_spelling_of_rope_is_read_too(tmp_path, driver):
    reference, ids = saved(tmp_path, rope="linear"), random_ids(7, 60)
    path = tmp_path / "config.json"
    data = json.loads(path.read_text())
    rope = data.pop("rope_parameters")
    old = {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "linear", "factor": 2.5}}
    path.write_text(json.dumps(data | old))
    equal(driver(load_model(tmp_path)).run("a", ids, [60]), full_forward(reference, ids))


def test_tensors_of_another_config_are_refused_by_name(tmp_path):
    saved(tmp_path, "qwen3")
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"attention_bias": false', '"attention_bias": true'))
    with pytest.raises(ConfigError, match=r"missing: model.layers.0.self_attn.k_proj.bias"):
        load_model(tmp_path)


def test_quantised_weights_are_refused_by_name(tmp_path):
    saved(tmp_path)
    path = tmp_path / "model.safetensors"
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, path)
    with pytest.raises(ConfigError, match=rf"{name} \(torch\.float8_e4m3fn\) belongs to quantised"):
        load_model(tmp_path)


def test_hybrid_is_refused_with_the_way_out_and_auto_means_native(tmp_path):
    saved(tmp_path)
    with pytest.raises(ConfigError, match="LlamaForCausalLM has native only; choose that"):
        declare_pools(tmp_path, "hybrid")
    assert declare_pools(tmp_path) == declare_pools(tmp_path, "native")
