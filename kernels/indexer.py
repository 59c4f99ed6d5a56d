"""Indexer: scores of compressed rows for each query."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.aot import Case
from sluice.kernels.cpu import FEW_ROWS, call, compiled, dtype_of, place
from sluice.kernels.formats import read_rows
from sluice.kernels.launch import block_size, dot, runs_triton
from sluice.kernels.packed_rows import FP4_INDEX, FP8_INDEX, RowLayout, Rows, load_rows
from sluice.kernels.rows import row_offsets

MAX_SCORE_ELEMENTS = 1 << 22  # of [queries, heads, rows] at a time: 16 MB, near the last cache
BLOCK_ROWS = {2: 128, 4: 64}  # of keys, by bytes of an element
TILE_TOKENS = 16  # of a prompt that use a block of keys once it is loaded


def index_scores(
    queries: Tensor, weights: Tensor, rows: Rows, slots: Tensor, query_start: Tensor
) -> Tensor:
    """`sum_h weights_h * relu(query_h . row)` for each token and row: fp32 [num_tokens, num_rows].

    queries: [num_tokens, num_heads, dim]; weights: [num_tokens, num_heads] fp32, scale included.
    rows: pool's layer view [num_pages, rows_per_page, dim], or of its packed rows.
    slots: [num_requests, num_rows] of each request's rows in order; scores of rows that are -1 or
        that a query may not see mean nothing: `causal_topk` masks them.
    query_start: [num_requests + 1], the tokens of each request.
    """
    if runs_triton(queries):
        return _index_scores(queries, weights, rows, slots, query_start)
    one_each = len(slots) == len(queries) <= FEW_ROWS
    if one_each and isinstance(rows, Tensor) and compiled(queries, rows):
        return _score_few(queries, weights, rows, slots, query_start)
    return index_scores_reference(queries, weights, rows, slots, query_start)


def index_scores_reference(
    queries: Tensor, weights: Tensor, rows: Rows, slots: Tensor, query_start: Tensor
) -> Tensor:
    """`index_scores` in torch, over as many queries at a time as bound the memory."""
    keys = read_rows(rows, slots, torch.float32)  # [num_requests, num_rows, dim]
    queries = queries.float()
    if queries.shape[0] == slots.shape[0]:  # one token a request, so one batched product
        return _weighted(torch.bmm(queries, keys.transpose(1, 2)), weights)
    scores = queries.new_empty(queries.shape[0], slots.shape[1])
    tile = max(1, MAX_SCORE_ELEMENTS // (queries.shape[1] * max(1, slots.shape[1])))
    bounds = query_start.tolist()
    for key, start, end in zip(keys, bounds, bounds[1:], strict=False):
        for first in range(start, end, tile):
            part = slice(first, min(first + tile, end))
            scores[part] = _weighted(queries[part] @ key.T, weights[part])
    return scores


def _weighted(products: Tensor, weights: Tensor) -> Tensor:
    """[n, num_heads, num_rows] and [n, num_heads] to [n, num_rows]."""
    return torch.bmm(weights.unsqueeze(1), products.relu_()).squeeze(1)


def _score_few(
    queries: Tensor, weights: Tensor, rows: Tensor, slots: Tensor, query_start: Tensor
) -> Tensor:
    """`index_scores` of one query a request."""
    scores = weights.new_empty(slots.shape)
    pointers = (queries.float(), weights.contiguous(), *place(rows), slots.contiguous(), scores)
    sizes = (*slots.shape, *queries.shape[1:], dtype_of(rows), torch.get_num_threads())
    call("index_scores", *pointers, *sizes)
    return scores


def _index_scores(
    queries: Tensor, weights: Tensor, rows: Rows, slots: Tensor, query_start: Tensor
) -> Tensor:
    (num_tokens, num_heads, dim), (num_requests, num_rows) = queries.shape, slots.shape
    scores = queries.new_empty(num_tokens, num_rows, dtype=torch.float32)
    tile_tokens = 1 if num_tokens == num_requests else TILE_TOKENS
    block_rows = BLOCK_ROWS[queries.element_size()]
    layout = RowLayout.of(rows)
    grid = (triton.cdiv(num_rows, block_rows), triton.cdiv(num_tokens, tile_tokens))
    if scores.numel():
        _score_rows[grid](
            queries.contiguous(),
            weights.contiguous(),
            layout.rows,
            slots.contiguous(),
            query_start,
            scores,
            num_tokens,
            num_requests,
            num_rows,
            layout.page_rows,
            *layout.strides,
            NUM_HEADS=num_heads,
            DIM=dim,
            BLOCK_HEADS=block_size(num_heads, low=16, high=1 << 30),
            BLOCK_DIM=block_size(dim, low=16, high=1 << 30),
            BLOCK_ROWS=block_rows,
            TILE_TOKENS=tile_tokens,
            FORM=layout.form,
            **_SCORE,
        )
    return scores


@triton.jit
def _request_of(query_start: tl.tensor, num_requests: tl.tensor, token: tl.tensor) -> tl.tensor:
    """The last request that begins at `token` or before."""
    low, high = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32) + num_requests
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(query_start + middle) <= token
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle)
    return low


@triton.jit
def _score_rows(
    queries: tl.tensor,
    weights: tl.tensor,
    rows: tl.tensor,
    slots: tl.tensor,
    query_start: tl.tensor,
    scores: tl.tensor,
    num_tokens: tl.tensor,
    num_requests: tl.tensor,
    num_rows: tl.tensor,
    page_rows: tl.tensor,
    page_stride: tl.tensor,
    row_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    FORM: tl.constexpr,
) -> None:
    """BLOCK_ROWS rows for TILE_TOKENS tokens: program (rows, tokens), a request at a time.

    queries: [num_tokens, NUM_HEADS, DIM]; weights: [num_tokens, NUM_HEADS]; slots: [num_requests,
    num_rows]; scores: [num_tokens, num_rows]; all contiguous. A block of rows whose slots are all
    -1 is neither read nor scored.
    """
    place = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    first = tl.program_id(1) * TILE_TOKENS
    last = tl.minimum(first + TILE_TOKENS, num_tokens)
    head, channel = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_DIM)
    element = head[:, None] * DIM + channel[None, :]
    within = (head < NUM_HEADS)[:, None] & (channel < DIM)[None, :]
    width = tl.full([], 0, tl.int64) + num_rows  # scores may be more than 32 bits count
    begin = _request_of(query_start, num_requests, first)
    end = _request_of(query_start, num_requests, last - 1) + 1
    for request in range(begin, end):
        slot = tl.load(slots + request * num_rows + place, place < num_rows, other=-1)
        at = row_offsets(slot, page_stride, row_stride, page_rows)
        key = load_rows(rows, at, slot >= 0, DIM, BLOCK_DIM, FORM)
        stop = tl.minimum(tl.load(query_start + request + 1).to(tl.int32), last)
        stop = tl.where(tl.max(slot, 0) >= 0, stop, first)
        start = tl.maximum(tl.load(query_start + request).to(tl.int32), first)
        for token in range(start, stop):
            query = tl.load(queries + token * NUM_HEADS * DIM + element, mask=within, other=0.0)
            products = dot(
                key.to(query.dtype),
                tl.trans(query),
                tl.zeros([BLOCK_ROWS, BLOCK_HEADS], tl.float32),
            )
            weight = tl.load(weights + token * NUM_HEADS + head, mask=head < NUM_HEADS, other=0.0)
            score = tl.sum(tl.maximum(products, 0.0) * weight[None, :], 1)
            tl.store(scores + token * width + place, score, mask=place < num_rows)


_SCORE: dict[str, Any] = {"num_warps": 4, "num_stages": 3}
_SCORE_SIGNATURE = {
    "queries": "*bf16:16",
    "weights": "*fp32:16",
    "rows": "*bf16:16",
    "slots": "*i64:16",
    "query_start": "*i64:16",
    "scores": "*fp32:16",
    **dict.fromkeys(("num_tokens", "num_requests", "num_rows", "page_rows"), "i32"),
    "page_stride": "i64:16",
    "row_stride": "i64:16",
}
_FLASH = {"NUM_HEADS": 64, "DIM": 128, "BLOCK_HEADS": 64, "BLOCK_DIM": 128, "BLOCK_ROWS": 128}
_PACKED = _SCORE_SIGNATURE | {"rows": "*u8:16", "page_stride": "i64", "row_stride": "i64"}
AOT = tuple(
    Case(
        _score_rows,
        f"V4-Flash {label}",
        signature,
        _FLASH | {"TILE_TOKENS": tile_tokens, "FORM": form},
        **_SCORE,
        # ptxas reports no spill, but sets 8 bytes of stack aside that no instruction touches.
        may_spill=form is FP4_INDEX,
    )
    for label, signature, tile_tokens, form in (
        ("decode", _SCORE_SIGNATURE, 1, None),
        ("decode, fp8 rows", _PACKED, 1, FP8_INDEX),
        ("decode, fp4 rows", _PACKED, 1, FP4_INDEX),
        ("prefill", _SCORE_SIGNATURE, TILE_TOKENS, None),
    )
)
