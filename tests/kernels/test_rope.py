"""Rotation of interleaved pairs, its inverse, and YaRN's frequencies at the real dimensions."""

import pytest
import torch

from sluice.kernels.rope import (
    inverse_frequencies,
    rotate_,
    rotations,
    yarn_inverse_frequencies,
)


def test_rotation_turns_pairs_at_the_end():
    frequencies = inverse_frequencies(10_000.0, 4)
    x = torch.randn(3, 2, 10)
    angle = torch.tensor([0.0, 7.0, 500.0]).view(3, 1, 1) * frequencies
    even, odd = x[..., 6::2], x[..., 7::2]
    expected = torch.stack(
        [even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()], dim=-1
    ).flatten(-2)
    rotation = rotations(torch.tensor([0, 7, 500]), frequencies)
    rotated = rotate_(x.clone(), rotation)
    torch.testing.assert_close(rotated[..., 6:], expected)
    assert torch.equal(rotated[..., :6], x[..., :6])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_conjugate_undoes_a_rotation(dtype):
    x = torch.randn(4, 3, 16).to(dtype)
    rotation = rotations(torch.arange(4) * 1000, inverse_frequencies(160_000.0, 8))
    back = rotate_(rotate_(x.clone(), rotation), rotation.conj())
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(back, x, atol=tolerance, rtol=0)


def test_yarn_equals_transformers_at_the_real_dimensions():
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

    yarn = {"factor": 16, "original_max_position_embeddings": 65536, "rope_type": "yarn"}
    config = DeepseekV4Config(num_hidden_layers=1, rope_parameters=yarn)
    expected = DeepseekV4RotaryEmbedding(config)
    compressed = yarn_inverse_frequencies(
        160_000.0, 64, factor=16, original_max_tokens=65536, beta_fast=32, beta_slow=1
    )
    torch.testing.assert_close(compressed, expected.compress_inv_freq, rtol=1e-6, atol=0)
    sliding = inverse_frequencies(10_000.0, 64)
    torch.testing.assert_close(sliding, expected.main_inv_freq, rtol=1e-6, atol=0)
