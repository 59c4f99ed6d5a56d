"""Sparse attention over rows of pools, where K = V and a sink joins the softmax denominator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sluice.kernels.rows import gather_rows

MAX_GATHERED_ELEMENTS = 1 << 22  # of [queries, rows, dim] at a time: 16 MB, near the last cache


def sparse_attention(
    queries: Tensor, sources: Sequence[tuple[Tensor, Tensor]], sinks: Tensor, scale: float
) -> Tensor:
    """Attention of each query over the rows listed for it: [num_tokens, num_heads, dim].

    queries: [num_tokens, num_heads, dim].
    sources: pairs of a pool's layer view [num_pages, rows_per_page, dim] and the slots
        [num_tokens, num_rows] that each query attends to there; -1 = none. Every query needs at
        least one row in all. Heads share the rows, which are key and value both.
    sinks: [num_heads] fp32, a logit that takes weight from the rows and adds nothing.
    Softmax and sums are fp32; the result has the dtype of `queries`.
    """
    num_tokens, _, dim = queries.shape
    num_rows = sum(slots.shape[1] for _, slots in sources)
    tile = max(1, MAX_GATHERED_ELEMENTS // (num_rows * dim))
    if num_tokens <= tile:
        return _attend(queries, sources, sinks, scale)
    result = torch.empty_like(queries)
    for first in range(0, num_tokens, tile):
        part = slice(first, first + tile)
        parts = [(rows, slots[part]) for rows, slots in sources]
        result[part] = _attend(queries[part], parts, sinks, scale)
    return result


def _attend(
    queries: Tensor, sources: Sequence[tuple[Tensor, Tensor]], sinks: Tensor, scale: float
) -> Tensor:
    scaled = queries.float() * scale
    gathered = [gather_rows(rows, slots).float() for rows, slots in sources]
    scores = torch.cat([torch.bmm(scaled, rows.transpose(1, 2)) for rows in gathered], dim=2)
    absent = torch.cat([slots < 0 for _, slots in sources], dim=1).unsqueeze(1)
    scores.masked_fill_(absent, -torch.inf)  # [num_tokens, num_heads, num_rows]
    # exp(s) / (sum exp(s) + exp(sink)) = softmax(s) * sigmoid(logsumexp(s) - sink)
    kept = torch.sigmoid(scores.logsumexp(2) - sinks)  # [num_tokens, num_heads]
    weights = scores.softmax(2).split([rows.shape[1] for rows in gathered], dim=2)
    result = torch.bmm(weights[0], gathered[0])
    for weight, rows in zip(weights[1:], gathered[1:], strict=True):
        result.baddbmm_(weight, rows)
    return result.mul_(kept.unsqueeze(2)).to(queries.dtype)
