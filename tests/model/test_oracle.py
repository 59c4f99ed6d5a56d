"""Logits over pool pages equal transformers' full forward, whatever the chunking and the batch."""

import dataclasses
import random

import pytest
import torch

from sluice.model.make_checkpoint import TINY
from sluice.model.v4.config import LayerType, MlpType, YarnConfig

TOLERANCE = 1e-4


def random_config(rng):
    """A small model with all layer types, both kinds of MLP and an HCA ratio of 16 or 128."""
    layer_types = [*LayerType, *rng.choices(list(LayerType), k=rng.randint(0, 2))]
    rng.shuffle(layer_types)
    num_hash = rng.randint(1, len(layer_types) - 1)
    return dataclasses.replace(
        TINY,
        vocab_size=rng.choice([300, 512]),
        hidden_size=rng.choice([32, 64]),
        num_heads=rng.choice([2, 4]),
        head_dim=rng.choice([16, 32]),
        rope_dim=rng.choice([4, 8]),
        index_head_dim=rng.choice([8, 24]),
        index_num_heads=rng.choice([16, 20]),
        index_topk=rng.choice([1, 3, 8, 100]),
        sliding_window=rng.choice([2, 3, 8, 13, 32]),
        layer_types=tuple(layer_types),
        hca_ratio=rng.choice([16, 128]),
        mlp_types=(MlpType.HASH,) * num_hash + (MlpType.TOPK,) * (len(layer_types) - num_hash),
        num_experts=rng.choice([4, 7]),
        num_experts_per_token=rng.choice([1, 2, 3]),
        o_groups=rng.choice([1, 2]),
        hc_mult=rng.choice([2, 4]),
        hc_sinkhorn_iters=rng.choice([1, 5, 20]),
        swiglu_limit=rng.choice([0.5, 10.0]),
        routed_scale=rng.choice([1.0, 2.5]),
        compress_yarn=rng.choice([None, YarnConfig(factor=4.0, original_max_tokens=64)]),
    )


def random_chunks(rng, total):
    sizes = []
    while total:
        sizes.append(min(total, rng.choice([1, 2, 3, 5, 7, 13, 16, 31, 64, 129])))
        total -= sizes[-1]
    return sizes


@pytest.mark.parametrize("seed", range(24))
def test_logits_equal_the_oracle_at_any_chunking(seed, oracle, driver, relayout):
    print(f"seed {seed}")
    rng = random.Random(seed)
    config = random_config(rng)
    model, full_forward = oracle(config, seed)
    num_tokens = config.hca_ratio * 2 + rng.randint(1, 45)
    ids = [rng.randrange(config.vocab_size) for _ in range(num_tokens)]
    expected = full_forward(ids)
    num_single = min(num_tokens - 1, 30)
    chunkings = {
        "one shot": [num_tokens],
        "odd": random_chunks(rng, num_tokens),
        "prefill, then one by one": [num_tokens - num_single, *[1] * num_single],
    }
    for name, sizes in chunkings.items():
        run = driver(model, specs=relayout(model.specs, rng), seed=seed)
        error = (run.run("r", ids, sizes) - expected).abs().max().item()
        assert error < TOLERANCE, f"{name} {sizes}: logits differ by {error} for {config}"


@pytest.mark.parametrize("kind", LayerType)
def test_models_without_some_kinds_of_layers_equal_the_oracle(kind, oracle, driver):
    config = dataclasses.replace(TINY, layer_types=(kind,) * 2, mlp_types=TINY.mlp_types[1:3])
    model, full_forward = oracle(config, 9)
    ids = [(i * 37) % TINY.vocab_size for i in range(50)]
    logits = driver(model).run("r", ids, [33, 1, 16])
    torch.testing.assert_close(logits, full_forward(ids), atol=TOLERANCE, rtol=0)


