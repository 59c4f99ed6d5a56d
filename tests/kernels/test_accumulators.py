"""Accumulators against the softmax over a block that defines them."""

import torch

from sluice.kernels.accumulators import accumulate_blocks, close_blocks


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
