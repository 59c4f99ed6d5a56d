"""Hyper-connections: a residual of several streams, mixed into and out of each sublayer.

streams [T, n, hidden] ──pre──► sublayer input [T, hidden] ──► sublayer output
    └────────────comb (doubly stochastic)──────────► + ◄──post──┘   = new streams
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.aot import Case
from sluice.kernels.cpu import call, dtype_of, few_rows
from sluice.kernels.launch import runs_triton
from sluice.kernels.matmul import linear

# A token's sums are cut by the width alone, so that they do not depend on the batch.
SPLIT_CHANNELS = 1024
BLOCK_TOKENS = 16
BLOCK_CHANNELS = 1024  # of the streams that one program mixes


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
    if runs_triton(streams):
        sums = _launch_project(streams, fn)
        return _launch_collapse(streams, sums, scale, base, sinkhorn_iters, eps, norm_eps)
    if few_rows(streams):
        return _collapse_few(streams, fn, scale, base, sinkhorn_iters, eps, norm_eps)
    return mix_in_reference(
        streams, fn, scale, base, sinkhorn_iters=sinkhorn_iters, eps=eps, norm_eps=norm_eps
    )


def mix_in_reference(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    sinkhorn_iters: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`mix_in` in torch."""
    n = streams.shape[1]
    mixes = torch.addcmul(base, _project(streams, fn, norm_eps), scale)
    pre, post, comb = mixes.split([n, n, n * n], dim=1)
    comb = _sinkhorn(comb.unflatten(1, (n, n)), sinkhorn_iters, eps)
    return _collapse(streams, pre, eps), 2 * torch.sigmoid(post), comb


