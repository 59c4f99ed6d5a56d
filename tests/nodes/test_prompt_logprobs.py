"""Log-probabilities of a prompt's tokens: what a full pass over the prompt says of each.

Lengths lie around chunk borders (48 tokens here); others in the batch get what they get alone.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from sluice.engine.batch import Chunk
from sluice.protocol.messages import GenerateRequest, SamplingParams

MODEL = Path(__file__).parents[2] / "deploy/models/tiny-v4"


@pytest.fixture
def config(config_of):
    return config_of(MODEL, prefill={"prefix_cache": True}, decode={"prefix_cache": True})


@pytest.fixture
async def api(config, start_local, http_over):
    async with http_over(start_local(config)) as client:

        async def post(**fields):
            body = {"model": config.model.served_name, "temperature": 0, **fields}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        yield post


@pytest.fixture(scope="module")
def expected(config_of, single_of):
    """For a prompt the log-softmax of every position, from one step over all of it."""
    runner = single_of(config_of(MODEL, prefill={"max_batch_tokens": 512})).runner

    def full_pass(prompt):
        request = GenerateRequest("r", tuple(prompt), SamplingParams(1))
        state = runner.take(request, "g")
        runner.manager.grant("g", num_tokens=0, max_tokens=len(prompt))
        runner.manager.extend("g", len(prompt))
        logits = runner.step([Chunk(state, 0, len(prompt))], all_logits=True)
        runner.manager.release("g")
        return logits.log_softmax(dim=-1)

    return full_pass


def prompt_of(num_tokens):
    return [5 + (7 * i * i + 3 * i) % 2000 for i in range(num_tokens)]


@pytest.mark.parametrize("num_tokens", [1, 2, 47, 48, 49, 130, 300])
async def test_each_token_of_the_prompt_has_the_probability_of_a_full_pass(
    api, expected, num_tokens
):
    prompt = prompt_of(num_tokens)
    for _ in range(2):  # the second time much of it could be cached, and has no logits
        answer = await api(prompt=prompt, echo=True, logprobs=3, prompt_logprobs=1, max_tokens=2)
        [choice] = answer["choices"]
        told = choice["logprobs"]
        assert len(told["tokens"]) == num_tokens + answer["usage"]["completion_tokens"]
        assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
        values = expected(prompt)
        came = values[:-1].gather(1, torch.tensor(prompt[1:], dtype=torch.long)[:, None])[:, 0]
        got = torch.tensor(told["token_logprobs"][1:num_tokens])
        torch.testing.assert_close(got, came.float(), atol=2e-2, rtol=1e-2)
        for top in told["top_logprobs"][1:num_tokens]:
            assert 3 <= len(top) <= 4
        listed = choice["prompt_logprobs"]
        assert len(listed) == num_tokens and listed[0] is None
        for token, entry in zip(prompt[1:], listed[1:], strict=True):
            assert str(token) in entry and min(e["rank"] for e in entry.values()) == 1
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_prompt_can_be_scored_without_an_answer(api):
    prompt = prompt_of(60)
    scored = await api(prompt=prompt, echo=True, logprobs=1, max_tokens=0)
    [choice] = scored["choices"]
    assert len(choice["logprobs"]["tokens"]) == 60 and choice["finish_reason"] == "length"
    assert scored["usage"]["completion_tokens"] == 0
    [nothing] = (await api(prompt=prompt, max_tokens=0))["choices"]
    assert (nothing["text"], nothing["finish_reason"]) == ("", "length")
    answered = await api(prompt=prompt, echo=True, logprobs=1, max_tokens=4)
    longer = answered["choices"][0]["logprobs"]
    assert longer["token_logprobs"][:60] == choice["logprobs"]["token_logprobs"]
    assert longer["text_offset"][0] == 0


async def test_others_beside_it_get_what_they_get_alone(api):
    prompts = [prompt_of(n)[::-1] for n in (20, 90, 140)]
    alone = [(await api(prompt=p, max_tokens=6))["choices"][0]["text"] for p in prompts]
    together = await asyncio.gather(
        *(api(prompt=p, max_tokens=6) for p in prompts),
        *(api(prompt=prompt_of(n), echo=True, logprobs=0, max_tokens=1) for n in (100, 200)),
    )
    assert [a["choices"][0]["text"] for a in together[:3]] == alone
