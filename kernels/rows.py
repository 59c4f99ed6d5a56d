"""Rows of a pool by slot: write a step's rows, gather what a computation needs, or re-pack them.

`rows` is always one layer's view of a pool, [num_pages, rows_per_page, *row_shape], of whole rows
or of the same part of each. Its page stride is that of all layers together, so pages are far apart;
a page's rows are one stride apart, and the elements of a row are contiguous.
Slot = page * rows_per_page + offset; -1 means no row.
"""

from __future__ import annotations

import math
from itertools import chain

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.aot import Case
from sluice.kernels.cpu import call, compiled, dtype_of, place
from sluice.kernels.launch import block_size, runs_triton

MAX_BLOCK_ELEMENTS = 1024  # of a row at a time: 8 elements a thread


def write_rows(rows: Tensor, slots: Tensor, values: Tensor) -> None:
    """Store `values[i]` at `slots[i]`, in the pool's dtype.

    rows: [num_pages, rows_per_page, *row_shape], written in place.
    slots: [n] int64; -1 is not written (the reference lets it land in the null page, whose content
        means nothing, so that the shape never depends on the data).
    values: [n, *row_shape].
    """
    assert values.shape[1:] == rows.shape[2:], "a row's shape must be the pool's row_shape"
    if runs_triton(rows):
        _copy(values.contiguous().unsqueeze(1), None, rows, slots)
    elif compiled(rows, values):
        sizes = (len(slots), math.prod(rows.shape[2:]), dtype_of(rows), dtype_of(values))
        call("write_rows", *place(rows), slots, values.contiguous(), *sizes)
    else:
        write_rows_reference(rows, slots, values)


def gather_rows(rows: Tensor, slots: Tensor) -> Tensor:
    """Rows at `slots`, [*slots.shape, *row_shape] in the pool's dtype; zeros where slot is -1.

    The zeros are written, not multiplied in: the null page may hold anything, NaN included.
    """
    if not runs_triton(rows):
        return gather_rows_reference(rows, slots)
    result = rows.new_empty(slots.numel(), 1, *rows.shape[2:])
    _copy(rows, slots.reshape(-1), result, None)
    return result.view(*slots.shape, *rows.shape[2:])


