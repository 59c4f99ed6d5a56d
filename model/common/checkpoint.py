"""Reading a checkpoint folder: safetensors files, in any of three name dialects.

    official             layers.0.attn.wkv.weight                    (names used inside here)
    transformers'        model.layers.0.self_attn.kv_proj.weight     experts in one tensor
    save_pretrained's    model.layers.0.attn.wkv.weight              attn.norm for attn.kv_norm

Scales of quantised weights are `.scale` officially, `.weight_scale_inv` in transformers.

Tensors of MTP layers (`mtp.*`) are left out: they draft, and the model's own output does not
depend on them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from sluice.kernels.matmul import Weight
from sluice.model.common.quantised import join_scales
from sluice.model.common.weight_files import weight_files
from sluice.protocol.messages import ConfigError

# Applied in this order to a name without its `model.` prefix.
_RENAMES = [
    (re.compile(pattern), official)
    for pattern, official in (
        (r"^lm_head\.", "head."),
        (r"^embed_tokens\.", "embed."),
        (r"^hc_head\.hc_", "hc_head_"),
        (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
        (r"\.input_layernorm\.", ".attn_norm."),
        (r"\.post_attention_layernorm\.", ".ffn_norm."),
        (r"\.self_attn\.", ".attn."),
        (r"\.attn\.norm\.", ".attn.kv_norm."),
        (r"\.sinks$", ".attn_sink"),
        (r"\.compressor\.indexer\.scorer\.", ".indexer."),
        (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
        (r"\.compressor\.indexer\.", ".indexer.compressor."),
        (r"\.compressor\.kv_norm\.", ".compressor.norm."),
        (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
        (r"\.position_bias$", ".ape"),
        (r"\.q_a_norm\.", ".q_norm."),
        (r"\.kv_proj\.", ".wkv."),
        (r"\.([qo])_([ab])_proj\.", r".w\1_\2."),
        (r"\.mlp\.", ".ffn."),
        (r"\.e_score_correction_bias$", ".bias"),
        (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
        (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
        (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
        (r"\.weight_scale_inv$", ".scale"),
    )
]
_MAX_LISTED = 5  # names in an error message


def official_name(name: str) -> str:
    """A tensor's official name, given its name in any dialect."""
    name = name.removeprefix("model.")
    for pattern, official in _RENAMES:
        name = pattern.sub(official, name)
    return name


def official_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of any dialect under official names; fused experts become views of each expert."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        official = official_name(name)
        if official.startswith("mtp."):
            continue
        result.update(_split_experts(official, tensor))
    return result


def _split_experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """transformers' gate_up_proj [E, 2 * width, hidden] and down_proj as each expert's matrices.

    Their scales, of as many dimensions, are split in the same way.
    """
    stem, _, leaf = name.rpartition(".")
    part = "scale" if leaf.endswith("_scale_inv") else "weight"
    leaf = leaf.removesuffix("_scale_inv")
    if leaf not in ("gate_up_proj", "down_proj"):
        yield name, tensor
        return
    for expert, matrix in enumerate(tensor):
        if leaf == "down_proj":
            yield f"{stem}.{expert}.w2.{part}", matrix
        else:
            yield f"{stem}.{expert}.w1.{part}", matrix[: matrix.shape[0] // 2]
            yield f"{stem}.{expert}.w3.{part}", matrix[matrix.shape[0] // 2 :]


def read_weights(folder: Path) -> dict[str, Weight]:
    """All weights of a checkpoint folder under official names, on the CPU as stored.

    Raises ConfigError if files are missing or unreadable, or codes and scales do not fit.
    """
    return join_scales(official_tensors(stored_tensors(folder)), str(folder))


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint folder, under the names and as the files have them.

    Raises ConfigError if files are missing or unreadable.
    """
    tensors: dict[str, Tensor] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path}: cannot be read as safetensors: {error}") from error
    return tensors


def refuse_quantised(tensors: Mapping[str, Tensor], source: str) -> None:
    """Raise ConfigError if there are quantised weights or their scales among the tensors."""
    for name, tensor in tensors.items():
        if name.endswith((".scale", "_scale_inv")) or tensor.element_size() < 2:
            raise ConfigError(
                f"{source}: {name} ({tensor.dtype}) belongs to quantised weights, expected "
                "bfloat16 or float32, as only DeepSeek-V4 is read quantised; convert the "
                "checkpoint to bfloat16 first"
            )


def check_tensors(
    tensors: Mapping[str, Weight], shapes: Mapping[str, tuple[int, ...]], source: str
) -> None:
    """Raise ConfigError naming tensors that are missing, unexpected or of another shape."""
    for problem, names in (
        ("missing", shapes.keys() - tensors.keys()),
        ("unexpected", tensors.keys() - shapes.keys()),
    ):
        if names:
            listed = ", ".join(sorted(names)[:_MAX_LISTED])
            more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
            raise ConfigError(
                f"{source}: tensors {problem}: {listed}{more}; the weights are not those of this "
                "config.json"
            )
    for name, shape in shapes.items():
        if (actual := tuple(tensors[name].shape)) != shape:
            raise ConfigError(f"{source}: {name} has shape {actual}, expected {shape}")
