"""Quantised weights of the released checkpoints: codes joined with their scales, and checked.

FP8   x.weight float8_e4m3fn [out, in]    x.scale ue8m0 [ceil(out / 128), ceil(in / 128)]
FP4   x.weight int8 [out, in / 2]         x.scale ue8m0 [out, in / 32]
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sluice.kernels.matmul import BLOCK, FP4, FP8, RUN, BlockScaled, Weight
from sluice.protocol.messages import ConfigError

_KINDS = {torch.float8_e4m3fn: FP8, torch.int8: FP4, torch.uint8: FP4}
_SCALE_DTYPES = (torch.float8_e8m0fnu, torch.uint8)


def join_scales(tensors: Mapping[str, Tensor], source: str) -> dict[str, Weight]:
    """Weights by official name: codes and scales in one, other tensors as they are.

    Raises ConfigError naming codes without scales, scales without codes, and what does not fit.
    """
    weights: dict[str, Weight] = {
        name: tensor for name, tensor in tensors.items() if not name.endswith(".scale")
    }
    for name in sorted(tensors.keys() - weights.keys()):
        weight = f"{name.removesuffix('scale')}weight"
        if weight not in tensors:
            raise ConfigError(f"{source}: {name} has no {weight} whose scale it could be")
        try:
            weights[weight] = _joined(tensors[weight], tensors[name])
        except ValueError as error:
            raise ConfigError(f"{source}: {weight} and its scale: {error}") from error
    for name, found in weights.items():
        if isinstance(found, Tensor) and found.element_size() < 2:
            raise ConfigError(
                f"{source}: {name} is {found.dtype} without a scale, expected "
                f"{name.removesuffix('weight')}scale beside it; the checkpoint is not complete"
            )
    return weights


def _joined(codes: Tensor, scale: Tensor) -> BlockScaled:
    """Raises ValueError saying what does not fit."""
    if codes.dtype not in _KINDS or codes.dim() != 2:
        raise ValueError(
            f"codes are {codes.dtype} {tuple(codes.shape)}, expected a matrix of float8_e4m3fn, "
            "or of int8 that holds two FP4 codes each"
        )
    if scale.dtype not in _SCALE_DTYPES:
        raise ValueError(f"scales are {scale.dtype}, expected float8_e8m0fnu, powers of two")
    rows, columns = codes.shape
    if _KINDS[codes.dtype] == FP8:
        expected = (-(-rows // BLOCK), -(-columns // BLOCK))
    else:
        codes, expected = codes.view(torch.uint8), (rows, -(-2 * columns // RUN))
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"codes are {codes.dtype} {tuple(codes.shape)}, scales {tuple(scale.shape)}, "
            f"expected scales {expected}"
        )
    return BlockScaled(codes, scale.view(torch.uint8))
