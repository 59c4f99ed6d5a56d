"""Top-k of scores under a causal limit: the same choice whatever the chunk, batch or role."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.aot import Case
from sluice.kernels.cpu import call, compiled
from sluice.kernels.launch import block_size, runs_triton

BLOCK_ROWS = 2048  # of which one program keeps the best
_NOTHING = tl.constexpr(-(1 << 63))  # below every score
_LAST_ROW = tl.constexpr((1 << 31) - 1)


def causal_topk(scores: Tensor, num_visible: Tensor, k: int) -> Tensor:
    """The `k` best of each query's first `num_visible` rows, in ascending order of row.

    scores: [num_tokens, num_rows] fp32; num_visible: [num_tokens].
    Returns [num_tokens, min(k, num_rows)] int64; -1, at the end, where fewer rows are visible.
    Equal scores at the cut go to the lowest rows, so that neither chunking nor batch nor role can
    change a choice.
    """
    if k >= scores.shape[1]:
        return torch.where(*_visible(scores, num_visible), -1)
    if compiled(scores) and not runs_triton(scores):
        result = num_visible.new_empty(len(scores), k)
        pointers = (scores.contiguous(), num_visible, result)
        call("causal_topk", *pointers, *scores.shape, k, torch.get_num_threads())
        return result
    run = _causal_topk if runs_triton(scores) else causal_topk_reference
    return run(scores, num_visible, k)


def causal_topk_reference(scores: Tensor, num_visible: Tensor, k: int) -> Tensor:
    """`causal_topk` in torch, of fewer than all rows."""
    visible, row = _visible(scores, num_visible)
    scores = scores.masked_fill(~visible, -torch.inf)
    cut = scores.topk(k, sorted=False).values.amin(1, keepdim=True)
    above = scores > cut
    at_cut = (scores == cut) & visible
    places = k - above.sum(1, keepdim=True)  # left for rows at the cut
    chosen = above | (at_cut & (at_cut.cumsum(1) <= places))
    # The n-th chosen row goes to column n; the others share column k, which is cut off.
    column = torch.where(chosen, chosen.cumsum(1) - 1, k)
    result = row.new_full((scores.shape[0], k + 1), -1)
    result.scatter_(1, column, torch.where(chosen, row, -1))
    return result[:, :k]


def _visible(scores: Tensor, num_visible: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each row is visible [num_tokens, num_rows], and the rows' numbers [num_rows]."""
    row = torch.arange(scores.shape[1], device=scores.device)
    return row < num_visible.unsqueeze(1), row


def _causal_topk(scores: Tensor, num_visible: Tensor, k: int) -> Tensor:
    num_tokens, num_rows = scores.shape
    result = num_visible.new_empty(num_tokens, k)
    kept = block_size(k, low=2, high=1 << 30)
    block_rows = max(BLOCK_ROWS, kept)
    num_blocks = triton.cdiv(num_rows, block_rows)
    best = scores.new_empty(num_tokens, num_blocks, kept, dtype=torch.int64)
    if num_tokens:
        _best_of_block[(num_tokens, num_blocks)](
            scores.contiguous(),
            num_visible,
            best,
            num_rows,
            KEPT=kept,
            BLOCK_ROWS=block_rows,
            **_SORT,
        )
        _best_of_blocks[(num_tokens,)](
            best, num_visible, result, num_blocks, k, KEPT=kept, BLOCK_ROWS=block_rows, **_SORT
        )
    return result


@triton.jit
def _best_of_block(
    scores: tl.tensor,
    num_visible: tl.tensor,
    best: tl.tensor,
    num_rows: tl.tensor,
    KEPT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
) -> None:
    """The KEPT best visible rows of a block, worst first: program (token, block).

    scores: [num_tokens, num_rows], of which only visible ones are read; best: [num_tokens,
    num_blocks, KEPT] int64. A row is one number: its score's bits, made to order as integers do,
    above its place counted from the last, so that the lowest of equal rows is the best of them.
    """
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    visible = tl.load(num_visible + token).to(tl.int32)
    if block * BLOCK_ROWS < visible:
        score = tl.load(scores + token * num_rows + row, mask=row < visible, other=0.0)
        score = tl.where(score == 0.0, 0.0, score)  # -0 equals 0
        bits = score.to(tl.int32, bitcast=True)
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        key = (bits.to(tl.int64) << 32) | (-row + _LAST_ROW).to(tl.int64)
        key = tl.topk(tl.where(row < visible, key, _NOTHING), KEPT)
        at = best + (token * tl.num_programs(1) + block) * KEPT
        tl.store(at + KEPT - 1 - tl.arange(0, KEPT), key)


@triton.jit
def _best_of_blocks(
    best: tl.tensor,
    num_visible: tl.tensor,
    result: tl.tensor,
    num_blocks: tl.tensor,
    k: tl.tensor,
    KEPT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
) -> None:
    """The k best rows of all blocks, in ascending order: program (token).

    best: as `_best_of_block` leaves it; result: [num_tokens, k] int64, -1 at the end.
    """
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, KEPT)
    blocks = tl.cdiv(tl.load(num_visible + token).to(tl.int32), BLOCK_ROWS)
    kept = tl.full([KEPT], _NOTHING, tl.int64)
    for block in range(blocks):
        # Best first against worst first: the larger of each pair are the best of both.
        others = tl.load(best + (token * num_blocks + block) * KEPT + place)
        kept = tl.sort(tl.maximum(kept, others), descending=True)
    row = -(kept & _LAST_ROW).to(tl.int32) + _LAST_ROW
    row = tl.sort(tl.where((kept != _NOTHING) & (place < k), row, _LAST_ROW))
    row = tl.where(row == _LAST_ROW, -1, row)
    tl.store(result + token * k + place, row.to(tl.int64), mask=place < k)


_SORT: dict[str, Any] = {"num_warps": 16}  # few keys a thread: their network is code, not a loop
_TOPK = {"KEPT": 512, "BLOCK_ROWS": BLOCK_ROWS}
AOT = (
    Case(
        _best_of_block,
        "V4-Flash",
        {"scores": "*fp32:16", "num_visible": "*i64:16", "best": "*i64:16", "num_rows": "i32"},
        _TOPK,
        **_SORT,
    ),
    Case(
        _best_of_blocks,
        "V4-Flash",
        {"best": "*i64:16", "num_visible": "*i64:16", "result": "*i64:16"}
        | {"num_blocks": "i32", "k": "i32:16"},
        _TOPK,
        **_SORT,
    ),
)
