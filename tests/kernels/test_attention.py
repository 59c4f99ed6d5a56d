"""Sparse attention against its definition."""

import pytest
import torch

from sluice.kernels.attention import sparse_attention


def unturned(num_tokens):
    """The rotation of position 0."""
    return torch.ones(num_tokens, 2, dtype=torch.complex64)


def slow_attention(query, rows, sinks, scale):
    """One query [heads, dim] over its rows [n, dim]."""
    weights = torch.exp(query @ rows.T * scale)
    return weights @ rows / (weights.sum(1) + sinks.exp()).unsqueeze(1)


@pytest.mark.parametrize("max_elements", [1 << 22, 100])
def test_attention_equals_its_definition(max_elements, monkeypatch):
    monkeypatch.setattr("sluice.kernels.attention.MAX_GATHERED_ELEMENTS", max_elements)
    pools = [torch.randn(6, 2, 4, 8), torch.randn(3, 1, 8, 8)]
    for pool in pools:
        pool[0] = torch.nan
    slots = [torch.randint(4, 24, (11, 5)), torch.randint(8, 24, (11, 3))]
    slots[0][torch.rand(11, 5) < 0.4] = -1
    slots[1][torch.rand(11, 3) < 0.4] = -1
    slots[0][:, -1] = 7  # at least one row each
    queries, sinks = torch.randn(11, 3, 8), torch.randn(3)
    sources = [(pool[:, 0], slot) for pool, slot in zip(pools, slots, strict=True)]
    result = sparse_attention(queries, sources, sinks, 0.5, unturned(11))
    for token in range(11):
        rows = [
            pool[slot // pool.shape[2], 0, slot % pool.shape[2]]
            for pool, listed in zip(pools, slots, strict=True)
            for slot in listed[token].tolist()
            if slot >= 0
        ]
        expected = slow_attention(queries[token], torch.stack(rows), sinks, 0.5)
        torch.testing.assert_close(result[token], expected, atol=1e-5, rtol=1e-5)


def test_a_source_without_rows_adds_nothing():
    pool = torch.randn(3, 1, 4, 8)
    queries, sinks = torch.randn(2, 3, 8), torch.zeros(3)
    window = (pool[:, 0], torch.tensor([[4, 5], [6, -1]]))
    none = (pool[:, 0], torch.zeros(2, 0, dtype=torch.int64))
    with_none = sparse_attention(queries, [window, none], sinks, 1.0, unturned(2))
    torch.testing.assert_close(
        with_none, sparse_attention(queries, [window], sinks, 1.0, unturned(2))
    )


def test_large_scores_do_not_overflow():
    pool = 100 * torch.randn(2, 1, 4, 8)
    queries = 100 * torch.randn(1, 3, 8)
    slots = torch.tensor([[4, 5, 6]])
    result = sparse_attention(queries, [(pool[:, 0], slots)], torch.zeros(3), 1.0, unturned(1))
    assert result.isfinite().all()


def test_the_outputs_rotation_is_undone():
    pool, slots = torch.randn(2, 1, 4, 8), torch.tensor([[4, 5], [6, 7]])
    queries, sources, sinks = torch.randn(2, 3, 8), [(pool[:, 0], slots)], torch.zeros(3)
    turn = torch.polar(torch.ones(2, 2), torch.randn(2, 2))
    result = sparse_attention(queries, sources, sinks, 0.5, turn)
    turned = torch.view_as_complex(result[..., 4:].unflatten(-1, (2, 2))) * turn.unsqueeze(1)
    expected = sparse_attention(queries, sources, sinks, 0.5, unturned(2))
    torch.testing.assert_close(torch.view_as_real(turned).flatten(-2), expected[..., 4:])