def test_token_by_token_from_nothing_equals_the_oracle(oracle, driver):
    model, full_forward = oracle(TINY, 3)
    ids = [random.Random(3).randrange(TINY.vocab_size) for _ in range(70)]
    logits = driver(model).run("r", ids, [1] * 70)
    torch.testing.assert_close(logits, full_forward(ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("seed", range(4))
def test_ragged_batches_equal_each_request_alone(seed, oracle, driver):
    print(f"seed {seed}")
    rng = random.Random(seed)
    config = random_config(rng)
    model, full_forward = oracle(config, seed)
    prompts = {
        f"r{n}": [rng.randrange(config.vocab_size) for _ in range(rng.randint(1, 170))]
        for n in range(6)
    }
    run = driver(model, num_pages=1200, seed=seed)
    parts = {request: [] for request in prompts}
    left = dict(prompts)
    while left:
        # A third of the requests advance by one token, as in decode; the others by a chunk.
        batch = {
            request: left[request][: 1 if rng.random() < 0.3 else rng.randint(1, 60)]
            for request in rng.sample(list(left), rng.randint(1, len(left)))
        }
        for request, logits in run.step(batch).items():
            parts[request].append(logits)
            left[request] = left[request][len(batch[request]) :]
        left = {request: ids for request, ids in left.items() if ids}
    for request, ids in prompts.items():
        error = (torch.cat(parts[request]) - full_forward(ids)).abs().max().item()
        assert error < TOLERANCE, f"{request} ({len(ids)} tokens): logits differ by {error}"


def test_padded_lists_give_the_same_as_exact_ones(oracle, driver, monkeypatch):
    """As on a device where no shape may depend on data."""
    monkeypatch.setattr("sluice.model.v4.placement.EXACT_ON", ())
    model, full_forward = oracle(TINY, 11)
    first, second = list(range(60)), list(range(300, 345))
    run = driver(model)
    parts = [
        run.step({"a": first[:31]}),
        run.step({"a": first[31:32], "b": second[:1]}),
        run.step({"b": second[1:16], "a": first[32:]}),
        run.step({"b": second[16:]}),
    ]
    for request, ids in (("a", first), ("b", second)):
        logits = torch.cat([part[request] for part in parts if request in part])
        torch.testing.assert_close(logits, full_forward(ids), atol=TOLERANCE, rtol=0)


def test_last_token_logits_are_those_of_all_tokens(oracle, driver):
    model, _ = oracle(TINY, 1)
    batch = {"a": [5, 6, 7], "b": [8], "c": [9, 10]}
    every = driver(model).step(batch)
    last = driver(model).step(batch, all_logits=False)
    for request in batch:
        torch.testing.assert_close(last[request][0], every[request][-1])


def test_pages_of_a_finished_request_serve_the_next_one(oracle, driver):
    model, full_forward = oracle(TINY, 5)
    run = driver(model, num_pages=14)
    for first in range(5):  # 14 pages of each table are less than two requests need
        ids = [(first * 31 + i * 7) % TINY.vocab_size for i in range(60 + first)]
        logits = run.run("r", ids, [29, 1, 1, 29 + first])
        torch.testing.assert_close(logits, full_forward(ids), atol=TOLERANCE, rtol=0)
        run.release("r")


def test_every_pool_matters(oracle, driver):
    """Zeroing any one pool after prefill changes what comes next."""
    model, _ = oracle(TINY, 7)
    ids = [(i * 37) % TINY.vocab_size for i in range(62)]
    follow = [11, 12, 13, 14, 15, 16]

    def continued(zeroed=None):
        run = driver(model, seed=1)
        run.run("r", ids, [len(ids)])
        if zeroed is not None:
            run.pools[zeroed].tensor.zero_()
        return run.run("r", follow, [1] * len(follow))

    expected = continued()
    for spec in model.specs:
        assert (continued(spec.name) - expected).abs().max() > 1e-3, f"{spec.name} is not read"