def page_slots(
    tokens: Tensor,
    request: Tensor,
    valid: Tensor | None,
    page_table: Tensor,
    first_pages: Tensor | None,
    *,
    tokens_per_page: int,
    tokens_per_row: int,
) -> Tensor:
    """Slots of the rows holding `tokens`, int64 of their shape; -1 where not `valid`.

    tokens: [n] or [n, k] absolute token numbers; request, valid: of the same shape, or broadcast to
        it: whose they are, and whether they are to be looked up.
    page_table: [num_requests, max_pages], of pages from first_pages [num_requests] on, or from 0.
        What is not valid may lie outside of it.
    """
    request = request.expand_as(tokens)
    if not compiled(tokens, page_table):
        if valid is not None:
            tokens = torch.where(valid, tokens, 0)
        column = tokens // tokens_per_page
        if first_pages is not None:
            column = (column - first_pages[request]).clamp(min=0)
        offset = tokens % tokens_per_page // tokens_per_row
        slots = page_table[request, column] * (tokens_per_page // tokens_per_row) + offset
        return slots if valid is None else torch.where(valid, slots, -1)
    result = tokens.new_empty(tokens.shape)
    spread = [
        _spread(t) for t in (tokens, request, None if valid is None else valid.expand_as(tokens))
    ]
    outer, inner = (*tokens.shape, 1)[:2]
    lists = (page_table, page_table.stride(0), first_pages, result)
    pages = (tokens_per_page, tokens_per_row)
    call("page_slots", *chain(*spread), *lists, outer, inner, *pages)
    return result


def _spread(tensor: Tensor | None) -> tuple[Tensor | None, int, int]:
    """A tensor of one or two dimensions with its strides."""
    if tensor is None:
        return None, 0, 0
    outer, inner = (*tensor.stride(), 0)[:2]
    return tensor, outer, inner


def write_rows_reference(rows: Tensor, slots: Tensor, values: Tensor) -> None:
    """`write_rows` in torch."""
    flat, index = _flat(rows, slots)
    flat.index_copy_(0, index, values.reshape(slots.shape[0], flat.shape[1]).to(rows.dtype))


def gather_rows_reference(rows: Tensor, slots: Tensor) -> Tensor:
    """`gather_rows` in torch."""
    flat, index = _flat(rows, slots.reshape(-1))
    gathered = flat.index_select(0, index)  # [n, row_size]
    absent = (slots < 0).flatten().nonzero().squeeze(1)
    gathered.index_fill_(0, absent, 0)  # few, where masking would pass over all
    return gathered.view(*slots.shape, *rows.shape[2:])


def _flat(rows: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The layer's rows as [n, row_size] over the pool's storage, and the index of each slot in it.

    A page of the layer begins every `page_stride` rows: the rows of the other layers lie between,
    reachable by index but never indexed.
    """
    num_pages, rows_per_page, *row_shape = rows.shape
    # The stride of an extent of 1 means nothing: then pages are rows.
    row_stride = rows.stride(1) if rows_per_page > 1 else rows.stride(0)
    page_stride = rows.stride(0) // row_stride
    assert not row_shape or rows.stride(-1) == 1, "the elements of a row must be contiguous"
    assert rows.stride(0) % row_stride == 0, "pages must be a whole number of rows apart"
    num_rows = (num_pages - 1) * page_stride + rows_per_page
    flat = rows.as_strided((num_rows, math.prod(row_shape)), (row_stride, 1))
    slots = slots.clamp(min=0)
    if page_stride == rows_per_page:
        return flat, slots
    pages = torch.div(slots, rows_per_page, rounding_mode="floor")
    return flat, torch.add(slots, pages, alpha=page_stride - rows_per_page)


def _copy(
    source: Tensor, source_slots: Tensor | None, target: Tensor, target_slots: Tensor | None
) -> None:
    """Row i from its source slot to its target slot; without slots, row i is slot i."""
    slots = source_slots if source_slots is not None else target_slots
    assert slots is not None, "one side at least is found by slot"
    size = math.prod(source.shape[2:])
    if not slots.numel() or not size:
        return
    block = block_size(size, high=MAX_BLOCK_ELEMENTS)
    _copy_rows[(slots.numel(), triton.cdiv(size, block))](
        source,
        source_slots,
        target,
        target_slots,
        size,
        *source.stride()[:2],
        *target.stride()[:2],
        SOURCE_PAGE_ROWS=source.shape[1],
        TARGET_PAGE_ROWS=target.shape[1],
        BLOCK=block,
    )


@triton.jit
def row_offsets(
    slots: tl.tensor, page_stride: tl.tensor, row_stride: tl.tensor, page_rows: tl.tensor
) -> tl.tensor:
    """Offsets of the elements at int64 `slots`, of any shape, in a layer's view; -1 gives none."""
    slots = slots.to(tl.int32)  # which a device divides ten times faster
    return (slots // page_rows).to(tl.int64) * page_stride + (slots % page_rows) * row_stride


@triton.jit
def _copy_rows(
    source: tl.tensor,
    source_slots: tl.tensor,
    target: tl.tensor,
    target_slots: tl.tensor,
    size: tl.tensor,
    source_page_stride: tl.tensor,
    source_row_stride: tl.tensor,
    target_page_stride: tl.tensor,
    target_row_stride: tl.tensor,
    SOURCE_PAGE_ROWS: tl.constexpr,
    TARGET_PAGE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK elements of one row, from source to target [num_pages, rows_per_page, size].

    Program (i, part) copies row i of the slots [n], either of which may be None for 0, 1, ...
    Nothing is read at source slot -1, which gives zeros; nothing is written at target slot -1.
    """
    row = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source_slot = row
    if source_slots is not None:
        source_slot = tl.load(source_slots + row)
    target_slot = row
    if target_slots is not None:
        target_slot = tl.load(target_slots + row)
    read = source + row_offsets(
        source_slot, source_page_stride, source_row_stride, SOURCE_PAGE_ROWS
    )
    write = target + row_offsets(
        target_slot, target_page_stride, target_row_stride, TARGET_PAGE_ROWS
    )
    readable = tl.where(source_slot >= 0, size, 0)
    writable = tl.where(target_slot >= 0, size, 0)
    values = tl.load(read + element, mask=element < readable, other=0)
    tl.store(write + element, values.to(target.dtype.element_ty), mask=element < writable)


_STRIDES = {
    f"{side}_{unit}_stride": "i64:16" for side in ("source", "target") for unit in ("page", "row")
}
AOT = (
    Case(
        _copy_rows,
        "V4-Flash window rows",
        {"source": "*bf16:16", "target": "*bf16:16", "target_slots": "*i64:16", "size": "i32:16"}
        | _STRIDES,
        {"SOURCE_PAGE_ROWS": 1, "TARGET_PAGE_ROWS": 64, "BLOCK": 512},
    ),
    Case(
        _copy_rows,
        "bf16 rows to fp8",
        {"source": "*bf16:16", "source_slots": "*i64:16"}
        | {"target": "*fp8e4nv:16", "target_slots": "*i64:16", "size": "i32:16"}
        | _STRIDES,
        {"SOURCE_PAGE_ROWS": 64, "TARGET_PAGE_ROWS": 32, "BLOCK": 512},
    ),
)
