"""Draws: uniform random numbers that are a function of (request seed, output position) alone.

Philox4x32-10, a counter-based generator (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC'11): ten rounds of multiplying and mixing turn a counter into a random number, so
there is no state to keep, to copy or to lose.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)

Words = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Draws in [0, 1), float64 [n], with 53 random bits each. Seeds count modulo 2**64."""
    key = np.array([seed & (2**64 - 1) for seed in seeds], dtype=np.uint64)
    counter = np.array(positions, dtype=np.uint64)
    zero = np.zeros_like(counter)
    words = philox((counter & _LOW, counter >> _HALF, zero, zero), (key & _LOW, key >> _HALF))
    return ((words[0] >> np.uint64(5)) * 2.0**26 + (words[1] >> np.uint64(6))) / 2.0**53


def philox(counter: Words, key: tuple[np.ndarray, np.ndarray]) -> Words:
    """Four random 32-bit words for each counter and key of 32-bit words, uint64 [n] all of them."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        low, high = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]  # 64-bit products
        x0, x1, x2, x3 = (
            (high >> _HALF) ^ x1 ^ k0,
            high & _LOW,
            (low >> _HALF) ^ x3 ^ k1,
            low & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return x0, x1, x2, x3
