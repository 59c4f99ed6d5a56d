"""Rows of a request out of its pages, whatever the pages' layout."""

from __future__ import annotations

import torch
from torch import Tensor

from sluice.cache.pools import Pool
from sluice.protocol.messages import PageRun


def rows_of(pool: Pool, run: PageRun, rows: range) -> Tensor:
    """A copy of `rows`, [num_rows, num_layers, *row]: the order of no page layout.

    The rows must lie in the run's pages.
    """
    index = torch.arange(rows.start, rows.stop, rows.step)
    pages = torch.tensor(run.pages)[index // pool.spec.rows_per_page - run.first]
    return pool.tensor[pages, :, index % pool.spec.rows_per_page]
