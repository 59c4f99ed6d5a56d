"""What the GPU check runs: shapes, and for each kernel its work, its truth and its floor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.cache.row_format import RowFormat

Result = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Shape:
    """Sizes of one model, of a decode step and of a prompt's chunk. `dtype` is the activations'."""

    name: str
    dtype: torch.dtype
    hidden: int
    num_heads: int
    head_dim: int
    rope_dim: int
    index_heads: int
    index_dim: int
    window: int
    top_k: int
    num_experts: int
    experts_per_token: int
    expert_width: int
    vocab: int
    batch: int  # requests that decode together
    context: int  # tokens of each
    chunk: int  # tokens of a prompt computed together

    @property
    def element_bytes(self) -> int:
        return self.dtype.itemsize


FLASH = Shape(
    "V4-Flash", torch.bfloat16, hidden=4096, num_heads=64, head_dim=512, rope_dim=64,
    index_heads=64, index_dim=128, window=128, top_k=512, num_experts=256, experts_per_token=6,
    expert_width=2048, vocab=129_280, batch=64, context=32_768, chunk=4096,
)  # fmt: skip
# Small and odd enough for the interpreter, in fp32: its casts to bf16 do not round.
SMALL = Shape(
    "small", torch.float32, hidden=160, num_heads=3, head_dim=40, rope_dim=8,
    index_heads=5, index_dim=32, window=9, top_k=6, num_experts=5, experts_per_token=2,
    expert_width=96, vocab=300, batch=3, context=200, chunk=21,
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """One kernel at one shape.

    run: computes the result; it may be called again, but is checked the first time.
    expected: the true values, fp64, of the rows `sample` of each tensor of the result (all rows
        where it is None).
    tolerance: largest error, as a share of the largest true value; 0: equal to the bit.
    num_bytes: that must at least be read and written; flops: at least, at the rate of `rate`.
    """

    kernel: str
    label: str
    run: Callable[[], Result]
    expected: Callable[[], Result]
    tolerance: float
    num_bytes: int
    flops: int = 0
    rate: str = "bf16"
    sample: Tensor | None = None


def row_formats(shape: Shape) -> dict[str, RowFormat]:
    """The packed rows of the shape's pools, by name: of kv, and of index keys."""
    coded, index = shape.head_dim - shape.rope_dim, shape.index_dim
    forms = (
        RowFormat("fp8_v4", coded, shape.rope_dim, tile=64, code="e4m3", scale="ue8m0"),
        RowFormat("fp8", index, 0, tile=index, code="e4m3", scale="float32"),
        RowFormat("fp4", index, 0, tile=32, code="e2m1", scale="ue8m0"),
    )
    return {form.name: form for form in forms}


def spread(num_rows: int, most: int = 32) -> Tensor:
    """Row numbers from the first to the last, at most `most`."""
    return torch.linspace(0, num_rows - 1, min(num_rows, most)).long()


def num_bytes_of(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def rounding(shape: Shape) -> float:
    """The tolerance of results in the shape's dtype whose sums are fp32."""
    return 1e-2 if shape.dtype == torch.bfloat16 else 1e-5
