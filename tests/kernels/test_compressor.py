"""Compressors against the softmax over a block that defines them."""

import torch

from sluice.kernels import compressor
from sluice.kernels.compressor import compress_overlapping, compress_raw


def test_overlapping_rows_equal_their_definition():
    dim, ratio = 5, 4
    pool = torch.randn(6, 2, 8, 2, 2 * dim)
    pool[0] = torch.nan
    tokens = torch.randperm(40) + 8
    slots = torch.stack([tokens[:8], tokens[8:16], torch.full((8,), -1)])
    slots[1, :ratio] = -1  # block 0 has no predecessor
    rows = compress_overlapping(pool[:, 1], slots)
    for block in range(2):
        parts = []
        for place, slot in enumerate(slots[block].tolist()):
            half = slice(0, dim) if place < ratio else slice(dim, 2 * dim)
            if slot >= 0:
                parts.append(pool[slot // 8, 1, slot % 8][:, half])
        kv, score = torch.stack(parts).unbind(1)
        torch.testing.assert_close(rows[block], (kv * score.softmax(0)).sum(0))
    assert (rows[2] == 0).all(), "padding gives zeros"


def test_raw_rows_equal_their_definition():
    """From a part of wider rows, as the native path keeps them."""
    dim, ratio = 5, 16
    pool = torch.randn(7, 2, 8, 3 + 2 * dim)
    pool[0] = torch.nan
    slots = torch.stack([*(torch.randperm(48) + 8)[:32].split(ratio), torch.full((ratio,), -1)])
    rows = compress_raw(pool[:, 1, :, 3:].unflatten(-1, (2, dim)), slots)
    for block in range(2):
        kv, score = pool[slots[block] // 8, 1, slots[block] % 8, 3:].split(dim, dim=1)
        torch.testing.assert_close(rows[block], (kv * score.softmax(0)).sum(0))
    assert (rows[2] == 0).all(), "padding gives zeros"


def test_tiles_of_blocks_give_the_same(monkeypatch):
    pool = torch.randn(6, 2, 8, 2, 10)
    slots = torch.randint(8, 48, (9, 8))
    expected = compress_overlapping(pool[:, 0], slots), compress_raw(pool[:, 0], slots)
    monkeypatch.setattr(compressor, "MAX_GATHERED_ELEMENTS", 2 * 8 * 20)
    assert torch.equal(compress_overlapping(pool[:, 0], slots), expected[0])
    assert torch.equal(compress_raw(pool[:, 0], slots), expected[1])
