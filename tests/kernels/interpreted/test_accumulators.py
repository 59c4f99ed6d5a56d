"""The accumulating kernel against its reference: ragged batches, begun and padding blocks."""

import pytest
import torch

from sluice.kernels.accumulators import accumulate_blocks, accumulate_blocks_reference


@pytest.mark.parametrize("counts", [[1], [3, 1, 20, 8], [1, 1, 1, 1, 1]])
@pytest.mark.parametrize("dim", [5, 200])
def test_accumulators_equal_the_references(counts, dim):
    """A part of wider tensors, scores beyond exp's range, and padding blocks at the end."""
    num_tokens = sum(counts)
    tokens = torch.stack([torch.randn(num_tokens, dim), 60 * torch.randn(num_tokens, dim)], 1)
    kv, score = tokens.unbind(1)
    slots = torch.cat([torch.randperm(len(counts)) + 2, torch.tensor([-1, -1])])
    slots[0] = -1
    block_of_token = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    pool = torch.randn(11, 3, 2, 3, dim)
    pool[0] = torch.nan
    given = pool[:, 1], slots, block_of_token, kv, score
    expected = accumulate_blocks_reference(*given)
    torch.testing.assert_close(accumulate_blocks(*given), expected)


def test_no_blocks_give_no_accumulators():
    none, nothing = torch.zeros(0, dtype=torch.int64), torch.zeros(0, 5)
    rows = torch.randn(2, 2, 3, 5)
    assert accumulate_blocks(rows, none, none, nothing, nothing).shape == (0, 3, 5)
