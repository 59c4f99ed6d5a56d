"""Models by architecture: what a checkpoint folder is, which pools it needs, and how to load it.

Only `load_model` needs torch, so that a planner or a command line can ask the rest quickly.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sluice.cache.spec import PoolSpec
from sluice.engine.protocol import ConfigError
from sluice.model.config import DeepseekV4Config, parse_config, read_json
from sluice.model.pools import declare

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from sluice.model.inputs import ForwardInputs, PoolView

ARCHITECTURES = ("DeepseekV4ForCausalLM",)
DTYPES = ("float32", "bfloat16")  # of weights, activations and cached vectors


@dataclass(frozen=True)
class ModelInfo:
    """What a checkpoint says of itself. `name` is its folder's."""

    name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class Model(Protocol):
    """A loaded model, as the engine sees it."""

    specs: tuple[PoolSpec, ...]  # pools in their default layout; a role may change it
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    fingerprint: str  # equal for equal checkpoints

    def forward(
        self, inputs: ForwardInputs, pools: Mapping[str, PoolView], *, all_logits: bool = False
    ) -> Tensor:
        """Write the step's rows to the pools; fp32 logits [R, vocab] of the last tokens.

        With `all_logits`, those of every token, [T, vocab].
        """
        ...


def describe(path: Path) -> ModelInfo:
    """Read a checkpoint folder's config. Raises ConfigError."""
    architecture, config = _read(path)
    return ModelInfo(
        name=path.resolve().name,
        architecture=architecture,
        max_model_len=config.max_model_len,
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
    )


def declare_pools(
    model: Path | DeepseekV4Config, cache_path: str = "hybrid", dtype: str = "float32"
) -> tuple[PoolSpec, ...]:
    """The pools of a checkpoint folder or config. Raises ConfigError."""
    if cache_path != "hybrid":
        raise ConfigError(f"model.cache_path is {cache_path!r}; DeepSeek-V4 runs on 'hybrid' only")
    if dtype not in DTYPES:
        raise ConfigError(f"model.dtype is {dtype!r}, expected one of {', '.join(DTYPES)}")
    config = model if isinstance(model, DeepseekV4Config) else _read(model)[1]
    return declare(config, dtype=dtype)


def load_model(
    path: Path, *, cache_path: str = "hybrid", dtype: str = "float32", device: str = "cpu"
) -> Model:
    """Load a checkpoint folder. Raises ConfigError naming what does not fit."""
    import torch

    from sluice.model.deepseek_v4 import DeepseekV4

    _, config = _read(path)
    specs = declare_pools(config, cache_path, dtype)
    specs = tuple(dataclasses.replace(spec, device=device) for spec in specs)
    return DeepseekV4.load(path, config, specs, dtype=getattr(torch, dtype), device=device)


def _read(path: Path) -> tuple[str, DeepseekV4Config]:
    """Architecture and config of a checkpoint folder."""
    if not path.is_dir():
        raise ConfigError(f"model.path is {path}: no such folder; give a checkpoint's folder")
    data = read_json(path / "config.json")
    architecture = _architecture(data, path)
    config = parse_config(data, source=str(path / "config.json"))
    generation = path / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.exists() else None
    if eos is not None:  # what generation stops at may differ from the config's
        eos_token_ids = tuple(eos) if isinstance(eos, list) else (eos,)
        config = dataclasses.replace(config, eos_token_ids=eos_token_ids)
    return architecture, config


def _architecture(data: dict[str, Any], path: Path) -> str:
    names = data.get("architectures") or [data.get("model_type", "none given")]
    for name in names:
        if name in ARCHITECTURES:
            return str(name)
    raise ConfigError(
        f"{path / 'config.json'}: architecture {', '.join(map(str, names))} is not supported; "
        f"known: {', '.join(ARCHITECTURES)}"
    )