def mix_out(output: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New streams: `post_k * output + sum_j comb[j, k] * streams_j`, in fp32, cast once.

    output: [num_tokens, hidden]; streams: [num_tokens, n, hidden]; post, comb as `mix_in` gave.
    """
    if runs_triton(streams):
        return _launch_mix_out(output, streams, post, comb)
    if few_rows(streams, output):
        result = torch.empty_like(streams)
        call("mix_out", output, streams, post, comb, result, *streams.shape, dtype_of(streams))
        return result
    return mix_out_reference(output, streams, post, comb)


def mix_out_reference(output: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """`mix_out` in torch."""
    added = post.unsqueeze(2) * output.float().unsqueeze(1)  # [num_tokens, n, hidden]
    # In place: a prompt's new tensor costs the pages it touches first, 7 times the product.
    return added.baddbmm_(comb.transpose(1, 2), streams.float()).to(streams.dtype)


def collapse_head(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *, eps: float, norm_eps: float
) -> Tensor:
    """One stream after the last layer: [num_tokens, hidden].

    streams: [num_tokens, n, hidden]; fn: [n, n * hidden] fp32; scale: [1], base: [n] fp32.
    """
    if runs_triton(streams):
        sums = _launch_project(streams, fn)
        return _launch_collapse(streams, sums, scale.expand_as(base), base, 0, eps, norm_eps)[0]
    if few_rows(streams):
        return _collapse_few(streams, fn, scale.expand_as(base), base, 0, eps, norm_eps)[0]
    return collapse_head_reference(streams, fn, scale, base, eps=eps, norm_eps=norm_eps)


def collapse_head_reference(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *, eps: float, norm_eps: float
) -> Tensor:
    """`collapse_head` in torch."""
    mixes = torch.addcmul(base, _project(streams, fn, norm_eps), scale)
    return _collapse(streams, mixes, eps)


def _project(streams: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    """Streams, normalised together, times fn: fp32 [num_tokens, fn.shape[0]]."""
    flat = streams.flatten(1).float()
    norm = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
    rms = norm.square_().div_(flat.shape[1]).add_(norm_eps).sqrt_()
    return F.linear(flat, fn).div_(rms)  # after the product: fewer divisions


def _collapse(streams: Tensor, pre: Tensor, eps: float) -> Tensor:
    weights = torch.sigmoid(pre) + eps
    return torch.bmm(weights.unsqueeze(1), streams.float()).squeeze(1).to(streams.dtype)


def _sinkhorn(comb: Tensor, iters: int, eps: float) -> Tensor:
    """Softmax of the rows, then columns and rows normalised in turn: [num_tokens, n, n]."""
    comb = comb.softmax(2) + eps
    ones, added = comb.new_ones(*comb.shape[:2], 1), comb.new_tensor(eps)
    across = ones.transpose(1, 2)
    # Sum and eps in one operation: in a decode step operations cost more than numbers.
    comb.div_(torch.baddbmm(added, across, comb))
    for _ in range(iters - 1):
        comb.div_(torch.baddbmm(added, comb, ones))
        comb.div_(torch.baddbmm(added, across, comb))
    return comb


def _collapse_few(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    sinkhorn_iters: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `mix_in` returns; with no iterations only the first, for `collapse_head`."""
    num_tokens, n, hidden = streams.shape
    mixes = linear(streams.flatten(1).float(), fn)
    x = streams.new_empty(num_tokens, hidden)
    post, comb = base.new_empty(num_tokens, n), base.new_empty(num_tokens, n, n)
    weights = (streams, mixes, scale, scale.stride(0), base)
    sizes = (num_tokens, n, hidden, sinkhorn_iters, eps, norm_eps, dtype_of(streams))
    call("collapse", *weights, x, post, comb, *sizes)
    return x, post, comb


def _launch_project(streams: Tensor, fn: Tensor) -> Tensor:
    """Partial sums fp32 [num_splits, num_tokens, num_outputs + 1] of streams times fn.

    The last column is the sum of the streams' squares.
    """
    num_tokens, width, num_outputs = len(streams), fn.shape[1], fn.shape[0]
    num_splits = triton.cdiv(width, SPLIT_CHANNELS)
    sums = fn.new_empty(num_splits, num_tokens, num_outputs + 1)
    if num_tokens:
        _project_split[(triton.cdiv(num_tokens, BLOCK_TOKENS), num_splits)](
            streams.contiguous(),
            fn,
            sums,
            num_tokens,
            WIDTH=width,
            NUM_OUTPUTS=num_outputs,
            SPLIT=SPLIT_CHANNELS,
            BLOCK_TOKENS=BLOCK_TOKENS,
            BLOCK_OUTPUTS=max(16, triton.next_power_of_2(num_outputs)),
            BLOCK=64,
        )
    return sums


def _launch_collapse(
    streams: Tensor,
    sums: Tensor,
    scale: Tensor,
    base: Tensor,
    sinkhorn_iters: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `mix_in` returns; with no iterations only the first, for `collapse_head`."""
    num_tokens, n, hidden = streams.shape
    x = streams.new_empty(num_tokens, hidden)
    post, comb = base.new_empty(num_tokens, n), base.new_empty(num_tokens, n, n)
    if num_tokens:
        block = min(BLOCK_CHANNELS, triton.next_power_of_2(hidden))
        _collapse_streams[(num_tokens, triton.cdiv(hidden, block))](
            streams.contiguous(),
            sums,
            scale.contiguous(),
            base,
            x,
            post,
            comb,
            num_tokens,
            eps,
            norm_eps,
            N=n,
            HIDDEN=hidden,
            NUM_SPLITS=sums.shape[0],
            NUM_OUTPUTS=sums.shape[2] - 1,
            SINKHORN_ITERS=sinkhorn_iters,
            STREAMS=triton.next_power_of_2(n),
            BLOCK=block,
        )
    return x, post, comb


def _launch_mix_out(output: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    num_tokens, n, hidden = streams.shape
    result = torch.empty_like(streams, memory_format=torch.contiguous_format)
    if num_tokens:
        block = min(BLOCK_CHANNELS, triton.next_power_of_2(hidden))
        _mix_out[(num_tokens, triton.cdiv(hidden, block))](
            output.contiguous(),
            streams.contiguous(),
            post,
            comb,
            result,
            N=n,
            HIDDEN=hidden,
            STREAMS=triton.next_power_of_2(n),
            BLOCK=block,
        )
    return result


@triton.jit
def _project_split(
    streams: tl.tensor,
    fn: tl.tensor,
    sums: tl.tensor,
    num_tokens: tl.tensor,
    WIDTH: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (tile, split) writes its tokens' part of the sums over SPLIT channels.

    streams: [num_tokens, WIDTH]; fn: fp32 [NUM_OUTPUTS, WIDTH]; sums: fp32 [num_splits,
    num_tokens, NUM_OUTPUTS + 1], the squares' sum last. Products are as exact as fp32: three passes
    of tf32.
    """
    split = tl.program_id(1)
    token = (tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)).to(tl.int64)
    output = tl.arange(0, BLOCK_OUTPUTS)
    acc = tl.zeros([BLOCK_TOKENS, BLOCK_OUTPUTS], tl.float32)
    squares = tl.zeros([BLOCK_TOKENS], tl.float32)
    for first in range(0, SPLIT, BLOCK):
        channel = split * SPLIT + first + tl.arange(0, BLOCK)
        inside = channel[None, :] < WIDTH
        x = tl.load(
            streams + token[:, None] * WIDTH + channel[None, :],
            mask=(token[:, None] < num_tokens) & inside,
            other=0,
        ).to(tl.float32)
        weight = tl.load(
            fn + output[:, None] * WIDTH + channel[None, :],
            mask=(output[:, None] < NUM_OUTPUTS) & inside,
            other=0,
        )
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="tf32x3")
        squares += tl.sum(x * x, 1)
    row = sums + (split * num_tokens + token) * (NUM_OUTPUTS + 1)
    real = token < num_tokens
    tl.store(
        row[:, None] + output[None, :], acc, mask=real[:, None] & (output[None, :] < NUM_OUTPUTS)
    )
    tl.store(row + NUM_OUTPUTS, squares, mask=real)


