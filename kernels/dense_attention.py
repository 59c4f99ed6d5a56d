"""Grouped-query attention over pages, where a row holds a token's key and value of every kv head.

Two shapes of work: one query a request (decode), and chunks of many queries (prompts). One kernel
does both, by tiles of queries that share their keys: a request's neighbours, and the heads of a kv
head. The references compute the first as one padded batch and the second one request at a time,
because padding those would cost more than the calls do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.aot import Case
from sluice.kernels.cpu import FEW_ROWS, call, compiled, dtype_of, is_recording, place
from sluice.kernels.launch import block_size, dot, runs_triton
from sluice.kernels.splits import (
    LOG2_E,
    LOWEST,
    combine_splits,
    num_splits,
    sink_share,
    weigh,
)

MIN_SPLIT_TOKENS = 256
BLOCK_QUERIES = 128  # of a prompt, times heads of a kv head: two warp groups
BLOCK_TOKENS = {2: 64, 4: 32}  # by bytes of an element

EXACT_ON = ("cpu",)  # device types where looking at the data does not wait for a device


@dataclass(frozen=True)
class Span:
    """One request in a ragged batch: its queries [first, last), and its tokens up to the last."""

    first: int
    last: int
    num_tokens: int


def prompt_attention(
    queries: Tensor, rows: Tensor, page_table: Tensor, spans: Sequence[Span], scale: float
) -> Tensor:
    """Attention of each request's newest tokens over all its tokens: [num_tokens, num_heads, dim].

    queries: [num_tokens, num_heads, dim]; the last query of a span stands at its last token.
    rows: pool's layer view [num_pages, rows_per_page, 2, num_kv_heads, dim], keys first, one row a
        token, those of this step already written. Only rows of a span's tokens are looked at.
    page_table: [num_requests, max_pages].
    """
    run = _prompt_attention if runs_triton(queries) else prompt_attention_reference
    return run(queries, rows, page_table, spans, scale)


def prompt_attention_reference(
    queries: Tensor, rows: Tensor, page_table: Tensor, spans: Sequence[Span], scale: float
) -> Tensor:
    """`prompt_attention` in torch."""
    result = torch.empty_like(queries)
    for pages, span in zip(page_table, spans, strict=True):
        num_pages = -(-span.num_tokens // rows.shape[1])
        kv = rows.index_select(0, pages[:num_pages]).flatten(0, 1)[: span.num_tokens]
        keys, values = kv.to(queries.dtype).permute(1, 2, 0, 3)  # [num_kv_heads, num_tokens, dim]
        attended = _causal(queries[span.first : span.last].transpose(0, 1), keys, values, scale)
        result[span.first : span.last] = attended.transpose(0, 1)
    return result


def _causal(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """queries [num_heads, n, dim] stand at the last n of the keys [num_kv_heads, num_tokens, dim].

    keys     |############################|
    query 0  |#####################.......|
    query n-1|############################|
    """
    n, num_tokens = queries.shape[1], keys.shape[1]
    whole = n == num_tokens  # nothing computed before: the kernel can skip what is masked
    mask = None
    if not whole:
        everything = torch.ones(n, num_tokens, dtype=torch.bool, device=queries.device)
        mask = everything.tril(num_tokens - n)
    return F.scaled_dot_product_attention(
        queries.unsqueeze(0),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        attn_mask=mask,
        is_causal=whole,
        scale=scale,
        enable_gqa=True,
    ).squeeze(0)


def decode_attention(
    queries: Tensor, rows: Tensor, page_table: Tensor, num_tokens: Tensor, scale: float
) -> Tensor:
    """Attention of one query a request over all its tokens: [num_requests, num_heads, dim].

    queries: [num_requests, num_heads, dim]; rows, page_table as in `prompt_attention`.
    num_tokens: [num_requests], the query's own token included.
    Shapes depend on the page table's width alone.
    """
    if runs_triton(queries):
        run = _decode_attention
    else:
        is_few = len(queries) <= FEW_ROWS and compiled(queries, rows)
        run = _attend_few if is_few else decode_attention_reference
    return run(queries, rows, page_table, num_tokens, scale)


def decode_attention_reference(
    queries: Tensor, rows: Tensor, page_table: Tensor, num_tokens: Tensor, scale: float
) -> Tensor:
    """`decode_attention` in torch."""
    num_requests, num_heads, dim = queries.shape
    kv = rows.index_select(0, page_table.flatten())  # [num_requests * max_pages, rows_per_page, ..]
    kv = kv.view(num_requests, -1, *rows.shape[2:])  # [num_requests, width, 2, num_kv_heads, dim]
    valid = torch.arange(kv.shape[1], device=kv.device) < num_tokens.unsqueeze(1)
    _blank(kv.flatten(0, 1), ~valid.flatten())
    keys, values = kv.to(queries.dtype).permute(2, 0, 3, 1, 4)
    groups = queries.reshape(num_requests, keys.shape[1], -1, dim)  # heads as queries
    mask = valid[:, None, None].expand(-1, *groups.shape[1:3], -1)
    attended = F.scaled_dot_product_attention(groups, keys, values, attn_mask=mask, scale=scale)
    return attended.reshape(num_requests, num_heads, dim)


def _attend_few(
    queries: Tensor, rows: Tensor, page_table: Tensor, num_tokens: Tensor, scale: float
) -> Tensor:
    result = queries.new_empty(queries.shape)
    pages = (page_table, page_table.stride(0), num_tokens)
    sizes = (*queries.shape[:2], rows.shape[3], queries.shape[2], scale)
    dtypes = (dtype_of(queries), dtype_of(rows), torch.get_num_threads())
    call("dense_attention", queries.contiguous(), *place(rows), *pages, result, *sizes, *dtypes)
    return result


def _blank(rows: Tensor, absent: Tensor) -> None:
    """Zero the rows [n, ...] that are absent [n]: null pages and page ends may hold NaN.

    Where exact shapes cost nothing only those rows are touched, which are few.
    """
    if rows.device.type in EXACT_ON and not is_recording():
        rows.index_fill_(0, absent.nonzero().squeeze(1), 0)
    else:
        rows.masked_fill_(absent.view(-1, *[1] * (rows.dim() - 1)), 0)


def _prompt_attention(
    queries: Tensor, rows: Tensor, page_table: Tensor, spans: Sequence[Span], scale: float
) -> Tensor:
    group = queries.shape[1] // rows.shape[3]
    tile_queries = max(1, BLOCK_QUERIES // group)
    tiles = _tiles(tuple(spans), tile_queries, queries.device)
    block = block_size(group, low=BLOCK_QUERIES, high=1 << 30)
    return _launch(queries, rows, page_table, tiles, None, scale, block, splits=1)


@lru_cache(maxsize=4)  # all layers of a step ask for the same
def _tiles(spans: tuple[Span, ...], tile_queries: int, device: torch.device) -> Tensor:
    """Tiles of neighbouring queries: [n, 4] int32, request, first query, queries, tokens before."""
    tiles = [
        (request, first, min(tile_queries, span.last - first), span.num_tokens - span.last + first)
        for request, span in enumerate(spans)
        for first in range(span.first, span.last, tile_queries)
    ]
    return torch.tensor(tiles, dtype=torch.int32, device=device).view(-1, 4)


def _decode_attention(
    queries: Tensor, rows: Tensor, page_table: Tensor, num_tokens: Tensor, scale: float
) -> Tensor:
    num_requests, num_heads, _ = queries.shape
    num_kv_heads = rows.shape[3]
    max_tokens = page_table.shape[1] * rows.shape[1]
    splits = num_splits(queries, num_requests * num_kv_heads, max_tokens, MIN_SPLIT_TOKENS)
    block = block_size(num_heads // num_kv_heads, low=16, high=1 << 30)
    return _launch(queries, rows, page_table, None, num_tokens, scale, block, splits)


def _launch(
    queries: Tensor,
    rows: Tensor,
    page_table: Tensor,
    tiles: Tensor | None,
    num_tokens: Tensor | None,
    scale: float,
    block_queries: int,
    splits: int,
) -> Tensor:
    """By tiles of a prompt, or by requests of one query with `num_tokens` each."""
    num_queries, num_heads, dim = queries.shape
    result = torch.empty_like(queries, memory_format=torch.contiguous_format)
    sums, peaks = None, None
    if splits > 1:
        shape = (num_queries, splits, num_heads)
        sums = queries.new_empty(*shape, dim, dtype=torch.float32)
        peaks = queries.new_empty(*shape, 2, dtype=torch.float32)
    num_tiles = num_queries if tiles is None else tiles.shape[0]
    if num_tiles:
        _dense_attention[(num_tiles, rows.shape[3], splits)](
            queries.contiguous(),
            rows,
            page_table.contiguous(),
            tiles,
            num_tokens,
            result,
            sums,
            peaks,
            scale * LOG2_E.value,
            page_table.shape[1],
            rows.shape[1],
            *rows.stride()[:2],
            GROUP=num_heads // rows.shape[3],
            NUM_KV_HEADS=rows.shape[3],
            DIM=dim,
            BLOCK_DIM=block_size(dim, low=16, high=1 << 30),
            BLOCK_QUERIES=block_queries,
            BLOCK_TOKENS=BLOCK_TOKENS[queries.element_size()],
            **(_DECODE if tiles is None else _PROMPT),
        )
    if sums is not None and peaks is not None:
        combine_splits(sums, peaks, None, None, result)
    return result


@triton.jit
def _dense_attention(
    queries: tl.tensor,
    rows: tl.tensor,
    page_table: tl.tensor,
    tiles: tl.tensor,
    num_tokens: tl.tensor,
    result: tl.tensor,
    sums: tl.tensor,
    peaks: tl.tensor,
    scale: tl.tensor,
    table_pages: tl.tensor,
    page_rows: tl.tensor,
    page_stride: tl.tensor,
    row_stride: tl.tensor,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
) -> None:
    """The heads of one kv head, for a tile's queries, over one range: program (tile, head, split).

    queries, result: [num_queries, NUM_KV_HEADS * GROUP, DIM], contiguous; tiles as `_tiles` makes
    them, or None: then tile i is query i of request i, which has `num_tokens[i]` tokens.
    A tile's tokens are cut evenly into ranges; none beyond its last query is read. Writes `result`,
    finished; or, where there are several ranges, `sums` and `peaks` as `combine_splits` takes them.
    """
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tiles is not None:
        request, first = tl.load(tiles + tile * 4), tl.load(tiles + tile * 4 + 1)
        count, before = tl.load(tiles + tile * 4 + 2), tl.load(tiles + tile * 4 + 3)
    else:
        request, first = tile, tile
        count, before = 1, tl.load(num_tokens + tile).to(tl.int32) - 1
    lane = tl.arange(0, BLOCK_QUERIES)  # query by query, and of each the heads of the group
    channel = tl.arange(0, BLOCK_DIM)
    query_head = (first + lane // GROUP).to(tl.int64) * (NUM_KV_HEADS * GROUP)
    query_head += kv_head * GROUP + lane % GROUP
    real = lane < count * GROUP
    within = real[:, None] & (channel < DIM)[None, :]
    element = query_head[:, None] * DIM + channel[None, :]
    query = tl.load(queries + element, mask=within, other=0.0)
    visible = before + 1 + lane // GROUP

    page_table += request.to(tl.int64) * table_pages
    key_rows = rows + kv_head * DIM + channel[None, :]
    last = before + count
    range_tokens = tl.cdiv(tl.cdiv(last, tl.num_programs(2)), BLOCK_TOKENS) * BLOCK_TOKENS
    end = tl.minimum(split * range_tokens + range_tokens, last)
    peak = tl.full([BLOCK_QUERIES], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_QUERIES], tl.float32)
    acc = tl.zeros([BLOCK_QUERIES, BLOCK_DIM], tl.float32)
    for start in range(split * range_tokens, end, BLOCK_TOKENS):
        token = start + tl.arange(0, BLOCK_TOKENS)
        page = tl.load(page_table + token // page_rows, mask=token < end, other=0)
        at = page * page_stride + (token % page_rows) * row_stride
        there = (token < end)[:, None]
        if DIM < BLOCK_DIM:
            there = there & (channel < DIM)[None, :]
        key = tl.load(key_rows + at[:, None], mask=there, other=0.0).to(query.dtype)
        scores = dot(query, tl.trans(key), tl.zeros([BLOCK_QUERIES, BLOCK_TOKENS], tl.float32))
        seen = (token[None, :] < visible[:, None]) & (token < end)[None, :]
        weights, peak, total, kept = weigh(
            tl.where(seen, scores * scale, float("-inf")), peak, total
        )
        values = key_rows + NUM_KV_HEADS * DIM + at[:, None]
        value = tl.load(values, mask=there, other=0.0).to(query.dtype)
        acc = dot(weights.to(value.dtype), value, acc * kept[:, None])

    if sums is not None:
        heads = NUM_KV_HEADS * GROUP
        part = query_head // heads * (heads * tl.num_programs(2)) + split * heads
        part += query_head % heads
        tl.store(sums + part[:, None] * DIM + channel[None, :], acc, mask=within)
        tl.store(peaks + part * 2, peak, mask=real)
        tl.store(peaks + part * 2 + 1, total, mask=real)
    else:
        no_sink = tl.full([BLOCK_QUERIES], LOWEST, tl.float32)
        acc *= sink_share(peak, total, no_sink)[:, None]
        tl.store(result + element, acc.to(result.dtype.element_ty), mask=within)


_PROMPT: dict[str, Any] = {"num_warps": 8, "num_stages": 2}
_DECODE: dict[str, Any] = {"num_warps": 4, "num_stages": 3}
_SIGNATURE = {
    **dict.fromkeys(("queries", "rows", "result"), "*bf16:16"),
    "page_table": "*i64:16",
    "scale": "fp32",
    "table_pages": "i32",
    "page_rows": "i32:16",
    "page_stride": "i64:16",
    "row_stride": "i64:16",
}
_LLAMA = {"GROUP": 4, "NUM_KV_HEADS": 8, "DIM": 128, "BLOCK_DIM": 128, "BLOCK_TOKENS": 64}
AOT = (
    Case(
        _dense_attention,
        "8 kv heads of 128, prefill",
        _SIGNATURE | {"tiles": "*i32:16"},
        _LLAMA | {"BLOCK_QUERIES": 128},
        **_PROMPT,
    ),
    Case(
        _dense_attention,
        "8 kv heads of 128, decode",
        _SIGNATURE | {"num_tokens": "*i64:16", "sums": "*fp32:16", "peaks": "*fp32:16"},
        _LLAMA | {"BLOCK_QUERIES": 16},
        **_DECODE,
    ),
)
