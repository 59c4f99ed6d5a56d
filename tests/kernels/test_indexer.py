"""Index scores against their definition."""

import pytest
import torch

from sluice.kernels.indexer import index_scores


@pytest.mark.parametrize("lengths", [[1, 1, 1], [4, 1, 7]])
def test_scores_equal_their_definition(lengths, monkeypatch):
    monkeypatch.setattr("sluice.kernels.indexer.MAX_SCORE_ELEMENTS", 40)
    pool = torch.randn(9, 2, 4, 6)
    slots = torch.randperm(32)[:15].reshape(3, 5) + 4
    queries, weights = torch.randn(sum(lengths), 8, 6), torch.randn(sum(lengths), 8)
    query_start = torch.tensor([0, *lengths]).cumsum(0)
    scores = index_scores(queries, weights, pool[:, 1], slots, query_start)
    request = torch.arange(3).repeat_interleave(torch.tensor(lengths))
    for token in range(sum(lengths)):
        for row, slot in enumerate(slots[request[token]].tolist()):
            products = (queries[token] @ pool[slot // 4, 1, slot % 4]).relu()
            expected = (products * weights[token]).sum()
            torch.testing.assert_close(scores[token, row], expected, atol=1e-5, rtol=1e-5)
