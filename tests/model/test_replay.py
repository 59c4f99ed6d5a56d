"""Replay: how far back computing must start for window and state that are not at hand."""

import random
import zlib

import pytest
import torch

from sluice.cache.spec import Block, Full, PoolSpec, Window
from sluice.model.make_checkpoint import TINY, make_checkpoint
from sluice.model.registry import load_model
from sluice.model.v4.pools import replay_tokens

UNIT_TOKENS = 32  # of the tiny checkpoint's Full pools


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replay")
    make_checkpoint(folder, config=TINY, seed=3)
    return load_model(folder)


def replayed_logits(driver, model, ids, history_tokens, start, chunk_tokens):
    """Logits of the tokens after the history, when computing begins at `start` without more."""
    whole = driver(model)
    expected = whole.run("whole", ids, [len(ids)])[history_tokens:]
    whole.share_history("replayed", "whole", history_tokens, start)
    sizes = [len(part) for part in torch.arange(start, len(ids)).split(chunk_tokens)]
    logits = whole.run("replayed", ids[start:], sizes)
    return logits[history_tokens - start :], expected


@pytest.mark.parametrize("chunk_tokens", [1, 5, 32, 1000])
@pytest.mark.parametrize("num_units", [2, 3, 8])
def test_from_the_bound_on_nothing_that_is_missing_is_seen(driver, model, num_units, chunk_tokens):
    rng = random.Random(zlib.crc32(f"{num_units} {chunk_tokens}".encode()))
    history = num_units * UNIT_TOKENS
    ids = [rng.randrange(3, 500) for _ in range(history + 40)]
    start = history - model.replay_tokens
    logits, expected = replayed_logits(driver, model, ids, history, start, chunk_tokens)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_one_token_later_what_is_missing_shows(driver, model):
    """Rows that are not at hand are NaN, so a single weight on one of them is seen."""
    rng = random.Random(1)
    history = 4 * UNIT_TOKENS
    ids = [rng.randrange(3, 500) for _ in range(history + 1)]
    start = history - model.replay_tokens + 1
    logits, _ = replayed_logits(driver, model, ids, history, start, 1000)
    assert logits.isnan().any()


def test_the_bound_counts_layers_below_and_what_is_live():
    def pool(layers, retention):
        return PoolSpec("p", layers, (1,), "float32", 1, 8, retention)

    assert replay_tokens([pool((0, 1, 2), Full())], 128) == 0
    assert replay_tokens([pool((0, 1, 2), Window(128))], 128) == 3 * 127
    assert replay_tokens([pool((2,), Block(4, overlap=1))], 128) == 2 * 127 + 4
