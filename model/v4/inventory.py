"""The tensors of a DeepSeek-V4 checkpoint by their official names, and the shape of each."""

from __future__ import annotations

from sluice.model.v4.config import DeepseekV4Config, LayerType, MlpType

Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(config: DeepseekV4Config) -> Shapes:
    """Every tensor a checkpoint of this config must hold, MTP layers aside."""
    hidden, streams = config.hidden_size, config.hc_mult
    shapes: Shapes = {
        "embed.weight": (config.vocab_size, hidden),
        "head.weight": (config.vocab_size, hidden),
        "norm.weight": (hidden,),
        "hc_head_fn": (streams, streams * hidden),
        "hc_head_base": (streams,),
        "hc_head_scale": (1,),
    }
    for layer in range(config.num_layers):
        parts = _layer(config, layer)
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in parts.items()}
    return shapes


def _layer(config: DeepseekV4Config, layer: int) -> Shapes:
    hidden, streams = config.hidden_size, config.hc_mult
    mixes = streams * (2 + streams)
    shapes: Shapes = {"attn_norm.weight": (hidden,), "ffn_norm.weight": (hidden,)}
    for sublayer in ("attn", "ffn"):
        shapes[f"hc_{sublayer}_fn"] = (mixes, streams * hidden)
        shapes[f"hc_{sublayer}_base"] = (mixes,)
        shapes[f"hc_{sublayer}_scale"] = (3,)
    shapes |= _prefixed("attn.", _attention(config, config.layer_types[layer]))
    return shapes | _prefixed("ffn.", _moe(config, config.mlp_types[layer]))


def _attention(config: DeepseekV4Config, layer_type: LayerType) -> Shapes:
    hidden, dim, rank = config.hidden_size, config.head_dim, config.q_lora_rank
    out_rank = config.o_groups * config.o_lora_rank
    shapes: Shapes = {
        "attn_sink": (config.num_heads,),
        "wq_a.weight": (rank, hidden),
        "q_norm.weight": (rank,),
        "wq_b.weight": (config.num_heads * dim, rank),
        "wkv.weight": (dim, hidden),
        "kv_norm.weight": (dim,),
        "wo_a.weight": (out_rank, config.num_heads * dim // config.o_groups),
        "wo_b.weight": (hidden, out_rank),
    }
    if layer_type is LayerType.HCA:
        shapes |= _prefixed("compressor.", _compressor(hidden, dim, dim, config.hca_ratio))
    if layer_type is LayerType.CSA:
        shapes |= _prefixed("compressor.", _compressor(hidden, dim, 2 * dim, config.csa_ratio))
        shapes |= _prefixed("indexer.", _indexer(config))
    return shapes


def _indexer(config: DeepseekV4Config) -> Shapes:
    hidden, heads, dim = config.hidden_size, config.index_num_heads, config.index_head_dim
    return {
        "wq_b.weight": (heads * dim, config.q_lora_rank),
        "weights_proj.weight": (heads, hidden),
        **_prefixed("compressor.", _compressor(hidden, dim, 2 * dim, config.csa_ratio)),
    }


def _compressor(hidden: int, dim: int, width: int, ratio: int) -> Shapes:
    return {
        "wkv.weight": (width, hidden),
        "wgate.weight": (width, hidden),
        "ape": (ratio, width),
        "norm.weight": (dim,),
    }


def _moe(config: DeepseekV4Config, mlp_type: MlpType) -> Shapes:
    hidden, experts = config.hidden_size, config.num_experts
    shapes: Shapes = {"gate.weight": (experts, hidden)}
    if mlp_type is MlpType.HASH:
        shapes["gate.tid2eid"] = (config.vocab_size, config.num_experts_per_token)
    else:
        shapes["gate.bias"] = (experts,)
    for expert in ("shared_experts", *(f"experts.{e}" for e in range(experts))):
        shapes[f"{expert}.w1.weight"] = (config.expert_width, hidden)
        shapes[f"{expert}.w2.weight"] = (hidden, config.expert_width)
        shapes[f"{expert}.w3.weight"] = (config.expert_width, hidden)
    return shapes


def _prefixed(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}
