"""Softmax over ranges of rows computed apart: what each range leaves, and one result from them.

For a query's head, a range of rows leaves three things: the largest score, the sum of
exp2(score - largest), and the values weighted by those. Scores are in units of log2(e), so that
exp2 is what weighs them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.aot import Case
from sluice.kernels.launch import num_processors

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.0e38)  # of no rows: finite, so that differences are never NaN


def num_splits(like: Tensor, num_programs: int, num_rows: int, min_rows: int) -> int:
    """Ranges to cut the rows of `num_programs` programs into, so that the device is busy.

    A range has `min_rows` rows or more: below that, combining costs more than it gains.
    """
    wanted = 2 * num_processors(like) // max(1, num_programs)
    return max(1, min(wanted, num_rows // min_rows))


def combine_splits(
    sums: Tensor, peaks: Tensor, sinks: Tensor | None, rotation: Tensor | None, result: Tensor
) -> None:
    """Write the attention of all ranges together to `result` [num_queries, num_heads, dim].

    sums: [num_queries, num_splits, num_heads, dim] fp32, the weighted values of each range.
    peaks: [num_queries, num_splits, num_heads, 2] fp32, largest score and sum of weights.
    sinks: [num_heads] fp32 logits that take weight and add nothing, or None.
    rotation: [num_queries, rope_dim // 2, 2] fp32, cosine and sine of what to undo at the end of
        `dim`, or None.
    """
    num_queries, num_splits, num_heads, dim = sums.shape
    _combine[(num_queries, num_heads)](
        sums,
        peaks,
        sinks,
        rotation,
        result,
        num_splits,
        num_heads,
        DIM=dim,
        ROPE_DIM=0 if rotation is None else 2 * rotation.shape[1],
        BLOCK_DIM=triton.next_power_of_2(dim),
    )


@triton.jit
def weigh(scores: tl.tensor, peak: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Take in scores [m, n], given the largest and the sum [m] so far.

    Returns the weights [m, n], the new largest and sum, and what earlier sums must be scaled by.
    """
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - new_peak[:, None])
    kept = tl.exp2(peak - new_peak)
    return weights, new_peak, total * kept + tl.sum(weights, 1), kept


@triton.jit
def sink_share(peak: tl.tensor, total: tl.tensor, sink: tl.tensor) -> tl.tensor:
    """What to multiply weighted values with: 1 / (total + exp2(sink)), relative to the peak.

    sink: in units of log2(e), LOWEST for none.
    """
    highest = tl.maximum(peak, sink)
    kept = tl.exp2(peak - highest)
    return kept / (total * kept + tl.exp2(sink - highest))


@triton.jit
def unrotate(
    x: tl.tensor,
    rotation: tl.tensor,
    NUM: tl.constexpr,
    DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> tl.tensor:
    """x [NUM, BLOCK_DIM] with the last ROPE_DIM of DIM channels turned back, as fp32 pairs.

    rotation: [ROPE_DIM // 2, 2] fp32, cosine and sine of each pair.
    """
    pair = tl.arange(0, BLOCK_DIM // 2)
    turn = pair - (DIM - ROPE_DIM) // 2
    turned = (turn >= 0) & (turn < ROPE_DIM // 2)
    cos = tl.load(rotation + 2 * turn, mask=turned, other=1.0)[None, :]
    sin = tl.load(rotation + 2 * turn + 1, mask=turned, other=0.0)[None, :]
    even, odd = tl.split(tl.reshape(x, [NUM, BLOCK_DIM // 2, 2]))
    return tl.reshape(tl.join(even * cos + odd * sin, odd * cos - even * sin), [NUM, BLOCK_DIM])


@triton.jit
def _combine(
    sums: tl.tensor,
    peaks: tl.tensor,
    sinks: tl.tensor,
    rotation: tl.tensor,
    result: tl.tensor,
    num_splits: tl.tensor,
    num_heads: tl.tensor,
    DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    """One head of one query: program (query, head). All tensors contiguous."""
    query, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, BLOCK_DIM)
    within = channel < DIM
    peak, total = tl.full([], LOWEST, tl.float32), 0.0
    acc = tl.zeros([BLOCK_DIM], tl.float32)
    for split in range(num_splits):
        part = (query * num_splits + split) * num_heads + head
        part_peak = tl.load(peaks + 2 * part)
        highest = tl.maximum(peak, part_peak)
        kept, scale = tl.exp2(peak - highest), tl.exp2(part_peak - highest)
        total = total * kept + tl.load(peaks + 2 * part + 1) * scale
        acc = acc * kept + tl.load(sums + part * DIM + channel, mask=within, other=0.0) * scale
        peak = highest
    sink = tl.full([], LOWEST, tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head) * LOG2_E
    acc *= sink_share(peak, total, sink)
    if ROPE_DIM > 0:
        turns = rotation + query * ROPE_DIM
        acc = tl.reshape(
            unrotate(tl.reshape(acc, [1, BLOCK_DIM]), turns, 1, DIM, ROPE_DIM, BLOCK_DIM),
            [BLOCK_DIM],
        )
    at = result + (query * num_heads + head) * DIM + channel
    tl.store(at, acc.to(result.dtype.element_ty), mask=within)


AOT = (
    Case(
        _combine,
        "V4-Flash decode",
        {"sums": "*fp32:16", "peaks": "*fp32:16", "sinks": "*fp32:16", "rotation": "*fp32:16"}
        | {"result": "*bf16:16", "num_splits": "i32", "num_heads": "i32:16"},
        {"DIM": 512, "ROPE_DIM": 64, "BLOCK_DIM": 512},
    ),
    Case(
        _combine,
        "dense decode",
        {"sums": "*fp32:16", "peaks": "*fp32:16", "result": "*bf16:16"}
        | {"num_splits": "i32", "num_heads": "i32:16"},
        {"DIM": 128, "ROPE_DIM": 0, "BLOCK_DIM": 128},
    ),
)
