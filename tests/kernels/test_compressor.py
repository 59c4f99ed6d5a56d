"""Both compressors against the softmax over a block that defines them."""

import torch

from sluice.kernels import compressor
from sluice.kernels.compressor import (
    accumulate_blocks,
    close_blocks,
    compress_overlapping,
    compress_raw,
)


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


def test_accumulators_do_not_depend_on_how_a_block_arrives():
    """One block of 16 tokens and half of the next, in chunks; scores reach beyond exp's range."""
    dim, num_tokens = 5, 24
    kv, score = torch.randn(num_tokens, dim), 60 * torch.randn(num_tokens, dim)
    expected = (kv[:16] * score[:16].softmax(0)).sum(0)
    for chunks in ([24], [1] * 24, [15, 9], [16, 8], [7, 9, 8], [3, 20, 1]):
        pool = torch.full((3, 1, 1, 3, dim), torch.nan)  # page b + 1 is block b's row
        start, closed = 0, None
        for size in chunks:
            end = start + size
            blocks = torch.arange(start // 16, (end - 1) // 16 + 1)
            earlier = torch.where(blocks * 16 < start, blocks + 1, -1)
            block_of_token = torch.arange(start, end) // 16 - start // 16
            part = slice(start, end)
            new = accumulate_blocks(pool[:, 0], earlier, block_of_token, kv[part], score[part])
            pool[blocks + 1, 0, 0] = new
            if start < 16 <= end:
                closed = close_blocks(new)[0]
            start = end
        torch.testing.assert_close(closed, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(
            close_blocks(pool[2:, 0, 0])[0], (kv[16:] * score[16:].softmax(0)).sum(0)
        )


def test_padding_blocks_stay_finite():
    rows = torch.full((2, 1, 1, 3, 4), torch.nan)[:, 0]
    kv = torch.randn(2, 4)
    blocks = accumulate_blocks(rows, torch.tensor([-1, -1]), torch.tensor([0, 0]), kv, kv)
    assert blocks.isfinite().all() and close_blocks(blocks).isfinite().all()
