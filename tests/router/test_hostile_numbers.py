"""Any number in any field is a 400 or an answer; nodes see none that they cannot compute with."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.engine.checks import checked_tokens

numbers = st.one_of(
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.sampled_from(
        ["1e999", "-1e999", "1e-60", "1e-300", "5e-324", "-0.0", "9" * 5000, f"{2**63}", f"{2**64}"]
    ),
    st.sampled_from(["-9223372036854775809", "1", "0", "2", "0.5", "true", "null"]),
).map(str)
FIELDS = ["max_tokens", "min_tokens", "n", "temperature", "top_p", "top_k", "min_p", "seed",
          "presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "priority",
          "max_completion_tokens"]  # fmt: skip
LISTS = ["stop_token_ids", "prompt"]
some_fields = st.dictionaries(st.sampled_from(FIELDS), numbers, max_size=3)
some_lists = st.dictionaries(
    st.sampled_from(LISTS), st.lists(numbers, max_size=3).map(lambda some: f"[{','.join(some)}]")
)
biases = st.dictionaries(st.sampled_from(["5", "-1", "10" * 9, "999"]), numbers, max_size=2).map(
    lambda some: {
        "logit_bias": "{" + ",".join(f'"{key}":{bias}' for key, bias in some.items()) + "}"
    }
)


@pytest.mark.timeout(60)
async def test_any_number_is_refused_or_one_that_nodes_can_compute_with(world):
    loop, statuses, seen = asyncio.get_running_loop(), set(), world.seen_requests()
    plain = {"model": '"tiny"', "prompt": '"the cat"', "max_tokens": "4"}

    @settings(
        max_examples=250,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(some_fields, some_lists, biases)
    def ask(fields, lists, bias) -> None:
        parts = plain | fields | lists | bias
        body = "{" + ",".join(f"{json.dumps(key)}:{value}" for key, value in parts.items()) + "}"
        posting = world.http.post(
            "/v1/completions", content=body, headers={"content-type": "application/json"}
        )
        answer = asyncio.run_coroutine_threadsafe(posting, loop).result(20)
        statuses.add(answer.status_code)
        assert answer.status_code in (200, 400), answer.text
        assert len(answer.text) < 100_000

    await asyncio.to_thread(ask)
    assert statuses == {200, 400}
    checkpoint = world.service.checkpoint
    for request in seen:
        checked_tokens(
            request, vocab_size=checkpoint.vocab_size, max_model_len=checkpoint.max_model_len
        )


async def test_top_k_beyond_the_vocabulary_means_no_limit(world):
    seen = world.seen_requests()
    for top_k in (10**30, 2**63, 10**6):
        assert (await world.complete(top_k=top_k)).status_code == 200
    assert {request.sampling.top_k for request in seen} == {world.service.checkpoint.vocab_size}
