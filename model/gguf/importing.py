"""Import of a GGUF file: written out once as an ordinary checkpoint folder, exact in float32.

Nothing else has to know GGUF then. A folder appears whole or not at all.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from sluice.model.gguf.config import config_of, generation_config_of
from sluice.model.gguf.file import GgufFile
from sluice.model.gguf.tokenizer import tokenizer_config_of, tokenizer_of
from sluice.protocol.messages import ConfigError

SHARD_BYTES = 2 << 30  # of a weights file, and about what the import holds in memory

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def import_gguf(
    path: Path, folder: Path, on_tensor: Callable[[int, int], None] = lambda done, all_: None
) -> None:
    """Write config, weights, tokenizer and chat template of a GGUF file into a new folder.

    on_tensor: called after each tensor with their number so far, and in all.
    Raises ConfigError if the folder is not empty or the file holds what is not served.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder}: not empty, expected a new or empty folder")
    file = GgufFile(path)
    config, tokenizer = config_of(file), tokenizer_of(file)
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write_weights(partial, _named_tensors(file, config), file.num_tensors, on_tensor)
        tokenizer.save(str(partial / "tokenizer.json"))
        _write_json(partial / "tokenizer_config.json", tokenizer_config_of(file))
        _write_json(partial / "generation_config.json", generation_config_of(file))
        _write_json(partial / "config.json", config)
        partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _named_tensors(file: GgufFile, config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors under transformers' names and in its order of channels."""
    permuted = {
        "self_attn.q_proj": "num_attention_heads",
        "self_attn.k_proj": "num_key_value_heads",
    }
    for name, tensor in file.tensors():
        saved = saved_name(name)
        if saved is None:
            raise ConfigError(f"{file.path}: tensor {name} has no place in {config['model_type']}")
        for part, heads in permuted.items():
            if config["model_type"] == "llama" and f".{part}." in saved:
                tensor = halves_apart(tensor, config[heads])
        yield saved, tensor


def saved_name(name: str) -> str | None:
    """transformers' name of a tensor, or None for one that no model here has."""
    if (match := _LAYER.fullmatch(name)) is not None:
        layer, part, leaf = match.groups()
        own = _LAYER_NAMES.get(part)
        return None if own is None else f"model.layers.{layer}.{own}.{leaf}"
    part, _, leaf = name.rpartition(".")
    return f"{_NAMES[part]}.{leaf}" if part in _NAMES else None


def halves_apart(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo the order of llama files: rows 2i and 2i + 1 of a head to i and i + head_dim/2."""
    heads = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2).reshape(tensor.shape))


def _write_weights(
    folder: Path,
    tensors: Iterator[tuple[str, np.ndarray]],
    num_tensors: int,
    on_tensor: Callable[[int, int], None],
) -> None:
    """safetensors files of at most SHARD_BYTES (or one tensor), and their index."""
    shard: dict[str, np.ndarray] = {}
    files: dict[str, str] = {}  # tensor -> file
    for number, (name, tensor) in enumerate(tensors, start=1):
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > SHARD_BYTES:
            _write_shard(folder, shard, files)
        shard[name] = tensor
        on_tensor(number, num_tensors)
    _write_shard(folder, shard, files)
    total = {"total_size": sum(path.stat().st_size for path in folder.glob("*.safetensors"))}
    index = {"metadata": total, "weight_map": files}
    _write_json(folder / "model.safetensors.index.json", index)


def _write_shard(folder: Path, shard: dict[str, np.ndarray], files: dict[str, str]) -> None:
    name = f"model-{len(set(files.values())) + 1:05d}.safetensors"
    save_file(shard, folder / name, metadata={"format": "pt"})
    files.update(dict.fromkeys(shard, name))
    shard.clear()


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
