"""Block-scaled products against their definition in float64, value by value."""

import pytest
import torch

from sluice.kernels.matmul import BlockScaled, grouped_linear, linear, quantise

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]).double()


def fp8_weight(*matrices, out, channels):
    codes = torch.randn(*matrices, out, channels).to(torch.float8_e4m3fn)
    blocks = (-(-out // 128), -(-channels // 128))
    return BlockScaled(codes, torch.randint(120, 134, (*matrices, *blocks), dtype=torch.uint8))


def fp4_weight(*matrices, out, channels):
    codes = torch.randint(0, 256, (*matrices, out, channels // 2), dtype=torch.uint8)
    scale = torch.randint(120, 134, (*matrices, out, channels // 32), dtype=torch.uint8)
    return BlockScaled(codes, scale)


def fp8_definition(weight):
    result = weight.codes.double().clone()
    for i in range(result.shape[0]):
        for j in range(result.shape[1]):
            result[i, j] *= 2.0 ** (int(weight.scale[i // 128, j // 128]) - 127)
    return result


def fp4_definition(weight):
    out, half = weight.codes.shape
    result = torch.empty(out, 2 * half, dtype=torch.float64)
    for i in range(out):
        for j in range(2 * half):
            code = int(weight.codes[i, j // 2]) >> (4 if j % 2 else 0) & 15
            result[i, j] = E2M1[code] * 2.0 ** (int(weight.scale[i, j // 32]) - 127)
    return result


def rounded(x):
    """Activations rounded to e4m3, 128 at a time."""
    codes, scale = quantise(x)
    values = codes.view(torch.float8_e4m3fn).double()
    return values * scale.double().repeat_interleave(128, 1)[:, : x.shape[1]]


@pytest.mark.parametrize("n", [0, 1, 5])
@pytest.mark.parametrize(
    ("weight", "definition"),
    [
        (lambda: fp8_weight(out=130, channels=200), fp8_definition),
        (lambda: fp4_weight(out=33, channels=160), fp4_definition),
    ],
    ids=["fp8", "fp4"],
)
def test_block_scaled_products_are_the_definitions(n, weight, definition):
    weight = weight()
    expected_weight = definition(weight)
    x = torch.randn(n, expected_weight.shape[1])
    expected = rounded(x) @ expected_weight.T
    torch.testing.assert_close(linear(x, weight).double(), expected, atol=1e-3, rtol=1e-5)


def test_activations_are_rounded_by_a_power_of_two_for_every_128():
    x = torch.randn(3, 300) * 100
    codes, scale = quantise(x)
    assert scale.shape == (3, 3) and codes.dtype == torch.uint8
    assert torch.equal(torch.frexp(scale).mantissa, torch.full((3, 3), 0.5))
    largest = codes.view(torch.float8_e4m3fn).float().abs()[:, :256].unflatten(1, (2, 128)).amax(2)
    assert ((largest > 223) & (largest <= 448)).all(), "the smallest scale that has room"
    assert ((rounded(x) - x).abs() <= x.abs() / 16 + 1e-3).all()


@pytest.mark.parametrize("make", [fp8_weight, fp4_weight])
def test_a_grouped_product_is_each_groups_own(make):
    weight, x = make(4, out=20, channels=64), torch.randn(6, 64)
    counts, rows = torch.tensor([2, 0, 4, 1]), torch.tensor([5, 0, 1, 1, 2, 3, 4])
    found = grouped_linear(x, weight, counts, rows)
    for i, matrix in enumerate([0, 0, 2, 2, 2, 2, 3]):
        expected = linear(x[rows[i : i + 1]], weight[matrix])
        torch.testing.assert_close(found[i : i + 1], expected)
