"""Hyper-connections: a residual of several streams, mixed into and out of each sublayer.

streams [T, n, hidden] ──pre──► sublayer input [T, hidden] ──► sublayer output
    └────────────comb (doubly stochastic)──────────► + ◄──post──┘   = new streams
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def mix_in(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    sinkhorn_iters: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sublayer's input, and how its output goes back: (x, post, comb).

    streams: [num_tokens, n, hidden]; fn: [n * (2 + n), n * hidden] fp32; scale, base: [n * (2 + n)]
    fp32, one value for each row of fn.
    Returns x [num_tokens, hidden] in the streams' dtype, post [num_tokens, n] fp32 and comb
    [num_tokens, n, n] fp32, whose rows and columns sum to 1.
    """
    n = streams.shape[1]
    mixes = torch.addcmul(base, _project(streams, fn, norm_eps), scale)
    pre, post, comb = mixes.split([n, n, n * n], dim=1)
    comb = _sinkhorn(comb.unflatten(1, (n, n)), sinkhorn_iters, eps)
    return _collapse(streams, pre, eps), 2 * torch.sigmoid(post), comb


def mix_out(output: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New streams: `post_k * output + sum_j comb[j, k] * streams_j`, in fp32, cast once.

    output: [num_tokens, hidden]; streams: [num_tokens, n, hidden]; post, comb as `mix_in` gave.
    """
    added = post.unsqueeze(2) * output.float().unsqueeze(1)  # [num_tokens, n, hidden]
    return torch.baddbmm(added, comb.transpose(1, 2), streams.float()).to(streams.dtype)


def collapse_head(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *, eps: float, norm_eps: float
) -> Tensor:
    """One stream after the last layer: [num_tokens, hidden].

    streams: [num_tokens, n, hidden]; fn: [n, n * hidden] fp32; scale: [1], base: [n] fp32.
    """
    mixes = torch.addcmul(base, _project(streams, fn, norm_eps), scale)
    return _collapse(streams, mixes, eps)


def _project(streams: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    """Streams, normalised together, times fn: fp32 [num_tokens, fn.shape[0]]."""
    flat = streams.flatten(1).float()
    rms = torch.rsqrt(flat.square().mean(1, keepdim=True) + norm_eps)
    return F.linear(flat, fn) * rms  # the row's factor after the product: fewer multiplications


def _collapse(streams: Tensor, pre: Tensor, eps: float) -> Tensor:
    weights = torch.sigmoid(pre) + eps
    return torch.bmm(weights.unsqueeze(1), streams.float()).squeeze(1).to(streams.dtype)


def _sinkhorn(comb: Tensor, iters: int, eps: float) -> Tensor:
    """Softmax of the rows, then columns and rows normalised in turn: [num_tokens, n, n]."""
    comb = comb.softmax(2) + eps
    comb /= comb.sum(1, keepdim=True) + eps
    for _ in range(iters - 1):
        comb /= comb.sum(2, keepdim=True) + eps
        comb /= comb.sum(1, keepdim=True) + eps
    return comb
