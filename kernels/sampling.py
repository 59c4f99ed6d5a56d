"""Drawing the next token: temperature, min-p, top-k and top-p, then the inverse of the CDF.

Tokens are ordered by logit, the highest first and equal ones by id. Each filter keeps a beginning
of that order, and a draw u in [0, 1) falls on the token where the kept mass passes u:

    order  |#######|#####|####|###|##|#|#|........|
    mass   0 ------------------ u * kept ------ kept

The kernel never sorts: it searches for the logit where a mass or a count is reached, bit by bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.aot import Case
from sluice.kernels.launch import block_size, runs_triton

MAX_BLOCK = 2048  # logits at a time


def draw_tokens(
    logits: Tensor,
    draws: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> Tensor:
    """The token on which each request's draw falls: [num_requests] int64.

    logits: [num_requests, vocab] fp32; -inf for what may not come, and never all of a row.
    draws: [num_requests] fp64 in [0, 1). temperature: [num_requests] fp64, above 0. top_k: int64,
        at least 1 (vocab keeps all). top_p, min_p: fp64, in [0, 1]. The likeliest token stays
        whatever they are. Masses are fp64.
    """
    run = _launch if runs_triton(logits) else draw_tokens_reference
    return run(logits, draws, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


def draw_tokens_reference(
    logits: Tensor,
    draws: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> Tensor:
    """`draw_tokens` in torch, by sorting."""
    # fp64: at a tiny temperature the scaled logits of fp32 would overflow.
    scaled, token_ids = logits.double().sort(dim=-1, descending=True, stable=True)
    scaled = (scaled - scaled[:, :1]) / temperature[:, None]
    rank = torch.arange(logits.shape[-1], device=logits.device)
    dropped = (rank >= top_k[:, None]) | (scaled < min_p.log()[:, None])  # the likeliest is at 0
    probs = scaled.masked_fill(dropped, -torch.inf).softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    # The first always stays.
    probs = probs.masked_fill((before >= top_p[:, None]) & (rank > 0), 0.0)
    cumulative = probs.cumsum(dim=-1)
    chosen = torch.searchsorted(cumulative, draws[:, None] * cumulative[:, -1:], right=True)
    last = (probs > 0).sum(dim=-1, keepdim=True) - 1  # rounding must not leave the kept tokens
    return token_ids.gather(1, torch.minimum(chosen, last))[:, 0]


def _launch(
    logits: Tensor,
    draws: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> Tensor:
    num_requests, vocab = logits.shape
    result = draws.new_empty(num_requests, dtype=torch.int64)
    if num_requests:
        _draw_token[(num_requests,)](
            logits.contiguous(),
            draws,
            temperature,
            top_k,
            top_p,
            min_p.log(),
            logits.new_empty(logits.shape, dtype=torch.float64),
            result,
            vocab,
            BLOCK=block_size(vocab, high=MAX_BLOCK),
            num_warps=8,
        )
    return result


@triton.jit
def _keys(logits: tl.tensor, token: tl.tensor, vocab: tl.tensor) -> tl.tensor:
    """int64 numbers in the order of the logits of tokens; lower than any where there is none."""
    x = tl.load(logits + token, mask=token < vocab, other=0)
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0 is 0
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    return tl.where(token < vocab, key, -(1 << 32))


@triton.jit
def _weights(weights: tl.tensor, token: tl.tensor, vocab: tl.tensor) -> tl.tensor:
    return tl.load(weights + token, mask=token < vocab, other=0)


@triton.jit
def _search(
    logits: tl.tensor,
    weights: tl.tensor,
    vocab: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    target: tl.tensor,
    COUNT: tl.constexpr,
    PASS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The largest key in [low, high] at or above which there is `target`, or `low`.

    In tokens with COUNT, else in mass; with PASS, more than `target`.
    """
    while low < high:
        middle = low + (high - low + 1) // 2
        found = tl.zeros([BLOCK], tl.float64)
        for first in range(0, vocab, BLOCK):
            token = first + tl.arange(0, BLOCK)
            chosen = _keys(logits, token, vocab) >= middle
            if COUNT:
                found += tl.where(chosen, 1.0, 0.0)
            else:
                found += tl.where(chosen, _weights(weights, token, vocab), 0.0)
        total = tl.sum(found, 0)
        reached = total > target if PASS else total >= target
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    return low


