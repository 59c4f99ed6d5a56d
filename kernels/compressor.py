"""Compressors: one cached row from a block of tokens, weighted by a softmax for each channel.

A token brings `kv` and `score`; a block's row is sum(kv * softmax(score over its tokens)). Three
kinds differ in what they keep of an unfinished block:

    raw           kv and score of each token
    overlapping   the same, twice as wide; a row takes the first half of the channels from the
                  previous block's tokens, the second half from its own:
                      |prev prev prev prev|own own own own| -> row
    accumulating  three running numbers a channel: kernels/accumulators.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.aot import Case
from sluice.kernels.cpu import call, compiled, place
from sluice.kernels.launch import block_size, runs_triton
from sluice.kernels.rows import gather_rows, row_offsets

BLOCK_TOKENS = 8  # a CSA block with the one before it
MAX_BLOCK_DIM = 128  # enough programs for a device even at one block
MAX_GATHERED_ELEMENTS = 1 << 20  # of [blocks, tokens, row] at a time: 4 MB, within the last cache
LOWEST = torch.finfo(torch.float32).min  # exp(LOWEST - anything) is 0, and never NaN as -inf is
_LOWEST = tl.constexpr(LOWEST)


def compress_raw(rows: Tensor, slots: Tensor) -> Tensor:
    """Rows of finished blocks, fp32 [num_blocks, dim], before norm and rotation.

    rows: state pool's layer view [num_pages, rows_per_page, 2, dim] fp32: kv and score of a token.
    slots: [num_blocks, ratio] of each block's tokens. All -1 (padding) gives zeros.
    """
    if runs_triton(rows):
        return _compress(rows, slots, overlap=False)
    if compiled(rows):
        return _compiled(rows, slots, overlap=False)
    return compress_raw_reference(rows, slots)


def compress_overlapping(rows: Tensor, slots: Tensor) -> Tensor:
    """Rows of finished blocks, fp32 [num_blocks, dim], before norm and rotation.

    rows: state pool's layer view [num_pages, rows_per_page, 2, 2 * dim] fp32: kv and score of a
        token, each with the half for the next block's row first.
    slots: [num_blocks, 2 * ratio]: the previous block's tokens, then the block's own; -1 = none
        (weight 0). All -1 (padding) gives zeros.
    """
    if runs_triton(rows):
        return _compress(rows, slots, overlap=True)
    if compiled(rows):
        return _compiled(rows, slots, overlap=True)
    return compress_overlapping_reference(rows, slots)


def compress_raw_reference(rows: Tensor, slots: Tensor) -> Tensor:
    """`compress_raw` in torch."""
    return _tiled(_compress_raw, rows, slots)


def compress_overlapping_reference(rows: Tensor, slots: Tensor) -> Tensor:
    """`compress_overlapping` in torch."""
    return _tiled(_compress_overlapping, rows, slots)


def _compress_raw(rows: Tensor, slots: Tensor) -> Tensor:
    return _weigh(gather_rows(rows, slots), slots)


def _compress_overlapping(rows: Tensor, slots: Tensor) -> Tensor:
    ratio = slots.shape[1] // 2
    dim = rows.shape[-1] // 2
    states = gather_rows(rows, slots)  # [num_blocks, 2 * ratio, 2, 2 * dim]
    return _weigh(torch.cat([states[:, :ratio, :, :dim], states[:, ratio:, :, dim:]], 1), slots)


def _weigh(states: Tensor, slots: Tensor) -> Tensor:
    """Tokens' kv and score [num_blocks, num_tokens, 2, dim] to rows [num_blocks, dim]."""
    kv, score = states.unbind(2)
    score = score.masked_fill((slots < 0).unsqueeze(-1), LOWEST)
    return (kv * score.softmax(1)).sum(1)


