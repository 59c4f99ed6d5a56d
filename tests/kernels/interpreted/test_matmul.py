"""Matrix and expert kernels against their references: every kind, groups, odd sizes."""

import pytest
import torch

from sluice.kernels import matmul, moe
from sluice.kernels.matmul import BlockScaled


def weight_of(kind, *matrices, out, channels):
    shape = (*matrices, out, channels)
    if kind == "plain":
        return torch.randn(shape)
    if kind == "fp8":
        blocks = (*matrices, -(-out // 128), -(-channels // 128))
        scale = torch.randint(120, 134, blocks, dtype=torch.uint8)
        return BlockScaled(torch.randn(shape).to(torch.float8_e4m3fn), scale)
    codes = torch.randint(0, 256, (*matrices, out, channels // 2), dtype=torch.uint8)
    scale = torch.randint(120, 134, (*matrices, out, channels // 32), dtype=torch.uint8)
    return BlockScaled(codes, scale)


def close(found, expected):
    size = expected.abs().max() if expected.numel() else 1.0
    torch.testing.assert_close(found, expected, atol=1e-5 * float(size), rtol=1e-4)


@pytest.mark.parametrize("kind", ["plain", "fp8", "fp4"])
@pytest.mark.parametrize(
    ("n", "out", "channels"), [(0, 8, 32), (1, 5, 32), (70, 130, 160), (3, 20, 1216)]
)
def test_a_product_equals_the_reference(kind, n, out, channels):
    x, weight = torch.randn(n, channels), weight_of(kind, out=out, channels=channels)
    close(matmul.linear(x, weight), matmul.linear_reference(x, weight))


@pytest.mark.parametrize("kind", ["plain", "fp8", "fp4"])
@pytest.mark.parametrize(
    "counts", [[0, 0, 0], [1, 0, 2], [0, 90, 17], [3, 16, 17]], ids=lambda c: "-".join(map(str, c))
)
def test_a_grouped_product_equals_the_reference(kind, counts):
    x, weight = torch.randn(9, 64), weight_of(kind, 3, out=20, channels=64)
    rows, counts = torch.randint(0, 9, (sum(counts),)), torch.tensor(counts)
    found = matmul.grouped_linear(x, weight, counts, rows)
    close(found, matmul.grouped_linear_reference(x, weight, counts, rows))


@pytest.mark.parametrize("shape", [(0, 128), (3, 300), (2, 5)])
def test_rounded_activations_are_the_references(shape):
    x = torch.randn(shape) * 1000
    found, expected = matmul.quantise(x), matmul.quantise_reference(x)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("shape", [(0, 8), (3, 34), (2, 2 * 1100)])
@pytest.mark.parametrize("weighted", [True, False])
def test_gated_activations_equal_the_reference(shape, weighted):
    gate_up, weights = torch.randn(shape) * 9, torch.rand(shape[0]) if weighted else None
    found = moe.swiglu(gate_up, 10.0, weights)
    torch.testing.assert_close(found, moe.swiglu_reference(gate_up, 10.0, weights))


@pytest.mark.parametrize("num_tokens", [1, 9])
def test_routed_experts_equal_each_token_alone(num_tokens):
    x, w13, w2 = torch.randn(num_tokens, 32), torch.randn(5, 24, 32), torch.randn(5, 32, 12)
    experts = torch.rand(num_tokens, 5).topk(2).indices
    weights = torch.rand(num_tokens, 2)
    found = moe.routed_experts(x, experts, weights, w13, w2, 10.0)
    for token in range(num_tokens):
        gate_up = w13[experts[token]] @ x[token]
        hidden = moe.swiglu_reference(gate_up, 10.0, weights[token])
        expected = torch.bmm(w2[experts[token]], hidden.unsqueeze(2)).sum((0, 2))
        torch.testing.assert_close(found[token], expected, atol=1e-3, rtol=1e-4)
