"""config.json from a GGUF file's metadata, in transformers' spelling."""

from __future__ import annotations

from typing import Any

from sluice.model.gguf.file import GgufFile
from sluice.protocol.messages import ConfigError

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
_REFUSED = (  # what a file of these architectures may say, and the forward pass does not do
    "expert_count",
    "attention.sliding_window",
    "rope.scaling.attn_factor",
)


def config_of(file: GgufFile) -> dict[str, Any]:
    """Raises ConfigError for architectures and features that are not served."""
    name = file.require("general.architecture")
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{file.path}: architecture {name!r} is not supported; known: "
            f"{', '.join(ARCHITECTURES)}"
        )
    for key in _REFUSED:
        if value := file.get(f"{name}.{key}"):
            raise ConfigError(f"{file.path}: {name}.{key} is {value}, which is not supported")
    architecture, model_type = ARCHITECTURES[name]
    num_heads = file.require(f"{name}.attention.head_count")
    hidden_size = file.require(f"{name}.embedding_length")
    names = set(file.tensor_names)
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": "float32",
        "vocab_size": len(file.require("tokenizer.ggml.tokens")),
        "hidden_size": hidden_size,
        "intermediate_size": file.require(f"{name}.feed_forward_length"),
        "num_hidden_layers": file.require(f"{name}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.get(f"{name}.attention.head_count_kv", num_heads),
        "head_dim": file.get(f"{name}.attention.key_length", hidden_size // num_heads),
        "hidden_act": "silu",
        "max_position_embeddings": file.require(f"{name}.context_length"),
        "rms_norm_eps": _decimal(file.require(f"{name}.attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope(file, name),
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_gate.bias" in names,
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id"),
    }


def generation_config_of(file: GgufFile) -> dict[str, Any]:
    """generation_config.json: what generation starts from and stops at."""
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {key: file.get(f"tokenizer.ggml.{name}_token_id") for key, name in keys.items()}
    return {key: value for key, value in found.items() if value is not None}


def _rope(file: GgufFile, name: str) -> dict[str, Any]:
    kind = file.get(f"{name}.rope.scaling.type", "none")
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": _decimal(file.get(f"{name}.rope.freq_base", 10_000.0)),
    }
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise ConfigError(
            f"{file.path}: {name}.rope.scaling.type is {kind!r}, expected none, linear or yarn"
        )
    rope |= {"rope_type": kind, "factor": _decimal(file.require(f"{name}.rope.scaling.factor"))}
    if kind == "yarn":
        original = file.get(f"{name}.rope.scaling.original_context_length")
        rope["original_max_position_embeddings"] = original or file.require(
            f"{name}.context_length"
        )
    return rope


def _decimal(value: float) -> float:
    """The decimal that was meant: the file holds it as float32, 1e-5 as 9.99999974e-06."""
    return float(f"{value:.7g}")
