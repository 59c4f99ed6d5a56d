"""Grouped-query attention over pages, where a row holds a token's key and value of every kv head.

Two shapes of work: one query a request (decode), computed as one padded batch; and chunks of many
queries (prompts), computed one request at a time, because padding those would cost more than the
calls do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

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
    num_requests, num_heads, dim = queries.shape
    kv = rows.index_select(0, page_table.flatten())  # [num_requests * max_pages, rows_per_page, ..]
    kv = kv.view(num_requests, -1, *rows.shape[2:])  # [num_requests, width, 2, num_kv_heads, dim]
    valid = torch.arange(kv.shape[1], device=kv.device) < num_tokens.unsqueeze(1)
    _blank(kv.flatten(0, 1), ~valid.flatten())
    keys, values = kv.to(queries.dtype).permute(2, 0, 3, 1, 4)
    groups = queries.reshape(
        num_requests, keys.shape[1], -1, dim
    )  # the heads of a kv head as queries
    mask = valid[:, None, None].expand(-1, *groups.shape[1:3], -1)
    attended = F.scaled_dot_product_attention(groups, keys, values, attn_mask=mask, scale=scale)
    return attended.reshape(num_requests, num_heads, dim)


def _blank(rows: Tensor, absent: Tensor) -> None:
    """Zero the rows [n, ...] that are absent [n]: null pages and page ends may hold NaN.

    Where exact shapes cost nothing only those rows are touched, which are few.
    """
    if rows.device.type in EXACT_ON:
        rows.index_fill_(0, absent.nonzero().squeeze(1), 0)
    else:
        rows.masked_fill_(absent.view(-1, *[1] * (rows.dim() - 1)), 0)
