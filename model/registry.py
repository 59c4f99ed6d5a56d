"""Models by architecture: what a checkpoint folder is, which pools it needs, and how to load it.

Only `load_model` needs torch, so that a planner or a command line can ask the rest quickly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from sluice.cache.spec import PoolSpec
from sluice.model.common.fields import read_json
from sluice.model.dense.config import DENSE_ARCHITECTURES, DenseConfig, parse_dense_config
from sluice.model.dense.pools import declare_dense
from sluice.model.v4.config import DeepseekV4Config, parse_config
from sluice.model.v4.pools import declare, declare_native
from sluice.protocol.messages import ConfigError
from sluice.protocol.reading import shown

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from sluice.model.common.inputs import ForwardInputs, PoolView

DTYPES = ("float32", "bfloat16")  # of weights, activations and cached vectors

AnyConfig = DeepseekV4Config | DenseConfig
Specs = tuple[PoolSpec, ...]


@dataclass(frozen=True)
class ModelInfo:
    """What a checkpoint says of itself. `name` is its folder's."""

    name: str
    architecture: str
    max_model_len: int
    vocab_size: int


class Model(Protocol):
    """A loaded model, as the engine sees it."""

    specs: tuple[PoolSpec, ...]  # pools in their default layout; a role may change it
    vocab_size: int
    max_model_len: int
    fingerprint: str  # equal for equal checkpoints
    replay_tokens: int  # see CacheManager
    repeats: bool  # whether decode steps are worth recording on a CPU: see kernels/capture.py

    def forward(
        self, inputs: ForwardInputs, pools: Mapping[str, PoolView], *, all_logits: bool = False
    ) -> Tensor:
        """Write the step's rows to the pools; fp32 logits [R, vocab] of the last tokens.

        With `all_logits`, those of every token, [T, vocab].
        """
        ...


@dataclass(frozen=True)
class Family:
    """How the checkpoints of some architectures are read, cached and run.

    parse: (config.json's content, its name in errors, architecture) -> config.
    pools: for each cache path the pools in their default layout; `auto` takes the first.
    load: (folder, config, specs, dtype, device, stored) -> model; it may import torch. `stored`:
        whether quantised weights stay as they are.
    """

    parse: Callable[[Mapping[str, Any], str, str], AnyConfig]
    pools: Mapping[str, Callable[[Any, str], Specs]]
    load: Callable[[Path, Any, Specs, dtype, str, bool], Model]


def _load_deepseek_v4(
    path: Path, config: DeepseekV4Config, specs: Specs, dtype: dtype, device: str, stored: bool
) -> Model:
    from sluice.model.v4.hybrid import DeepseekV4
    from sluice.model.v4.native import planner_for

    plan = planner_for(specs, config, dtype)
    return DeepseekV4.load(
        path, config, specs, dtype=dtype, device=device, stored=stored, plan=plan
    )


def _load_dense(
    path: Path, config: DenseConfig, specs: Specs, dtype: dtype, device: str, stored: bool
) -> Model:
    """Quantised weights are refused, so there is nothing to choose."""
    from sluice.model.dense.model import DenseModel

    return DenseModel.load(path, config, specs, dtype=dtype, device=device)


DEEPSEEK_V4 = Family(
    parse=lambda data, source, architecture: parse_config(data, source),
    pools={
        "hybrid": lambda config, dtype: declare(config, dtype=dtype),
        "native": lambda config, dtype: declare_native(config),
    },
    load=_load_deepseek_v4,
)
DENSE = Family(
    parse=parse_dense_config,
    pools={"native": lambda config, dtype: declare_dense(config, dtype=dtype)},
    load=_load_dense,
)
FAMILIES = {DeepseekV4Config.architecture: DEEPSEEK_V4} | dict.fromkeys(DENSE_ARCHITECTURES, DENSE)


def describe(path: Path) -> ModelInfo:
    """Read a checkpoint folder's config. Raises ConfigError."""
    config = _read(path)
    return ModelInfo(
        name=path.resolve().name,
        architecture=config.architecture,
        max_model_len=config.max_model_len,
        vocab_size=config.vocab_size,
    )


def declare_pools(
    model: Path | AnyConfig, cache_path: str = "auto", dtype: str = "float32"
) -> Specs:
    """The pools of a checkpoint folder or config. Raises ConfigError."""
    config = _read(model) if isinstance(model, Path) else model
    if dtype not in DTYPES:
        raise ConfigError(f"model.dtype is {dtype!r}, expected one of {', '.join(DTYPES)}")
    pools = FAMILIES[config.architecture].pools
    chosen = next(iter(pools)) if cache_path == "auto" else cache_path
    if chosen not in pools:
        raise ConfigError(
            f"model.cache_path is {cache_path!r}, but {config.architecture} has "
            f"{' and '.join(pools)} only; choose that, or leave cache_path out"
        )
    return pools[chosen](config, dtype)


def load_model(
    path: Path,
    *,
    cache_path: str = "auto",
    dtype: str = "float32",
    weights: Literal["stored", "dequantized"] = "stored",
    device: str = "cpu",
) -> Model:
    """Load a checkpoint folder. Raises ConfigError naming what does not fit."""
    import torch

    config = _read(path)
    specs = declare_pools(config, cache_path, dtype)
    specs = tuple(dataclasses.replace(spec, device=device) for spec in specs)
    load, stored = FAMILIES[config.architecture].load, weights == "stored"
    return load(path, config, specs, getattr(torch, dtype), device, stored)


def _read(path: Path) -> AnyConfig:
    """The config of a checkpoint folder."""
    if not path.is_dir():
        raise ConfigError(
            f"model.path is {path}: no such folder; give a checkpoint's folder, or make one with "
            "`sluice make-checkpoint FOLDER` or, from GGUF, `sluice import-gguf SOURCE FOLDER`"
        )
    data = read_json(path / "config.json")
    architecture = _architecture(data, path)
    return FAMILIES[architecture].parse(data, str(path / "config.json"), architecture)


def _architecture(data: dict[str, Any], path: Path) -> str:
    names = data.get("architectures") or [data.get("model_type", "none given")]
    for name in names if isinstance(names, list) else []:
        if isinstance(name, str) and name in FAMILIES:
            return name
    raise ConfigError(
        f"{path / 'config.json'}: architecture {_listed(names)} is not supported; "
        f"known: {', '.join(FAMILIES)}"
    )


def _listed(names: Any) -> str:
    is_texts = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return ", ".join(names)[:200] if is_texts else shown(names)
