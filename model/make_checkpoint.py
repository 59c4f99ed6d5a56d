"""Make a small seeded checkpoint that this project and transformers both load.

Weights are random but well scaled: activations keep their size through the layers and logits have
a standard deviation of about 0.7, so that greedy output depends on every part of the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from sluice.model.tokenizer import PAD_TOKEN_ID, write_tokenizer
from sluice.model.v4.config import DeepseekV4Config, LayerType, MlpType, YarnConfig
from sluice.model.v4.inventory import tensor_shapes

LOGIT_STD = 0.7

TINY = DeepseekV4Config(
    vocab_size=512,
    hidden_size=64,
    num_heads=4,
    head_dim=32,
    rope_dim=8,
    q_lora_rank=32,
    o_groups=2,
    o_lora_rank=32,
    sliding_window=8,
    layer_types=(
        LayerType.SLIDING,
        LayerType.CSA,
        LayerType.HCA,
        LayerType.CSA,
        LayerType.HCA,
    ),
    csa_ratio=4,
    hca_ratio=16,
    index_num_heads=16,  # with few heads many scores are exactly 0, and selections are ties
    index_head_dim=32,
    index_topk=8,
    mlp_types=(MlpType.HASH,) * 2 + (MlpType.TOPK,) * 3,
    num_experts=8,
    num_experts_per_token=2,
    expert_width=64,
    routed_scale=1.5,
    swiglu_limit=10.0,
    max_model_len=4096,
    rope_theta=10_000.0,
    compress_rope_theta=160_000.0,
    compress_yarn=YarnConfig(factor=4.0, original_max_tokens=1024),
    hc_mult=4,
    hc_sinkhorn_iters=4,
)


def make_checkpoint(
    folder: Path,
    *,
    config: DeepseekV4Config = TINY,
    seed: int = 0,
    texts: Iterable[str] = (),
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> None:
    """Write config, weights, tokenizer and generation config into `folder`, made if need be.

    texts: what the tokenizer's merges are trained on. dtype: of the matrices; norms, sinks, biases
    and hyper-connections are fp32. Equal arguments give equal bytes; torch's global random state
    is not touched. Raises ConfigError if the vocabulary is too small for bytes and special tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, texts, config)
    _write_json(folder / "config.json", transformers_config(config, dtype))
    eos = list(config.eos_token_ids)
    generation = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "pad_token_id": PAD_TOKEN_ID,
        "do_sample": False,
    }
    _write_json(folder / "generation_config.json", generation)
    tensors = random_tensors(config, seed=seed, dtype=getattr(torch, dtype))
    named = {saved_name(name): tensor for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})


def random_tensors(
    config: DeepseekV4Config, *, seed: int, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Random tensors under official names."""
    generator = torch.Generator().manual_seed(seed)
    shapes = tensor_shapes(config)
    return {
        name: _random_tensor(name, shape, config, generator, dtype)
        for name, shape in shapes.items()
    }


def _random_tensor(
    name: str,
    shape: tuple[int, ...],
    config: DeepseekV4Config,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> Tensor:
    """One tensor at the scale that suits its part: see the module's docstring."""
    if name.endswith("tid2eid"):  # distinct experts for each token, as a real table has
        keys = torch.rand(shape[0], config.num_experts, generator=generator)
        return keys.argsort(1)[:, : shape[1]].contiguous()
    normal = torch.randn(shape, generator=generator)
    if name == "embed.weight":
        return normal.to(dtype)
    if name == "head.weight":
        return (normal * (LOGIT_STD * shape[1] ** -0.5)).to(dtype)
    if "norm" in name or name.endswith("_scale"):
        return 1 + 0.1 * normal
    if name.endswith("_fn"):
        return normal * shape[1] ** -0.5
    if len(shape) == 2 and not name.endswith(".ape"):
        return (normal * shape[1] ** -0.5).to(dtype)
    return 0.5 * normal  # ape, sinks, biases


_SAVED_NAMES = (
    (re.compile(r"^embed\."), "embed_tokens."),
    (re.compile(r"^hc_head_"), "hc_head.hc_"),
    (re.compile(r"\.attn\.kv_norm\."), ".attn.norm."),
)


def saved_name(name: str) -> str:
    """The name that transformers' `save_pretrained` gives a tensor of this official name."""
    if name == "head.weight":
        return name
    for pattern, saved in _SAVED_NAMES:
        name = pattern.sub(saved, name)
    return f"model.{name}"


def transformers_config(config: DeepseekV4Config, dtype: str = "float32") -> dict[str, Any]:
    """config.json in transformers' dialect."""
    eos = list(config.eos_token_ids)
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": 1,
        "head_dim": config.head_dim,
        "qk_rope_head_dim": config.rope_dim,
        "partial_rotary_factor": config.rope_dim / config.head_dim,
        "q_lora_rank": config.q_lora_rank,
        "o_groups": config.o_groups,
        "o_lora_rank": config.o_lora_rank,
        "sliding_window": config.sliding_window,
        "layer_types": [str(kind) for kind in config.layer_types],
        "compress_rates": {
            str(LayerType.CSA): config.csa_ratio,
            str(LayerType.HCA): config.hca_ratio,
        },
        "index_n_heads": config.index_num_heads,
        "index_head_dim": config.index_head_dim,
        "index_topk": config.index_topk,
        "mlp_layer_types": [str(kind) for kind in config.mlp_types],
        "n_routed_experts": config.num_experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": config.num_experts_per_token,
        "moe_intermediate_size": config.expert_width,
        "routed_scaling_factor": config.routed_scale,
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "swiglu_limit": config.swiglu_limit,
        "max_position_embeddings": config.max_model_len,
        "rope_theta": config.rope_theta,
        "compress_rope_theta": config.compress_rope_theta,
        "rope_parameters": _rope_parameters(config),
        "hc_mult": config.hc_mult,
        "hc_sinkhorn_iters": config.hc_sinkhorn_iters,
        "hc_eps": config.hc_eps,
        "rms_norm_eps": config.norm_eps,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "pad_token_id": PAD_TOKEN_ID,
    }


def _rope_parameters(config: DeepseekV4Config) -> dict[str, Any]:
    partial = config.rope_dim / config.head_dim
    main = {
        "rope_type": "default",
        "rope_theta": config.rope_theta,
        "partial_rotary_factor": partial,
    }
    compress: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": config.compress_rope_theta,
        "partial_rotary_factor": partial,
    }
    if (yarn := config.compress_yarn) is not None:
        compress |= {
            "rope_type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_max_tokens,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "attention_factor": 1.0,  # left out, transformers would derive another
        }
    return {"main": main, "compress": compress}


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
