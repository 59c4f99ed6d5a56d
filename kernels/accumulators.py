"""Accumulating compressor: an unfinished block as three running numbers a channel.

Its max of scores, its sum of exp(score - max), and its sum of kv * exp(score - max).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.aot import Case
from sluice.kernels.compressor import BLOCK_TOKENS, LOWEST, MAX_BLOCK_DIM
from sluice.kernels.cpu import call, compiled, place
from sluice.kernels.launch import block_size, runs_triton
from sluice.kernels.rows import gather_rows, row_offsets

_LOWEST = tl.constexpr(LOWEST)


def accumulate_blocks(
    rows: Tensor, slots: Tensor, block_of_token: Tensor, kv: Tensor, score: Tensor
) -> Tensor:
    """Blocks' accumulators (max, sum, weighted kv) after this step: [num_blocks, 3, dim].

    rows: state pool's layer view [num_pages, rows_per_page, 3, dim] fp32, only read.
    slots: [num_blocks], where the accumulators of a block's earlier tokens lie; -1 = the block
        begins in this step.
    block_of_token: [num_tokens], index into `slots`, ascending; kv, score: [num_tokens, dim] fp32,
        the elements of a token contiguous.
    """
    if runs_triton(rows):
        run = _accumulate
    else:
        run = _compiled if compiled(rows) else accumulate_blocks_reference
    return run(rows, slots, block_of_token, kv, score)


def accumulate_blocks_reference(
    rows: Tensor, slots: Tensor, block_of_token: Tensor, kv: Tensor, score: Tensor
) -> Tensor:
    """`accumulate_blocks` in torch, which takes blocks in any order."""
    old_max, old_sum, old_kv = gather_rows(rows, slots).unbind(1)  # [num_blocks, dim]
    old_max = old_max.masked_fill((slots < 0).unsqueeze(-1), LOWEST)
    channels = block_of_token.unsqueeze(-1).expand_as(score)
    new_max = old_max.scatter_reduce(0, channels, score, "amax")
    weight = torch.exp(score - new_max[block_of_token])
    kept = torch.exp(old_max - new_max)
    sums = torch.stack([old_sum * kept, old_kv * kept], dim=1)  # [num_blocks, 2, dim]
    sums.index_add_(0, block_of_token, torch.stack([weight, weight * kv], dim=1))
    return torch.cat([new_max.unsqueeze(1), sums], dim=1)


def close_blocks(accumulators: Tensor) -> Tensor:
    """Rows [num_blocks, dim] fp32 from accumulators [num_blocks, 3, dim], before norm, rotation."""
    tiny = torch.finfo(torch.float32).tiny  # padding has sum 0
    return accumulators[:, 2] / accumulators[:, 1].clamp(min=tiny)


def _compiled(
    rows: Tensor, slots: Tensor, block_of_token: Tensor, kv: Tensor, score: Tensor
) -> Tensor:
    result = rows.new_empty(len(slots), 3, rows.shape[-1])
    tokens = (kv, kv.stride(0), score, score.stride(0))
    sizes = (len(slots), len(kv), rows.shape[-1], LOWEST)
    call("accumulate", *place(rows), slots, block_of_token, *tokens, result, *sizes)
    return result


def _accumulate(
    rows: Tensor, slots: Tensor, block_of_token: Tensor, kv: Tensor, score: Tensor
) -> Tensor:
    num_blocks, dim = slots.shape[0], rows.shape[-1]
    result = rows.new_empty(num_blocks, 3, dim)
    block_dim = block_size(dim, high=MAX_BLOCK_DIM)
    if num_blocks:
        _accumulate_blocks[(num_blocks, triton.cdiv(dim, block_dim))](
            rows,
            slots,
            block_of_token,
            kv,
            score,
            result,
            block_of_token.shape[0],
            kv.stride(0),
            score.stride(0),
            rows.shape[1],
            *rows.stride()[:2],
            DIM=dim,
            BLOCK_DIM=block_dim,
            BLOCK_TOKENS=BLOCK_TOKENS,
        )
    return result


@triton.jit
def _first_token(block_of_token: tl.tensor, num_tokens: tl.tensor, block: tl.tensor) -> tl.tensor:
    """The first token of `block` or of a later one."""
    low, high = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32) + num_tokens
    while low < high:
        middle = (low + high) // 2
        before = tl.load(block_of_token + middle) < block
        low = tl.where(before, middle + 1, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def _accumulate_blocks(
    rows: tl.tensor,
    slots: tl.tensor,
    block_of_token: tl.tensor,
    kv: tl.tensor,
    score: tl.tensor,
    result: tl.tensor,
    num_tokens: tl.tensor,
    kv_stride: tl.tensor,
    score_stride: tl.tensor,
    page_rows: tl.tensor,
    page_stride: tl.tensor,
    row_stride: tl.tensor,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
) -> None:
    """BLOCK_DIM channels of one block's accumulators: program (block, channels).

    slots: [num_blocks]; -1 is not read. block_of_token: [num_tokens], ascending, so that a block's
    tokens are found by bisection. result: [num_blocks, 3, DIM] fp32.
    """
    block = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    slot = tl.load(slots + block)
    old = rows + row_offsets(slot, page_stride, row_stride, page_rows) + channel
    there = channel < tl.where(slot >= 0, DIM, 0)
    peak = tl.load(old, mask=there, other=_LOWEST)
    total = tl.load(old + DIM, mask=there, other=0.0)
    acc = tl.load(old + 2 * DIM, mask=there, other=0.0)
    last = _first_token(block_of_token, num_tokens, block + 1)
    for start in range(_first_token(block_of_token, num_tokens, block), last, BLOCK_TOKENS):
        token = (start + tl.arange(0, BLOCK_TOKENS)).to(tl.int64)[:, None]
        within = (token < last) & (channel < DIM)[None, :]
        scores = tl.load(score + token * score_stride + channel, mask=within, other=_LOWEST)
        values = tl.load(kv + token * kv_stride + channel, mask=within, other=0.0)
        new_peak = tl.maximum(peak, tl.max(scores, 0))
        weight = tl.where(within, tl.exp(scores - new_peak[None, :]), 0.0)
        kept = tl.exp(peak - new_peak)
        total = total * kept + tl.sum(weight, 0)
        acc = acc * kept + tl.sum(weight * values, 0)
        peak = new_peak
    at = result + block * (3 * DIM) + channel
    tl.store(at, peak, mask=channel < DIM)
    tl.store(at + DIM, total, mask=channel < DIM)
    tl.store(at + 2 * DIM, acc, mask=channel < DIM)


_LAYOUT = {"page_rows": "i32", "page_stride": "i64:16", "row_stride": "i64:16"}
_FLASH = {"DIM": 512, "BLOCK_DIM": MAX_BLOCK_DIM, "BLOCK_TOKENS": BLOCK_TOKENS}
AOT = (
    Case(
        _accumulate_blocks,
        "V4-Flash HCA layer",
        {"rows": "*fp32:16", "slots": "*i64:16", "block_of_token": "*i64:16", "kv": "*fp32:16"}
        | {"score": "*fp32:16", "result": "*fp32:16", "num_tokens": "i32"}
        | {"kv_stride": "i32:16", "score_stride": "i32:16"}
        | _LAYOUT,
        _FLASH,
    ),
)
