"""Rows of pools in whatever format the role keeps them: the only place that tells them apart.

Kernels read packed rows as they are, unpacking each as they come to it. Where the lists name rows
many times over, as long prompts do, each row of the requests' pages is unpacked once, before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sluice.cache.spec import PoolSpec
from sluice.kernels.formats import pack, simulate, unpack, write_packed
from sluice.kernels.hadamard import rotate_channels
from sluice.kernels.packed_rows import PackedRows, Rows
from sluice.kernels.rows import write_rows
from sluice.model.common.inputs import ForwardInputs, PoolView

Source = tuple[Rows, Tensor]  # rows [num_pages, rows_per_page, *], and slots in them


def store(pool: PoolView, layer: int, slots: Tensor, values: Tensor) -> None:
    """Write vectors [n, dim] to one layer's rows at `slots` [n]; -1 is not written."""
    form = pool.spec.format
    if form is None:
        write_rows(pool.layer(layer), slots, values)
    else:
        values = rotate_channels(values) if form.rotated else values
        write_packed(pool.layer(layer), slots, values, form)


def source(
    pool: PoolView, layer: int, slots: Tensor, inputs: ForwardInputs, dtype: torch.dtype
) -> Source:
    """One layer's rows, and where in them those at `slots` [n, k] are.

    dtype: of packed rows that are unpacked now.
    """
    form, rows = pool.spec.format, pool.layer(layer)
    if form is None:
        return rows, slots
    table = inputs.page_tables[pool.spec.table]
    if slots.numel() > table.numel() * rows.shape[1]:
        pages = table.flatten()
        return unpack(rows[pages], form, dtype), _slots_among(pages, slots, rows)
    return PackedRows(rows, form), slots


def matched(queries: Tensor, pool: PoolView) -> Tensor:
    """Queries [..., dim] as the pool's rows are: turned if those are, and rounded in the same way.

    The released models were trained with both sides of the indexer's scores rounded.
    """
    form = pool.spec.format
    if form is None or not form.rotated:
        return queries
    return simulate(rotate_channels(queries), form)


def convert_rows(rows: Tensor, source: PoolSpec, target: PoolSpec) -> Tensor:
    """Rows of a pool as another role stores them: [..., *row] of the target's numbers.

    rows: [..., *row] of the source's. Both specs are of one pool, in two of its dtypes.
    """
    here, there = source.format, target.format
    vectors = rows if here is None else unpack(rows, here, torch.float32)
    if (here is not None and here.rotated) != (there is not None and there.rotated):
        vectors = rotate_channels(vectors)  # its own inverse
    return vectors.to(getattr(torch, target.dtype)) if there is None else pack(vectors, there)


def _slots_among(pages: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    """Slots of the same rows where only `pages` [n] of the pool are left, in this order."""
    num_pages, rows_per_page = rows.shape[:2]
    place = torch.zeros(num_pages, dtype=torch.int64, device=slots.device)
    place[pages] = torch.arange(len(pages), device=slots.device)
    page = torch.div(slots.clamp(min=0), rows_per_page, rounding_mode="floor")
    return torch.where(slots >= 0, place[page] * rows_per_page + slots % rows_per_page, -1)
