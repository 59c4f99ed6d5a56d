"""Placement: where one step's rows lie in the pools, computed once for all layers.

A step computes tokens [start, end) of each request. In full token coordinates, with blocks of
`ratio` tokens:

        start                            end
    ──────┼───────────────────────────────┼───
    |  block  |  block  |  block  |  block  |
    └─────────┴─────────┴─────────┘            finished in this step: rows to write
    └─────────┴─────────┴─────────┴─────────┘  touched: accumulators to update

Slots are -1 where there is no row. Lists of blocks are padded to a length known from shapes alone
(their slots are -1), or exact on a CPU, where looking at the data does not wait for a device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.cache.spec import PoolSpec, ceil_div
from sluice.kernels.cpu import is_recording
from sluice.model.common.inputs import ForwardInputs

EXACT_ON = ("cpu",)  # device types where lists are exact; elsewhere no shape depends on data


@dataclass(frozen=True)
class Blocks:
    """Blocks of `ratio` tokens, [n]: whose they are, their number, and whether they are real."""

    ratio: int
    request: Tensor
    number: Tensor
    valid: Tensor

    @property
    def first_token(self) -> Tensor:
        return self.number * self.ratio


def finished_blocks(inputs: ForwardInputs, ratio: int) -> Blocks:
    """Blocks whose last token this step computes, without those that history has."""
    known = torch.maximum(inputs.num_computed, inputs.num_history)
    first = torch.div(known, ratio, rounding_mode="floor")
    count = (torch.div(_ends(inputs), ratio, rounding_mode="floor") - first).clamp(min=0)
    num_tokens, num_requests = inputs.positions.shape[0], inputs.num_requests
    most = (num_tokens + num_requests * (ratio - 1)) // ratio
    return _list_blocks(ratio, first, count, most)


def context_blocks(inputs: ForwardInputs, ratio: int, spec: PoolSpec) -> Blocks:
    """Every request's complete blocks from its first, one request after another.

    spec: of a Full pool, whose page tables bound the requests' lengths.
    """
    count = _complete_blocks(inputs, ratio)
    most = inputs.num_requests * (_max_tokens(inputs, spec) // ratio)
    return _list_blocks(ratio, torch.zeros_like(count), count, most)


def context_pages(inputs: ForwardInputs, ratio: int, spec: PoolSpec) -> Tensor:
    """Page table for pages of one row each that lie in the order of `context_blocks`, from page 1.

    [R, as many as the longest request could have, and at least 1]; 0, the null page, beyond the
    last.
    """
    count = _complete_blocks(inputs, ratio)
    before = count.cumsum(0) - count
    number = torch.arange(ceil_div(_max_tokens(inputs, spec), ratio), device=count.device)
    pages = 1 + before.unsqueeze(1) + number
    return torch.where(number < count.unsqueeze(1), pages, 0)


def touched_blocks(inputs: ForwardInputs, ratio: int) -> tuple[Blocks, Tensor]:
    """Blocks with a token in this step, and the index among them of each token's block [T]."""
    first = torch.div(inputs.num_computed, ratio, rounding_mode="floor")
    count = torch.div(_ends(inputs) - 1, ratio, rounding_mode="floor") - first + 1
    num_tokens = inputs.positions.shape[0]
    most = min(num_tokens, num_tokens // ratio + 2 * inputs.num_requests)
    blocks = _list_blocks(ratio, first, count, most)
    offset = count.cumsum(0) - count - first
    number = torch.div(inputs.positions, ratio, rounding_mode="floor")
    return blocks, number + offset[inputs.request_index]


def _is_exact(tensor: Tensor) -> bool:
    """Whether lists are as long as the data says: not where a step is recorded."""
    return tensor.device.type in EXACT_ON and not is_recording()


def _list_blocks(ratio: int, first: Tensor, count: Tensor, most: int) -> Blocks:
    """Blocks [first, first + count) of every request in turn, padded to `most`."""
    ends = count.cumsum(0)
    if _is_exact(count):
        most = int(ends[-1])
    place = torch.arange(most, device=count.device)
    request = torch.searchsorted(ends, place, right=True).clamp(max=len(count) - 1)
    valid = place < ends[-1]
    number = first[request] + place - (ends - count)[request]
    return Blocks(ratio, request, torch.where(valid, number, 0), valid)


def token_slots(inputs: ForwardInputs, spec: PoolSpec) -> Tensor:
    """Slot of each of this step's tokens: [T]."""
    return inputs.slots(spec, inputs.request_index, inputs.positions)


def window_slots(inputs: ForwardInputs, spec: PoolSpec, window: int) -> Tensor:
    """Slots of the last `window` tokens up to each token, itself included: [T, window]."""
    back = torch.arange(window - 1, -1, -1, device=inputs.positions.device)
    tokens = inputs.positions.unsqueeze(1) - back
    return inputs.slots(spec, inputs.request_index.unsqueeze(1), tokens, tokens >= 0)


def block_slots(inputs: ForwardInputs, spec: PoolSpec, blocks: Blocks) -> Tensor:
    """Slot of each block's row: [n]."""
    return inputs.slots(spec, blocks.request, blocks.first_token, blocks.valid)


def earlier_block_slots(inputs: ForwardInputs, spec: PoolSpec, blocks: Blocks) -> Tensor:
    """Slots of rows of blocks that earlier steps began, -1 for blocks that begin now: [n]."""
    begun = blocks.valid & (blocks.first_token < inputs.num_computed[blocks.request])
    return inputs.slots(spec, blocks.request, blocks.first_token, begun)


def unfinished_block_slots(inputs: ForwardInputs, spec: PoolSpec, blocks: Blocks) -> Tensor:
    """Slots of rows of blocks that this step leaves unfinished, -1 for the others: [n]."""
    open_blocks = blocks.first_token + blocks.ratio > _ends(inputs)[blocks.request]
    return inputs.slots(spec, blocks.request, blocks.first_token, blocks.valid & open_blocks)


def finished_block_slots(inputs: ForwardInputs, spec: PoolSpec, blocks: Blocks) -> Tensor:
    """Slots of rows of blocks that this step finishes, -1 for the others: [n].

    History has rows of its own, which stay.
    """
    block_ends = blocks.first_token + blocks.ratio
    closed = block_ends <= _ends(inputs)[blocks.request]
    new = block_ends > inputs.num_history[blocks.request]
    valid = blocks.valid & closed & new
    return inputs.slots(spec, blocks.request, blocks.first_token, valid)


def block_token_slots(
    inputs: ForwardInputs, spec: PoolSpec, blocks: Blocks, overlap: int
) -> Tensor:
    """Slots of the tokens of `overlap` blocks before each block, then of its own.

    [n, (overlap + 1) * ratio].
    """
    ratio = blocks.ratio
    within = torch.arange(-overlap * ratio, ratio, device=blocks.number.device)
    tokens = blocks.first_token.unsqueeze(1) + within
    valid = blocks.valid.unsqueeze(1) & (tokens >= 0)
    return inputs.slots(spec, blocks.request.unsqueeze(1), tokens, valid)


def num_visible_rows(inputs: ForwardInputs, ratio: int) -> Tensor:
    """Compressed rows each token sees, [T]: a row from the very token that completes its block."""
    return torch.div(inputs.positions + 1, ratio, rounding_mode="floor")


def request_row_slots(inputs: ForwardInputs, spec: PoolSpec) -> Tensor:
    """Slots of each request's compressed rows in order: [R, num_rows], -1 beyond the last."""
    rows = _row_numbers(inputs, spec)
    complete = _complete_blocks(inputs, spec.tokens_per_row)
    request = torch.arange(inputs.num_requests, device=rows.device).unsqueeze(1)
    tokens = (rows * spec.tokens_per_row).expand(inputs.num_requests, -1)
    return inputs.slots(spec, request, tokens, rows < complete.unsqueeze(1))


def visible_row_slots(inputs: ForwardInputs, spec: PoolSpec) -> Tensor:
    """Slots of all compressed rows that each token sees: [T, num_rows], -1 beyond the last."""
    rows = _row_numbers(inputs, spec)
    visible = num_visible_rows(inputs, spec.tokens_per_row).unsqueeze(1)
    return row_slots(inputs, spec, torch.where(rows < visible, rows, -1))


def row_slots(inputs: ForwardInputs, spec: PoolSpec, rows: Tensor) -> Tensor:
    """Slots of compressed rows given by number, [T, k]; -1 stays -1."""
    request = inputs.request_index.unsqueeze(1)
    return inputs.slots(spec, request, rows * spec.tokens_per_row, rows >= 0)


def _row_numbers(inputs: ForwardInputs, spec: PoolSpec) -> Tensor:
    """Numbers of the rows that any request may have: as many as the longest has, or could have."""
    num_rows = _max_tokens(inputs, spec) // spec.tokens_per_row
    if _is_exact(inputs.positions):
        num_rows = min(num_rows, int(_ends(inputs).max()) // spec.tokens_per_row)
    return torch.arange(num_rows, device=inputs.positions.device)


def _max_tokens(inputs: ForwardInputs, spec: PoolSpec) -> int:
    """How long a request can be for the page tables of a Full pool."""
    return inputs.page_tables[spec.table].shape[1] * spec.tokens_per_page


def _complete_blocks(inputs: ForwardInputs, ratio: int) -> Tensor:
    """Blocks each request will have completed after this step: [R]."""
    return torch.div(_ends(inputs), ratio, rounding_mode="floor")


def _ends(inputs: ForwardInputs) -> Tensor:
    """Tokens each request will have computed after this step: [R]."""
    return inputs.num_computed + inputs.query_start[1:] - inputs.query_start[:-1]
