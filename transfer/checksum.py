"""Checksums of rows, equal on both sides whatever the layouts of their pages."""

from __future__ import annotations

import torch
import xxhash

from sluice.cache.pools import Pool
from sluice.engine.protocol import PageRun


def rows_of(pool: Pool, run: PageRun, rows: range) -> torch.Tensor:
    """A copy of `rows` as [num_rows, num_layers, *row_shape], the order of no page layout.

    The rows must lie in the run's pages.
    """
    index = torch.arange(rows.start, rows.stop)
    pages = torch.tensor(run.pages)[index // pool.spec.rows_per_page - run.first]
    return pool.tensor[pages, :, index % pool.spec.rows_per_page]


def checksum(pool: Pool, run: PageRun, rows: range) -> str:
    """xxh3 (64 bits, hexadecimal) of the rows' bytes. Waits for the pool's device."""
    values = rows_of(pool, run, rows).contiguous().view(torch.uint8).cpu()
    return xxhash.xxh3_64_hexdigest(values.numpy().data)
