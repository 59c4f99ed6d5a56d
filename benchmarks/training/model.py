"""The model to train: how it starts, and the checkpoint it becomes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeepseekV4Config as TransformersConfig
from transformers import DeepseekV4ForCausalLM
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modules

from sluice.model.make_checkpoint import transformers_config
from sluice.model.tokenizer import EOS_TOKEN_ID, PAD_TOKEN_ID
from sluice.model.v4.config import DeepseekV4Config

EMBEDDING_STD = 0.3
HEAD_SCALE = 0.12  # of the output head, which starts as the embedding: logits of about 1
NOISE_STD = 0.02  # on matrices that start structured, so that heads and groups can part
MAX_NEW_TOKENS = 64  # a default for generation; the model has nothing to say beyond


def starting_model(config: DeepseekV4Config, seed: int) -> DeepseekV4ForCausalLM:
    """An untrained model in fp32. Equal arguments give equal weights.

    In layers with compressed rows, queries and rows start from one random projection and the
    output from its transpose; the output head starts as the embedding. So a row that holds the
    query's own token is matched and its content carried to the output, weakly, from the first
    step on. From independent random matrices, recall takes far longer to appear.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DeepseekV4ForCausalLM(TransformersConfig(**transformers_config(config)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            _start_module(module, generator)
        _set(
            model.model.embed_tokens.weight,
            EMBEDDING_STD * _normal(model.lm_head.weight, generator),
        )
        _set(model.lm_head.weight, HEAD_SCALE * model.model.embed_tokens.weight)
        for layer in model.model.layers:
            attention: Any = layer.self_attn
            if attention.compressor is not None:
                _start_matching(attention, config, generator)
    return model


def save_checkpoint(model: DeepseekV4ForCausalLM, folder: Path) -> None:
    """Write config, generation config and weights as transformers does, matrices in bf16.

    Loading as bf16 leaves in fp32 what the architecture keeps there, so the way leads over an
    fp32 copy on disk.
    """
    model.generation_config.update(
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=PAD_TOKEN_ID,
        do_sample=False,
        max_new_tokens=MAX_NEW_TOKENS,
    )
    with tempfile.TemporaryDirectory() as exact:
        model.save_pretrained(exact)
        rounded = DeepseekV4ForCausalLM.from_pretrained(exact, dtype=torch.bfloat16)
    rounded.save_pretrained(folder)


def _start_module(module: nn.Module, generator: torch.Generator) -> None:
    """Where the architecture's own start would keep parts alike or idle."""
    if isinstance(module, modules.DeepseekV4HashRouter):  # distinct experts for each token
        keys = torch.rand(len(module.tid2eid), module.num_experts, generator=generator)
        module.tid2eid.copy_(keys.argsort(1)[:, : module.top_k])
    elif isinstance(module, modules.DeepseekV4HyperConnection):  # streams differ, and are kept
        num = module.hc_mult
        module.base[: 2 * num] = 0.5 * torch.randn(2 * num, generator=generator)
        module.base[2 * num :] = 2 * torch.eye(num).flatten()
        module.fn.mul_(0.1)
    elif hasattr(module, "position_bias"):  # compressors: channels prefer places in the block
        bias: Any = module.position_bias
        _set(bias, _normal(bias, generator))


def _start_matching(attention: Any, config: DeepseekV4Config, generator: torch.Generator) -> None:
    """Queries, compressed rows and output of one layer from one projection, [channels, hidden]."""

    def near(parameter: Tensor, start: Tensor) -> None:
        _set(parameter, start + NOISE_STD * _normal(parameter, generator))

    heads, head_dim, rank = config.num_heads, config.head_dim, config.q_lora_rank
    groups, o_rank = config.o_groups, config.o_lora_rank
    shared = _projection(config.hidden_size, generator)
    near(attention.q_a_proj.weight, shared[:rank])
    near(attention.q_b_proj.weight, torch.eye(head_dim, rank).repeat(heads, 1))
    by_head = attention.q_b_proj.weight.view(heads, head_dim, rank)
    by_head[:, head_dim - config.rope_dim :] *= 0.3  # content matters more than distance
    _set(attention.kv_proj.weight, _projection(config.hidden_size, generator)[:head_dim])
    near(
        attention.o_a_proj.weight, 0.5 * torch.eye(o_rank, head_dim).repeat(groups, heads // groups)
    )
    near(attention.o_b_proj.weight, 0.25 * shared[:o_rank].T.repeat(1, groups))
    _start_compressor(attention.compressor, shared, near)
    attention.compressor.gate_proj.weight.mul_(2)
    indexer = getattr(attention.compressor, "indexer", None)
    if indexer is not None:
        _start_compressor(indexer, shared, near)
        start = torch.eye(config.index_head_dim, rank).repeat(config.index_num_heads, 1)
        near(indexer.q_b_proj.weight, start)


def _start_compressor(
    compressor: Any, shared: Tensor, near: Callable[[Tensor, Tensor], None]
) -> None:
    weight = compressor.kv_proj.weight  # one series of rows, or two that overlap
    num_series = len(weight) // compressor.head_dim
    near(weight, shared[: compressor.head_dim].repeat(num_series, 1))


def _projection(hidden_size: int, generator: torch.Generator) -> Tensor:
    """A random rotation, [hidden, hidden]: any of its first rows are orthonormal."""
    return torch.linalg.qr(torch.randn(hidden_size, hidden_size, generator=generator))[0].T


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator)


def _set(parameter: Tensor, value: Tensor) -> None:
    """Copy; shapes must be equal, nothing is broadcast."""
    assert parameter.shape == value.shape, f"a start of {value.shape} for {parameter.shape}"
    parameter.copy_(value)
