"""Draws: the published generator, and numbers that are uniform."""

import numpy as np
import pytest

from sluice.engine.draws import philox, uniform


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (0x00000000, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (0xFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
)
def test_the_generator_gives_its_authors_known_answers(word, expected):
    """Of Random123's kat_vectors, philox4x32 with ten rounds."""
    same = np.array([word], dtype=np.uint64)
    words = philox((same, same, same, same), (same, same))
    assert tuple(int(w[0]) for w in words) == expected


def test_draws_are_uniform():
    draws = uniform([5] * 20_000, range(20_000))
    assert draws.min() >= 0 and draws.max() < 1
    counts, _ = np.histogram(draws, bins=10, range=(0, 1))
    assert abs(counts - 2000).max() < 200


def test_a_draw_is_a_function_of_seed_and_position():
    [together, other_seed, other_position] = uniform([5, 6, 5], [3, 3, 4])
    assert uniform([5], [3])[0] == together
    assert len({together, other_seed, other_position}) == 3


def test_seeds_beyond_32_bits_and_negative_ones_differ():
    draws = uniform([1, 1 + 2**32, 1 + 2**63, -1], [0, 0, 0, 0])
    assert len(set(draws)) == 4
