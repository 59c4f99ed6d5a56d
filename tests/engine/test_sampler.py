"""Sampling: counter-based, batch-independent, and within the filters."""

import pytest
import torch

from sluice.engine.sampler import sample
from sluice.protocol.messages import SamplingParams


def params(**changes):
    return SamplingParams(max_tokens=1, **changes)


def logits(rows, vocab=50, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def test_greedy_takes_the_lowest_of_equal_logits():
    row = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    assert sample(row, [params(temperature=0)], [0]) == [1]


def test_a_draw_depends_on_seed_and_position_only():
    batch = logits(4)
    chosen = [params(seed=s) for s in (1, 2, 3, 4)]
    together = sample(batch, chosen, [7, 8, 9, 10])
    alone = [sample(batch[i : i + 1], [chosen[i]], [7 + i])[0] for i in range(4)]
    assert together == alone


def test_greedy_and_random_requests_share_a_batch():
    batch = logits(2)
    [first, _] = sample(batch, [params(temperature=0), params()], [0, 0])
    assert first == batch[0].argmax().item()


def test_top_k_of_one_is_greedy():
    batch = logits(1)
    assert sample(batch, [params(top_k=1)], [3]) == [batch.argmax().item()]


def test_a_tiny_temperature_does_not_overflow():
    batch = logits(1) * 100
    assert sample(batch, [params(temperature=1e-5)], [3]) == [batch.argmax().item()]


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    row = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    drawn = {sample(row, [params(top_p=0.79, seed=s)], [0])[0] for s in range(200)}
    assert drawn == {0, 1}


def test_frequencies_follow_the_probabilities():
    probs = torch.tensor([0.6, 0.3, 0.1])
    drawn = [sample(probs.log()[None], [params(seed=11)], [i])[0] for i in range(3000)]
    counts = torch.bincount(torch.tensor(drawn), minlength=3) / 3000
    assert torch.allclose(counts, probs, atol=0.03)


def test_without_top_k_and_top_p_the_draw_is_over_all_tokens_alike():
    batch = logits(1)
    nearly_all = params(top_p=1 - 1e-12)
    for draw in (params(), nearly_all):
        counts = torch.bincount(
            torch.tensor([sample(batch, [draw], [i])[0] for i in range(2000)]), minlength=50
        )
        assert torch.allclose(counts / 2000, batch[0].softmax(-1), atol=0.03)


def test_min_p_drops_what_is_unlikely_beside_the_likeliest():
    row = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    drawn = {sample(row, [params(min_p=0.4, seed=s)], [0])[0] for s in range(200)}
    assert drawn == {0, 1}


def test_what_a_mask_forbids_is_never_drawn():
    row = torch.tensor([[0.0, -torch.inf, 0.0, -torch.inf]])
    assert {sample(row, [params(seed=s)], [0])[0] for s in range(200)} == {0, 2}


@pytest.mark.parametrize("more", [{}, {"top_k": 2}], ids=str)
def test_a_weight_equal_to_min_p_stays(more):
    row = torch.tensor([[1.0, 0.0, 1.0]])
    assert {sample(row, [params(min_p=1, seed=s, **more)], [0])[0] for s in range(50)} == {0, 2}
    halves = torch.tensor([[0.0, 0.0, -1e9]])
    halves[0, 1] = torch.tensor(0.5).log()
    edge = halves[0, 1].double().exp().item()  # the very weight that the sampler computes
    drawn = {sample(halves, [params(min_p=edge, seed=s, **more)], [0])[0] for s in range(50)}
    assert drawn == {0, 1}


def test_a_row_without_a_finite_best_has_no_token():
    rows = torch.zeros(4, 5)
    rows[0, 3], rows[1, 2], rows[2] = torch.nan, torch.inf, -torch.inf
    assert sample(rows, [params(temperature=0)] * 4, [0] * 4) == [None, None, None, 0]
    assert sample(rows, [params(seed=1)] * 4, [0] * 4)[:3] == [None] * 3
    assert sample(rows, [params(seed=1, top_k=2)] * 4, [0] * 4)[:3] == [None] * 3
