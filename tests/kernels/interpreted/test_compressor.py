"""The compressing kernel against its references: raw and overlapping blocks, and padding."""

import pytest
import torch

from sluice.kernels import compressor


def state(num_slots, *row_shape):
    """One layer's view of a state pool of two rows a page, NaN in the null page."""
    pool = torch.randn(num_slots // 2 + 1, 3, 2, *row_shape)
    pool[0] = torch.nan
    return pool[:, 1]


@pytest.mark.parametrize("dim", [5, 200])
@pytest.mark.parametrize("ratio", [4, 11])
def test_raw_rows_equal_the_references(dim, ratio):
    """From a part of wider rows, as the native path keeps them."""
    rows = state(60, 3 + 2 * dim)[..., 3:].unflatten(-1, (2, dim))
    slots = torch.stack([*(torch.randperm(58) + 2)[: 3 * ratio].split(ratio)])
    slots[1, ::2], slots[2] = -1, -1
    expected = compressor.compress_raw_reference(rows, slots)
    torch.testing.assert_close(compressor.compress_raw(rows, slots), expected)


@pytest.mark.parametrize("ratio", [4, 11])
def test_overlapping_rows_equal_the_references(ratio):
    rows = state(60, 2, 2 * 9)
    slots = torch.randint(2, 60, (4, 2 * ratio))
    slots[1, :ratio], slots[2] = -1, -1  # the first block of a request; padding
    expected = compressor.compress_overlapping_reference(rows, slots)
    torch.testing.assert_close(compressor.compress_overlapping(rows, slots), expected)


def test_no_blocks_give_no_rows():
    none = torch.zeros(0, 4, dtype=torch.int64)
    assert compressor.compress_raw(state(4, 2, 5), none).shape == (0, 5)
    assert compressor.compress_overlapping(state(4, 2, 10), none).shape == (0, 5)