@triton.jit
def _mixes(
    sums: tl.tensor,
    scale: tl.tensor,
    base: tl.tensor,
    inverse_rms: tl.tensor,
    split_stride: tl.tensor,
    column: tl.tensor,
    real: tl.tensor,
    NUM_SPLITS: tl.constexpr,
) -> tl.tensor:
    """`sum over splits * inverse_rms * scale + base` of the outputs `column`, 0 where not real."""
    total = tl.zeros(column.shape, tl.float32)
    for split in range(NUM_SPLITS):
        total += tl.load(sums + split * split_stride + column, mask=real, other=0)
    scaled = total * inverse_rms * tl.load(scale + column, mask=real, other=0)
    return scaled + tl.load(base + column, mask=real, other=0)


@triton.jit
def _balance(
    mixes: tl.tensor, real: tl.tensor, eps: tl.tensor, SINKHORN_ITERS: tl.constexpr
) -> tl.tensor:
    """Softmax of the rows, then columns and rows normalised in turn; 0 where not real."""
    exponent = tl.exp(mixes - tl.max(tl.where(real, mixes, -float("inf")), 1)[:, None])
    exponent = tl.where(real, exponent, 0)
    # A row that is not real has sum 0: what it becomes is thrown away.
    comb = tl.where(real, exponent / tl.sum(exponent, 1)[:, None] + eps, 0)
    comb /= tl.sum(comb, 0)[None, :] + eps
    for _ in range(SINKHORN_ITERS - 1):
        comb /= tl.sum(comb, 1)[:, None] + eps
        comb /= tl.sum(comb, 0)[None, :] + eps
    return comb


