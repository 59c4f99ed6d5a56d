"""The rotating kernel adds in the reference's order, to the bit."""

import pytest
import torch

from sluice.kernels import hadamard


@pytest.mark.parametrize("shape", [(0, 8), (5, 1), (2, 3, 64), (1, 128)])
def test_rotated_channels_are_the_references(shape):
    x = torch.randn(shape)
    assert torch.equal(hadamard.rotate_channels(x), hadamard.rotate_channels_reference(x))
