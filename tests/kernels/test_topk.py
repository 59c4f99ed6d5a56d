"""Causal top-k against its definition; ties at the cut go to the lowest rows."""

import pytest
import torch

from sluice.kernels.topk import causal_topk


def slow_topk(scores, num_visible, k):
    """The definition: best first, lowest row first among equals; listed in ascending order."""
    result = torch.full((scores.shape[0], min(k, scores.shape[1])), -1)
    for token, visible in enumerate(num_visible.tolist()):
        rows = sorted(range(visible), key=lambda row: (-scores[token, row].item(), row))[:k]
        result[token, : len(rows)] = torch.tensor(sorted(rows), dtype=torch.int64)
    return result


@pytest.mark.parametrize("k", [1, 3, 16, 17, 40])
def test_topk_equals_its_definition_with_many_ties(k):
    generator = torch.Generator().manual_seed(k)
    scores = torch.randint(0, 4, (50, 17), generator=generator).float()
    num_visible = torch.randint(0, 18, (50,), generator=generator)
    assert torch.equal(causal_topk(scores, num_visible, k), slow_topk(scores, num_visible, k))


def test_planted_ties_go_to_the_lowest_rows():
    scores = torch.tensor([[1.0, 7.0, 3.0, 3.0, 3.0, 9.0, 3.0]])
    assert causal_topk(scores, torch.tensor([7]), 4).tolist() == [[1, 2, 3, 5]]
    zeros = torch.zeros(1, 9)
    assert causal_topk(zeros, torch.tensor([9]), 3).tolist() == [[0, 1, 2]]


def test_a_choice_does_not_depend_on_rows_not_yet_visible():
    scores = torch.tensor([[2.0, 2.0, 2.0, 1.0]])
    more = torch.cat([scores, torch.tensor([[torch.nan, 9.0, 2.0]])], dim=1)
    visible = torch.tensor([4])
    assert torch.equal(causal_topk(scores, visible, 2), causal_topk(more, visible, 2))


def test_scores_of_no_rows_choose_none():
    assert causal_topk(torch.zeros(3, 0), torch.zeros(3, dtype=torch.int64), 8).shape == (3, 0)
