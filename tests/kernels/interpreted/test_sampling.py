"""The drawing kernel falls on the token that sorting finds, ties and all."""

import pytest
import torch

from sluice.kernels import sampling


def options(num_requests, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, vocab):
    numbers = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
    columns = {
        name: torch.full((num_requests,), value, dtype=torch.float64)
        for name, value in numbers.items()
    }
    return columns | {"top_k": torch.full((num_requests,), top_k or vocab)}


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.7, "top_p": 0.6},
        {"min_p": 0.2},
        {"top_k": 7, "top_p": 0.5, "min_p": 0.05},
        {"top_k": 1},
        {"top_p": 0.0},
        {"temperature": 1e-6},
    ],
    ids=str,
)
@pytest.mark.parametrize("step", [0.001, 0.5])  # logits a multiple of it: the coarse ones tie
def test_draws_fall_where_sorting_says(chosen, step):
    logits = (torch.randn(6, 67) * 3 / step).round() * step
    logits[3, 10:40], logits[4] = -torch.inf, 1.5  # forbidden tokens; all equal
    draws = torch.rand(6, dtype=torch.float64)
    draws[0], draws[1] = 0.0, 1 - 2**-53
    chosen = options(6, vocab=67, **chosen)
    found = sampling.draw_tokens(logits, draws, **chosen)
    assert torch.equal(found, sampling.draw_tokens_reference(logits, draws, **chosen))


def test_a_vocabulary_of_several_blocks_and_one_of_a_single_token():
    for vocab in (5000, 1):
        logits, draws = torch.randn(2, vocab), torch.rand(2, dtype=torch.float64)
        chosen = options(2, vocab=vocab, top_k=min(vocab, 4500), top_p=0.9)
        found = sampling.draw_tokens(logits, draws, **chosen)
        assert torch.equal(found, sampling.draw_tokens_reference(logits, draws, **chosen))


def test_no_requests_are_fine():
    empty = torch.zeros(0, dtype=torch.float64)
    found = sampling.draw_tokens(torch.zeros(0, 9), empty, **options(0, vocab=9))
    assert found.shape == (0,)
