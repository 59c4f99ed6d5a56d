"""Compressors: one cached row from a block of tokens, weighted by a softmax for each channel.

A token brings `kv` and `score`; a block's row is sum(kv * softmax(score over its tokens)). Three
kinds differ in what they keep of an unfinished block:

    raw           kv and score of each token
    overlapping   the same, twice as wide; a row takes the first half of the channels from the
                  previous block's tokens, the second half from its own:
                      |prev prev prev prev|own own own own| -> row
    accumulating  three running numbers a channel: max of scores, sum of exp(score - max), and sum
                  of kv * exp(score - max)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sluice.kernels.rows import gather_rows

MAX_GATHERED_ELEMENTS = 1 << 20  # of [blocks, tokens, row] at a time: 4 MB, within the last cache
LOWEST = torch.finfo(torch.float32).min  # exp(LOWEST - anything) is 0, and never NaN as -inf is


def compress_raw(rows: Tensor, slots: Tensor) -> Tensor:
    """Rows of finished blocks, fp32 [num_blocks, dim], before norm and rotation.

    rows: state pool's layer view [num_pages, rows_per_page, 2, dim] fp32: kv and score of a token.
    slots: [num_blocks, ratio] of each block's tokens. All -1 (padding) gives zeros.
    """
    return _tiled(_compress_raw, rows, slots)


def compress_overlapping(rows: Tensor, slots: Tensor) -> Tensor:
    """Rows of finished blocks, fp32 [num_blocks, dim], before norm and rotation.

    rows: state pool's layer view [num_pages, rows_per_page, 2, 2 * dim] fp32: kv and score of a
        token, each with the half for the next block's row first.
    slots: [num_blocks, 2 * ratio]: the previous block's tokens, then the block's own; -1 = none
        (weight 0). All -1 (padding) gives zeros.
    """
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


def accumulate_blocks(
    rows: Tensor, slots: Tensor, block_of_token: Tensor, kv: Tensor, score: Tensor
) -> Tensor:
    """Blocks' accumulators (max, sum, weighted kv) after this step: [num_blocks, 3, dim].

    rows: state pool's layer view [num_pages, rows_per_page, 3, dim] fp32, only read.
    slots: [num_blocks], where the accumulators of a block's earlier tokens lie; -1 = the block
        begins in this step.
    block_of_token: [num_tokens], index into `slots`; kv, score: [num_tokens, dim] fp32.
    """
    old_max, old_sum, old_kv = gather_rows(rows, slots).unbind(1)  # [num_blocks, dim]
    old_max = old_max.masked_fill((slots < 0).unsqueeze(-1), LOWEST)
    channels = block_of_token.unsqueeze(-1).expand_as(score)
    new_max = old_max.scatter_reduce(0, channels, score, "amax")
    weight = torch.exp(score - new_max[block_of_token])
    kept = torch.exp(old_max - new_max)
    sums = torch.stack([old_sum * kept, old_kv * kept], dim=1)  # [num_blocks, 2, dim]
    sums.index_add_(0, block_of_token, torch.stack([weight, weight * kv], dim=1))
    return torch.cat([new_max.unsqueeze(1), sums], dim=1)


def close_blocks(accumulators: Tensor) -> Tensor:
    """Rows [num_blocks, dim] fp32 from accumulators [num_blocks, 3, dim], before norm, rotation."""
    tiny = torch.finfo(torch.float32).tiny  # padding has sum 0
    return accumulators[:, 2] / accumulators[:, 1].clamp(min=tiny)
