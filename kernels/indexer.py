"""Indexer: scores of compressed rows for each query, and the choice of the best ones."""

from __future__ import annotations

import torch
from torch import Tensor

from sluice.kernels.rows import gather_rows

MAX_SCORE_ELEMENTS = 1 << 22  # of [queries, heads, rows] at a time: 16 MB, near the last cache


def index_scores(
    queries: Tensor, weights: Tensor, rows: Tensor, slots: Tensor, query_start: Tensor
) -> Tensor:
    """`sum_h weights_h * relu(query_h . row)` for each token and row: fp32 [num_tokens, num_rows].

    queries: [num_tokens, num_heads, dim]; weights: [num_tokens, num_heads] fp32, scale included.
    rows: pool's layer view [num_pages, rows_per_page, dim].
    slots: [num_requests, num_rows] of each request's rows in order; scores of rows that are -1 or
        that a query may not see mean nothing: `causal_topk` masks them.
    query_start: [num_requests + 1], the tokens of each request.
    """
    keys = gather_rows(rows, slots).float()  # [num_requests, num_rows, dim]
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


def causal_topk(scores: Tensor, num_visible: Tensor, k: int) -> Tensor:
    """The `k` best of each query's first `num_visible` rows, in ascending order of row.

    scores: [num_tokens, num_rows] fp32; num_visible: [num_tokens].
    Returns [num_tokens, min(k, num_rows)] int64; -1, at the end, where fewer rows are visible.
    Equal scores at the cut go to the lowest rows, so that neither chunking nor batch nor role can
    change a choice.
    """
    num_rows = scores.shape[1]
    k = min(k, num_rows)
    row = torch.arange(num_rows, device=scores.device)
    visible = row < num_visible.unsqueeze(1)
    if k == num_rows:
        return torch.where(visible, row, -1)
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
