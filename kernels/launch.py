"""Where an operation runs: as a Triton kernel on a device, as its torch reference elsewhere.

Each operation is one file: the public function asks `runs_triton` and calls the kernel or the
reference below it, which has the same signature. With TRITON_INTERPRET=1 in the environment before
triton is imported, Triton itself runs every kernel in its interpreter, on CPU tensors: that is how
kernels are tested where no device is at hand.

Traps of the interpreter (3.9): a dot of bf16 multiplies bit patterns (use `dot` below); conversion
to bf16 cuts off instead of rounding; a tensor's mask must not be combined with a scalar condition
(`mask & (slot >= 0)`): move it into a bound; a constexpr is no scalar: use `tl.full([], x, type)`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)
INTERPRETED_PROCESSORS = 8  # so that tests reach the kernels' splits

_INTERPRETED = tl.constexpr(INTERPRETED)


def runs_triton(tensor: Tensor) -> bool:
    """Whether work on this tensor is a Triton kernel's."""
    return tensor.is_cuda or INTERPRETED


def num_processors(tensor: Tensor) -> int:
    """Streaming multiprocessors of the tensor's device: what a launch should keep busy."""
    if INTERPRETED:
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count


def block_size(size: int, *, low: int = 1, high: int) -> int:
    """The power of two that covers `size`, within [low, high]."""
    return min(max(triton.next_power_of_2(size), low), high)


@triton.jit
def dot(a: tl.tensor, b: tl.tensor, acc: tl.tensor) -> tl.tensor:
    """`acc + a @ b` with fp32 sums: a [m, k] and b [k, n] of one dtype, acc [m, n] fp32.

    bf16 goes through the tensor cores as it is; fp32 is not rounded to tf32.
    """
    if _INTERPRETED:  # which would multiply the bit patterns of bf16
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")
