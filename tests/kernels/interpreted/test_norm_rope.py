"""Norm and rotation kernels against their references, on odd sizes and strided inputs."""

import pytest
import torch

from sluice.kernels import norm, rope


def turns(num_tokens, rope_dim):
    return rope.rotations(torch.arange(num_tokens) * 7, rope.inverse_frequencies(1e4, rope_dim))


@pytest.mark.parametrize("shape", [(0, 8), (3, 1), (5, 33), (2, 3, 1500)])
@pytest.mark.parametrize("weighted", [True, False])
def test_norm_equals_the_reference(shape, weighted):
    x, weight = torch.randn(shape) * 5, torch.randn(shape[-1]) if weighted else None
    expected = norm.rms_norm_reference(x, weight, 1e-6)
    torch.testing.assert_close(norm.rms_norm(x, weight, 1e-6), expected)


@pytest.mark.parametrize(("shape", "rope_dim"), [((0, 4, 8), 4), ((5, 3, 20), 6), ((4, 16), 16)])
@pytest.mark.parametrize("inverse", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_norm_and_rotation_equal_the_reference(shape, rope_dim, inverse, weighted):
    x, weight = torch.randn(shape), torch.randn(shape[-1]) if weighted else None
    rotation = turns(shape[0], rope_dim)
    rotation = rotation.conj() if inverse else rotation
    expected = norm.norm_and_rotate_reference(x, weight, 1e-6, rotation)
    torch.testing.assert_close(norm.norm_and_rotate(x, weight, 1e-6, rotation), expected)


def test_rows_of_a_wider_tensor_are_normed():
    x = torch.randn(6, 40)[:, 8:24]
    expected = norm.rms_norm_reference(x, None, 1e-6)
    torch.testing.assert_close(norm.rms_norm(x, None, 1e-6), expected)


@pytest.mark.parametrize("shape", [(0, 4, 8), (5, 3, 20), (4, 12)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_in_place_equals_the_reference_and_its_inverse_undoes_it(shape, dtype):
    """The interpreter cuts bf16 off where a device rounds it."""
    x, rotation = torch.randn(shape).to(dtype), turns(shape[0], 6)
    found, expected = x.clone(), rope.rotate_reference_(x.clone(), rotation)
    tolerance = {"atol": 1e-6, "rtol": 1e-6 if dtype == torch.float32 else 2**-7}
    torch.testing.assert_close(rope.rotate_(found, rotation), expected, **tolerance)
    if dtype == torch.float32:
        torch.testing.assert_close(rope.rotate_(found, rotation.conj()), x)


def test_only_the_given_heads_turn():
    wide = torch.randn(5, 7, 12)
    expected, rotation = wide.clone(), turns(5, 12)
    rope.rotate_(wide[:, 2:5], rotation)
    expected[:, 2:5] = rope.rotate_reference_(expected[:, 2:5].clone(), rotation)
    torch.testing.assert_close(wide, expected)
