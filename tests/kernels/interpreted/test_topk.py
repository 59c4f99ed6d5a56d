"""The choosing kernels against their reference: block borders, ties, rows not yet visible."""

import pytest
import torch

from sluice.kernels.topk import causal_topk, causal_topk_reference


@pytest.mark.parametrize("k", [1, 3, 8, 16])
def test_choices_equal_the_references_with_many_ties(k, monkeypatch):
    monkeypatch.setattr("sluice.kernels.topk.BLOCK_ROWS", 8)
    scores = torch.randint(-2, 3, (10, 29)) * 0.5
    scores[::2] *= -1  # -0 equals 0
    num_visible = torch.tensor([0, 1, 2, 7, 8, 9, 16, 17, 28, 29])
    scores[torch.arange(29) >= num_visible.unsqueeze(1)] = torch.nan  # never looked at
    expected = causal_topk_reference(scores, num_visible, k)
    assert torch.equal(causal_topk(scores, num_visible, k), expected)


def test_no_tokens_choose_nothing():
    none = torch.zeros(0, dtype=torch.int64)
    assert causal_topk(torch.zeros(0, 29), none, 4).shape == (0, 4)