@triton.jit
def _around(
    logits: tl.tensor, weights: tl.tensor, vocab: tl.tensor, key: tl.tensor, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Number and mass of the tokens above a key; number of those at it, and the mass of one."""
    count = tl.zeros([BLOCK], tl.int64)
    mass = tl.zeros([BLOCK], tl.float64)
    ties = tl.zeros([BLOCK], tl.int64)
    weight = tl.zeros([BLOCK], tl.float64)
    for first in range(0, vocab, BLOCK):
        token = first + tl.arange(0, BLOCK)
        keys, each = _keys(logits, token, vocab), _weights(weights, token, vocab)
        count += (keys > key).to(tl.int64)
        mass += tl.where(keys > key, each, 0.0)
        ties += (keys == key).to(tl.int64)
        weight = tl.maximum(weight, tl.where(keys == key, each, 0.0))
    return tl.sum(count, 0), tl.sum(mass, 0), tl.sum(ties, 0), tl.max(weight, 0)


@triton.jit
def _token_at(
    logits: tl.tensor, vocab: tl.tensor, key: tl.tensor, number: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """The id of the `number`-th token, from 0, with this key."""
    before = tl.zeros([1], tl.int64)
    result = tl.zeros([1], tl.int64)
    for first in range(0, vocab, BLOCK):
        token = first + tl.arange(0, BLOCK)
        same = (_keys(logits, token, vocab) == key).to(tl.int64)
        place = before + tl.cumsum(same, 0) - 1
        result += tl.sum(tl.where((same == 1) & (place == number), token, 0), 0)
        before += tl.sum(same, 0)
    return tl.sum(result, 0)


@triton.jit
def _draw_token(
    logits: tl.tensor,
    draws: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    log_min_p: tl.tensor,
    weights: tl.tensor,
    result: tl.tensor,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Program r draws request r's token from logits [num_requests, vocab] fp32 into result [r].

    weights: fp64 [num_requests, vocab], written: exp((logit - highest) / temperature), or 0 below
    min-p. The rest: one number a request; see `draw_tokens`.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    weights += row * vocab
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    for first in range(0, vocab, BLOCK):
        token = first + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(logits + token, mask=token < vocab, other=-float("inf")))
    highest = tl.max(best, 0).to(tl.float64)

    heat, floor = tl.load(temperature + row), tl.load(log_min_p + row)
    mass = tl.zeros([BLOCK], tl.float64)
    top_keys = tl.full([BLOCK], -(1 << 32), tl.int64)
    low_keys = tl.full([BLOCK], 1 << 32, tl.int64)
    for first in range(0, vocab, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = tl.load(logits + token, mask=token < vocab, other=-float("inf")).to(tl.float64)
        scaled = (x - highest) / heat
        weight = tl.where(scaled < floor, 0.0, tl.exp(scaled))
        tl.store(weights + token, weight, mask=token < vocab)
        keys = _keys(logits, token, vocab)
        mass += weight
        top_keys = tl.maximum(top_keys, keys)
        low_keys = tl.minimum(low_keys, tl.where(weight > 0, keys, 1 << 32))
    kept = tl.sum(mass, 0)
    low, high = tl.min(low_keys, 0), tl.max(top_keys, 0)
    most_ties = tl.full([], 0, tl.int64) + vocab  # of the tokens at `low`, the lowest that is kept
    tl.debug_barrier()  # other threads read the weights

    k = tl.load(top_k + row)
    if k < vocab:
        key = _search(logits, weights, vocab, low, high, k, True, False, BLOCK)
        above, mass_above, ties, weight = _around(logits, weights, vocab, key, BLOCK)
        low = key
        most_ties = tl.minimum(ties, k - above)
        kept = mass_above + most_ties * weight
    p = tl.load(top_p + row)
    if p < 1:
        target = p * kept
        key = _search(logits, weights, vocab, low, high, target, False, False, BLOCK)
        above, mass_above, ties, weight = _around(logits, weights, vocab, key, BLOCK)
        needed = tl.ceil((target - mass_above) / weight).to(tl.int64)
        most_ties = tl.minimum(tl.maximum(needed, 1), tl.where(key == low, most_ties, ties))
        low = key
        kept = mass_above + most_ties * weight

    target = tl.load(draws + row) * kept
    key = _search(logits, weights, vocab, low, high, target, False, True, BLOCK)
    above, mass_above, ties, weight = _around(logits, weights, vocab, key, BLOCK)
    number = tl.floor((target - mass_above) / weight).to(tl.int64)
    last = tl.where(key == low, tl.minimum(most_ties, ties), ties) - 1
    number = tl.minimum(tl.maximum(number, 0), last)
    tl.store(result + row, _token_at(logits, vocab, key, number, BLOCK))


AOT = (
    Case(
        _draw_token,
        "V4 vocabulary",
        {"logits": "*fp32:16", "draws": "*fp64:16", "temperature": "*fp64:16", "top_k": "*i64:16"}
        | {"top_p": "*fp64:16", "log_min_p": "*fp64:16", "weights": "*fp64:16"}
        | {"result": "*i64:16", "vocab": "i32:16"},
        {"BLOCK": MAX_BLOCK},
        num_warps=8,
    ),
)