def _tiled(compress: Callable[[Tensor, Tensor], Tensor], rows: Tensor, slots: Tensor) -> Tensor:
    """`compress` over as many blocks at a time as bound the memory."""
    tile = max(1, MAX_GATHERED_ELEMENTS // (slots.shape[1] * rows[0, 0].numel()))
    if slots.shape[0] <= tile:
        return compress(rows, slots)
    return torch.cat([compress(rows, part) for part in slots.split(tile)])


def _compiled(rows: Tensor, slots: Tensor, *, overlap: bool) -> Tensor:
    dim = rows.shape[-1] // 2 if overlap else rows.shape[-1]
    result = rows.new_empty(len(slots), dim)
    call("compress", *place(rows), slots.contiguous(), result, *slots.shape, dim, overlap)
    return result


def _compress(rows: Tensor, slots: Tensor, *, overlap: bool) -> Tensor:
    num_blocks, num_tokens = slots.shape
    dim = rows.shape[-1] // 2 if overlap else rows.shape[-1]
    result = rows.new_empty(num_blocks, dim)
    block_dim = block_size(dim, high=MAX_BLOCK_DIM)
    if num_blocks:
        _compress_blocks[(num_blocks, triton.cdiv(dim, block_dim))](
            rows,
            slots.contiguous(),
            result,
            num_tokens,
            rows.shape[1],
            *rows.stride()[:2],
            DIM=dim,
            OVERLAP=overlap,
            BLOCK_DIM=block_dim,
            BLOCK_TOKENS=BLOCK_TOKENS,
        )
    return result


@triton.jit
def _compress_blocks(
    rows: tl.tensor,
    slots: tl.tensor,
    result: tl.tensor,
    num_tokens: tl.tensor,
    page_rows: tl.tensor,
    page_stride: tl.tensor,
    row_stride: tl.tensor,
    DIM: tl.constexpr,
    OVERLAP: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
) -> None:
    """BLOCK_DIM channels of one block's row: program (block, channels).

    rows: kv then score of a token, each of DIM elements, or 2 * DIM with OVERLAP: then the first
    half of the block's tokens gives its first DIM, the second half its second. slots: [num_blocks,
    num_tokens]; -1 is not read. result: [num_blocks, DIM] fp32.
    """
    block = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    width = DIM
    if OVERLAP:
        width = 2 * DIM
    peak = tl.full([BLOCK_DIM], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK_DIM], tl.float32)
    acc = tl.zeros([BLOCK_DIM], tl.float32)
    for start in range(0, num_tokens, BLOCK_TOKENS):
        token = start + tl.arange(0, BLOCK_TOKENS)
        slot = tl.load(slots + block * num_tokens + token, mask=token < num_tokens, other=-1)
        at = row_offsets(slot, page_stride, row_stride, page_rows)
        if OVERLAP:
            at += tl.where(token < num_tokens // 2, 0, DIM)
        at = rows + at[:, None] + channel[None, :]
        there = (slot >= 0)[:, None] & (channel < DIM)[None, :]
        kv = tl.load(at, mask=there, other=0.0)
        score = tl.load(at + width, mask=there, other=_LOWEST)
        new_peak = tl.maximum(peak, tl.max(score, 0))
        weight = tl.where(there, tl.exp(score - new_peak[None, :]), 0.0)
        kept = tl.exp(peak - new_peak)
        total = total * kept + tl.sum(weight, 0)
        acc = acc * kept + tl.sum(weight * kv, 0)
        peak = new_peak
    row = acc / tl.maximum(total, 1e-30)  # 0 of no tokens; of any, 1 or more
    tl.store(result + block * DIM + channel, row, mask=channel < DIM)


_LAYOUT = {"page_rows": "i32", "page_stride": "i64:16", "row_stride": "i64:16"}
_FLASH = {"DIM": 512, "BLOCK_DIM": MAX_BLOCK_DIM, "BLOCK_TOKENS": BLOCK_TOKENS}
AOT = (
    Case(
        _compress_blocks,
        "V4-Flash CSA layer",
        {"rows": "*fp32:16", "slots": "*i64:16", "result": "*fp32:16", "num_tokens": "i32"}
        | _LAYOUT,
        _FLASH | {"OVERLAP": True},
    ),
)