@triton.jit
def _collapse_streams(
    streams: tl.tensor,
    sums: tl.tensor,
    scale: tl.tensor,
    base: tl.tensor,
    x: tl.tensor,
    post: tl.tensor,
    comb: tl.tensor,
    num_tokens: tl.tensor,
    eps: tl.tensor,
    norm_eps: tl.tensor,
    N: tl.constexpr,
    HIDDEN: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    SINKHORN_ITERS: tl.constexpr,
    STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (token, part) writes BLOCK channels of x [num_tokens, HIDDEN].

    streams: [num_tokens, N, HIDDEN]; sums: from `_project_split`; scale, base: [NUM_OUTPUTS]. The
    first part also writes post [num_tokens, N] and comb [num_tokens, N, N], if there are
    iterations.
    """
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = sums + token * (NUM_OUTPUTS + 1)
    split_stride = num_tokens * (NUM_OUTPUTS + 1)
    squares = 0.0
    for split in range(NUM_SPLITS):
        squares += tl.load(row + split * split_stride + NUM_OUTPUTS)
    inverse_rms = 1.0 / tl.sqrt_rn(squares / (N * HIDDEN) + norm_eps)

    stream = tl.arange(0, STREAMS)
    pre = _mixes(row, scale, base, inverse_rms, split_stride, stream, stream < N, NUM_SPLITS)
    weight = tl.where(stream < N, tl.sigmoid(pre) + eps, 0)
    channel = part * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(
        streams + (token * N + stream[:, None]) * HIDDEN + channel[None, :],
        mask=(stream[:, None] < N) & (channel[None, :] < HIDDEN),
        other=0,
    ).to(tl.float32)
    mixed = tl.sum(values * weight[:, None], 0)
    tl.store(x + token * HIDDEN + channel, mixed.to(x.dtype.element_ty), mask=channel < HIDDEN)

    if SINKHORN_ITERS > 0:
        first = tl.where(part == 0, N, 0)  # none to write in other parts
        back = _mixes(
            row, scale, base, inverse_rms, split_stride, N + stream, stream < N, NUM_SPLITS
        )
        tl.store(post + token * N + stream, 2 * tl.sigmoid(back), mask=stream < first)
        real = (stream[:, None] < N) & (stream[None, :] < N)
        place = stream[:, None] * N + stream[None, :]
        mixes = _mixes(row, scale, base, inverse_rms, split_stride, 2 * N + place, real, NUM_SPLITS)
        balanced = _balance(mixes, real, eps, SINKHORN_ITERS)
        inside = (stream[:, None] < first) & (stream[None, :] < N)
        tl.store(comb + token * N * N + place, balanced, mask=inside)


@triton.jit
def _mix_out(
    output: tl.tensor,
    streams: tl.tensor,
    post: tl.tensor,
    comb: tl.tensor,
    result: tl.tensor,
    N: tl.constexpr,
    HIDDEN: tl.constexpr,
    STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (token, part) writes BLOCK channels of every new stream.

    output: [num_tokens, HIDDEN]; streams, result: [num_tokens, N, HIDDEN]; post, comb: fp32.
    """
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    stream = tl.arange(0, STREAMS)
    inside = channel < HIDDEN
    added = tl.load(output + token * HIDDEN + channel, mask=inside, other=0).to(tl.float32)
    values = tl.load(
        streams + (token * N + stream[:, None]) * HIDDEN + channel[None, :],
        mask=(stream[:, None] < N) & inside[None, :],
        other=0,
    ).to(tl.float32)
    for k in tl.static_range(N):
        weight = tl.load(comb + (token * N + stream) * N + k, mask=stream < N, other=0)
        mixed = tl.load(post + token * N + k) * added + tl.sum(values * weight[:, None], 0)
        target = result + (token * N + k) * HIDDEN + channel
        tl.store(target, mixed.to(result.dtype.element_ty), mask=inside)


_SHAPE = {"N": 4, "HIDDEN": 4096, "STREAMS": 4, "BLOCK": 1024}
_STREAMS = {"streams": "*bf16:16", "post": "*fp32:16", "comb": "*fp32:16"}
AOT = (
    Case(
        _project_split,
        "V4-Flash",
        {"streams": "*bf16:16", "fn": "*fp32:16", "sums": "*fp32:16", "num_tokens": "i32"},
        {"WIDTH": 16384, "NUM_OUTPUTS": 24, "SPLIT": SPLIT_CHANNELS, "BLOCK_TOKENS": BLOCK_TOKENS}
        | {"BLOCK_OUTPUTS": 32, "BLOCK": 64},
    ),
    Case(
        _collapse_streams,
        "V4-Flash",
        _STREAMS
        | {"sums": "*fp32:16", "scale": "*fp32:16", "base": "*fp32:16", "x": "*bf16:16"}
        | {"num_tokens": "i32", "eps": "fp32", "norm_eps": "fp32"},
        _SHAPE | {"NUM_SPLITS": 16, "NUM_OUTPUTS": 24, "SINKHORN_ITERS": 20},
    ),
    Case(_mix_out, "V4-Flash", _STREAMS | {"output": "*bf16:16", "result": "*bf16:16"}, _SHAPE),
)
