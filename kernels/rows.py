"""Rows of a pool by slot: write a step's rows, gather the rows that a computation needs.

`rows` is always one layer's view of a pool, [num_pages, rows_per_page, *row_shape], of whole rows
or of the same part of each. Its page stride is that of all layers together, so pages are far apart;
a page's rows are one stride apart, and the elements of a row are contiguous.
Slot = page * rows_per_page + offset; -1 means no row.
"""

from __future__ import annotations

import torch
from torch import Tensor


def write_rows(rows: Tensor, slots: Tensor, values: Tensor) -> None:
    """Store `values[i]` at `slots[i]`, in the pool's dtype.

    rows: [num_pages, rows_per_page, *row_shape], written in place.
    slots: [n] int64; -1 is not written (it lands in the null page, whose content means nothing, so
        that the shape never depends on the data).
    values: [n, *row_shape].
    """
    assert values.shape[1:] == rows.shape[2:], "a row's shape must be the pool's row_shape"
    flat, index = _flat(rows, slots)
    flat.index_copy_(0, index, values.reshape(slots.shape[0], flat.shape[1]).to(rows.dtype))


def gather_rows(rows: Tensor, slots: Tensor) -> Tensor:
    """Rows at `slots`, [*slots.shape, *row_shape] in the pool's dtype; zeros where slot is -1.

    The zeros are written, not multiplied in: the null page may hold anything, NaN included.
    """
    flat, index = _flat(rows, slots.reshape(-1))
    gathered = flat.index_select(0, index)  # [n, row_size]
    gathered.masked_fill_((slots < 0).reshape(-1, 1), 0)
    return gathered.view(*slots.shape, *rows.shape[2:])


def _flat(rows: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The layer's rows as [n, row_size] over the pool's storage, and the index of each slot in it.

    A page of the layer begins every `page_stride` rows: the rows of the other layers lie between,
    reachable by index but never indexed.
    """
    num_pages, rows_per_page = rows.shape[:2]
    row = rows[0, 0]
    # The stride of an extent of 1 means nothing: then pages are rows.
    row_stride = rows.stride(1) if rows_per_page > 1 else rows.stride(0)
    page_stride = rows.stride(0) // row_stride
    assert row.is_contiguous(), "the elements of a row must be contiguous"
    assert rows.stride(0) % row_stride == 0, "pages must be a whole number of rows apart"
    num_rows = (num_pages - 1) * page_stride + rows_per_page
    flat = rows.as_strided((num_rows, row.numel()), (row_stride, 1))
    slots = slots.clamp(min=0)
    if page_stride == rows_per_page:
        return flat, slots
    pages = torch.div(slots, rows_per_page, rounding_mode="floor")
    return flat, slots + pages * (page_stride - rows_per_page)
