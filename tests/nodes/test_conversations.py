"""Conversations through the router's dispatch, caches on, give the tokens of one process without.

Two layouts: one node of each role, and two of each; pools so small that everything is evicted.
"""

import asyncio
import random
import time

import pytest

from sluice.benchmarks.in_process import InProcess
from sluice.protocol.messages import GenerateRequest, SamplingParams

SMALL = {"prefix_cache": True, "cache_bytes": 1_300_000}


async def answer(service, prompt, name):
    sampling = SamplingParams(max_tokens=6, temperature=0.0)
    tokens, cached = [], 0
    async for piece in service.generate(
        GenerateRequest(name, tuple(prompt), sampling), time.monotonic() + 60
    ):
        tokens += piece.token_ids
        cached = max(cached, piece.num_cached_tokens)
    return tokens, cached


async def talk(service, single, system, seed):
    """One conversation with edits; returns how many of its turns had cached tokens."""
    rng, hits = random.Random(seed), 0
    history = list(system)
    for turn in range(5):
        if turn == 3:  # an edit: go on from somewhere in the past
            history = history[: rng.randrange(len(system), len(history))]
        history += [rng.randrange(3, 500) for _ in range(rng.randrange(1, 30))]
        name = f"talk{seed}-turn{turn}"
        tokens, cached = await answer(service, history, name)
        sampling = SamplingParams(max_tokens=6, temperature=0.0)
        request = GenerateRequest(name, tuple(history), sampling)
        expected = await asyncio.to_thread(single.generate, request)
        assert tokens == expected[0], name
        hits += cached > 0
        history += tokens
    return hits


@pytest.mark.parametrize("replicas", [1, 2])
async def test_branching_conversations_equal_the_uncached_reference(
    replicas, tiny_checkpoint, config_of, single_of
):
    roles = SMALL | {"replicas": replicas}
    prefill = roles | {"resume_every_tokens": 32}
    config = config_of(tiny_checkpoint, prefill=prefill, decode=roles)
    single = single_of(config_of(tiny_checkpoint))
    system = [random.Random(1).randrange(3, 500) for _ in range(65)]
    hits = 0
    async with InProcess(config) as cluster:
        for seed in range(6):
            hits += await talk(cluster.service, single, system, seed)
        for node in (*cluster.prefill, *cluster.decode):
            node.runner.manager.check()
            assert all(p["used"] == 0 for p in node.runner.manager.usage().values())
    assert hits > 10
