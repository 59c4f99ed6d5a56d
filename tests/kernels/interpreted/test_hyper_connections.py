"""Hyper-connection kernels against their references, with counts of streams that fill no block."""

import pytest
import torch

from sluice.kernels import hyper_connections as hc


def parameters(n, hidden, num_outputs):
    fn = torch.randn(num_outputs, n * hidden) * (n * hidden) ** -0.5
    return fn, torch.rand(num_outputs), torch.randn(num_outputs)


@pytest.mark.parametrize("num_tokens", [0, 1, 19])
@pytest.mark.parametrize(("n", "hidden"), [(4, 33), (3, 700), (1, 5)])
def test_mixing_in_and_out_equals_the_reference(num_tokens, n, hidden):
    streams, output = torch.randn(num_tokens, n, hidden), torch.randn(num_tokens, hidden)
    options = dict(sinkhorn_iters=6, eps=1e-6, norm_eps=1e-6)
    weights = parameters(n, hidden, n * (2 + n))
    found = hc.mix_in(streams, *weights, **options)
    expected = hc.mix_in_reference(streams, *weights, **options)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    _, post, comb = expected
    torch.testing.assert_close(
        hc.mix_out(output, streams, post, comb),
        hc.mix_out_reference(output, streams, post, comb),
    )


@pytest.mark.parametrize(("num_tokens", "n"), [(0, 4), (3, 4), (17, 2)])
def test_the_collapsed_head_equals_the_reference(num_tokens, n):
    streams = torch.randn(num_tokens, n, 40)
    fn, scale, base = parameters(n, 40, n)
    options = dict(eps=1e-6, norm_eps=1e-6)
    found = hc.collapse_head(streams, fn, scale[:1], base, **options)
    expected = hc.collapse_head_reference(streams, fn, scale[:1], base, **options)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
