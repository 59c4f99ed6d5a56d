"""Experts, hyper-connections and norms against their definitions."""

import pytest
import torch
import torch.nn.functional as F

from sluice.kernels.hyper_connections import collapse_head, mix_in, mix_out
from sluice.kernels.moe import mlp, route, routed_experts, router_scores, swiglu
from sluice.kernels.norm import rms_norm


@pytest.mark.parametrize("num_tokens", [1, 9])
def test_routed_experts_equal_each_token_alone(num_tokens):
    x, w13, w2 = torch.randn(num_tokens, 6), torch.randn(5, 8, 6), torch.randn(5, 6, 4)
    scores = router_scores(x, torch.randn(5, 6))
    experts = scores.topk(2).indices
    weights = route(scores, experts, 1.5)
    result = routed_experts(x, experts, weights, w13, w2, 1.0)
    torch.testing.assert_close(weights.sum(1), torch.full((num_tokens,), 1.5))
    for token in range(num_tokens):
        expected = sum(
            weight * mlp(x[token : token + 1], w13[expert], w2[expert], 1.0)[0]
            for expert, weight in zip(experts[token], weights[token], strict=True)
        )
        torch.testing.assert_close(result[token], expected, atol=1e-4, rtol=1e-4)


def test_swiglu_clamps_both_halves():
    gate_up = torch.tensor([[-30.0, 30.0, -30.0, 30.0]])
    silu = F.silu(torch.tensor([-30.0, 10.0]))
    torch.testing.assert_close(swiglu(gate_up, 10.0)[0], silu * torch.tensor([-10.0, 10.0]))


def test_comb_is_doubly_stochastic_and_used_by_its_first_index():
    n, hidden = 4, 6
    streams = torch.randn(3, n, hidden)
    fn = torch.randn(n * (2 + n), n * hidden)
    scale, base = 0.5 * torch.rand(n * (2 + n)), torch.zeros(n * (2 + n))  # converges fast
    kwargs = dict(sinkhorn_iters=20, eps=1e-6, norm_eps=1e-6)
    _, post, comb = mix_in(streams, fn, scale, base, **kwargs)
    torch.testing.assert_close(comb.sum(1), torch.ones(3, n), atol=1e-2, rtol=0)
    torch.testing.assert_close(comb.sum(2), torch.ones(3, n), atol=1e-2, rtol=0)
    output = torch.randn(3, hidden)
    expected = torch.einsum("tjk,tjh->tkh", comb, streams) + post[:, :, None] * output[:, None]
    torch.testing.assert_close(mix_out(output, streams, post, comb), expected)


def test_the_head_weighs_streams_by_their_sigmoid():
    streams, fn = torch.randn(3, 2, 5), torch.randn(2, 10)
    base, scale = torch.randn(2), torch.tensor([0.7])
    normed = rms_norm(streams.flatten(1), None, 1e-6)
    weights = torch.sigmoid(normed @ fn.T * 0.7 + base) + 1e-6
    expected = (weights.unsqueeze(2) * streams).sum(1)
    result = collapse_head(streams, fn, scale, base, eps=1e-6, norm_eps=1e-6)
    torch.testing.assert_close(result, expected)


def test_norm_keeps_the_dtype_and_computes_in_fp32():
    x = torch.randn(4, 16).bfloat16() * 100
    weight = torch.randn(16)
    expected = x.float() / x.float().square().mean(1, keepdim=True).sqrt() * weight
    result = rms_norm(x, weight, 1e-6)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, expected.bfloat16()) or (result - expected).abs().max() < 0.05
