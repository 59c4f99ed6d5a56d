"""The Hadamard rotation against its matrix."""

import pytest
import torch

from sluice.kernels.hadamard import rotate_channels


def sylvester(dim):
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < dim:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


@pytest.mark.parametrize("dim", [1, 8, 128])
def test_rotation_is_the_product_with_sylvesters_matrix(dim):
    x = torch.randn(3, 2, dim)
    expected = x.double() @ sylvester(dim) / dim**0.5
    torch.testing.assert_close(rotate_channels(x).double(), expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(rotate_channels(rotate_channels(x)), x, atol=1e-6, rtol=1e-6)


def test_other_sizes_are_refused():
    with pytest.raises(AssertionError, match="12 channels"):
        rotate_channels(torch.zeros(1, 12))
