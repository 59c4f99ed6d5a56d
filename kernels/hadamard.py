"""The Hadamard rotation, which spreads over all channels what is concentrated in few."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.aot import Case
from sluice.kernels.launch import runs_triton

BLOCK_ROWS = 4


def rotate_channels(x: Tensor) -> Tensor:
    """`x @ H / sqrt(dim)` with Sylvester's matrix H, in fp32: a new tensor of x's dtype.

    x: [..., dim], dim a power of two. It is its own inverse, and leaves products of two vectors as
    they are. Sums are taken in one fixed order, so a row's result does not depend on the others.
    """
    dim = x.shape[-1]
    assert dim & (dim - 1) == 0, f"{dim} channels, expected a power of two"
    if not runs_triton(x):
        return rotate_channels_reference(x)
    flat = x.reshape(-1, dim)
    result = torch.empty_like(flat)
    if len(flat):
        _rotate_channels[(triton.cdiv(len(flat), BLOCK_ROWS),)](
            flat, result, len(flat), dim**-0.5, DIM=dim, BLOCK=BLOCK_ROWS, STEPS=_steps(dim)
        )
    return result.view(x.shape)


def rotate_channels_reference(x: Tensor) -> Tensor:
    """`rotate_channels` in torch."""
    rotated = x.float()
    for step in range(_steps(x.shape[-1])):
        low, high = rotated.unflatten(-1, (-1, 2, 1 << step)).unbind(-2)
        rotated = torch.stack([low + high, low - high], dim=-2).flatten(-3)
    return (rotated * x.shape[-1] ** -0.5).to(x.dtype)


def _steps(dim: int) -> int:
    return dim.bit_length() - 1


@triton.jit
def _rotate_channels(
    x: tl.tensor,
    result: tl.tensor,
    num_rows: tl.tensor,
    scale: tl.tensor,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
) -> None:
    """BLOCK rows of x [num_rows, DIM], contiguous, into the same rows of result."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    element = row.to(tl.int64) * DIM + tl.arange(0, DIM)[None, :]
    rotated = tl.load(x + element, mask=row < num_rows, other=0).to(tl.float32)
    for step in tl.static_range(STEPS):
        pairs = tl.reshape(rotated, (BLOCK, DIM >> (step + 1), 2, 1 << step))
        low, high = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        pairs = tl.permute(tl.join(low + high, low - high), (0, 1, 3, 2))
        rotated = tl.reshape(pairs, (BLOCK, DIM))
    rotated = (rotated * scale).to(result.dtype.element_ty)
    tl.store(result + element, rotated, mask=row < num_rows)


AOT = (
    Case(
        _rotate_channels,
        "V4-Flash index queries",
        {"x": "*bf16:16", "result": "*bf16:16", "num_rows": "i32:16", "scale": "fp32"},
        {"DIM": 128, "BLOCK": BLOCK_ROWS, "STEPS": 7},
    ),
)
