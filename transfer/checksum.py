"""Checksums of rows, equal on both sides whatever the layouts of their pages."""

from __future__ import annotations

from typing import Literal

import torch
import xxhash

from sluice.cache.pools import Pool
from sluice.protocol.messages import PageRun
from sluice.transfer.rows import rows_of

ChecksumMode = Literal["off", "sample", "full"]
SAMPLED_ROWS = 32


def checked_rows(rows: range, mode: ChecksumMode) -> range:
    """The rows that are hashed: all, or about `SAMPLED_ROWS` at equal distances with both ends."""
    if mode != "sample" or len(rows) <= SAMPLED_ROWS:
        return rows
    step = (len(rows) - 1) // (SAMPLED_ROWS - 1)
    return range(rows.start + (len(rows) - 1) % step, rows.stop, step)


def checksum(pool: Pool, run: PageRun, rows: range) -> str:
    """xxh3 (64 bits, hexadecimal) of the rows' bytes. Waits for the pool's device."""
    values = rows_of(pool, run, rows).contiguous().view(torch.uint8).cpu()
    return xxhash.xxh3_64_hexdigest(values.numpy().data)
