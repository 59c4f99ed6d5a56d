"""What broke elsewhere, through HTTP: each test is a report from the field, by its kind."""

from __future__ import annotations

import asyncio

import pytest

EOS = 1


async def whole_and_streamed(world, events, kind, **fields):
    """The usage and the last finish reason of both ways to answer."""
    ask = getattr(world, kind)
    body = (await ask(**fields)).json()
    options = {"include_usage": True}
    stream, done = events((await ask(stream=True, stream_options=options, **fields)).text)
    assert done, stream
    reasons = [choice["finish_reason"] for event in stream for choice in event["choices"]]
    seen = [(body["usage"], body["choices"][0]["finish_reason"])]
    return [*seen, (stream[-1]["usage"], next(r for r in reversed(reasons) if r))]


@pytest.mark.parametrize("kind", ["complete", "chat"])
@pytest.mark.parametrize("num_cached_tokens", [0, 2])
async def test_usage_is_the_same_streamed_or_whole_cold_or_warm(
    world, events, kind, num_cached_tokens
):
    world.prefills["prefill-0"].num_cached_tokens = num_cached_tokens
    whole, streamed = await whole_and_streamed(world, events, kind, max_tokens=6)
    assert whole == streamed
    usage = whole[0]
    assert usage["completion_tokens"] == 6 and usage["prompt_tokens"] >= 2
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6
    assert usage["prompt_tokens_details"]["cached_tokens"] == num_cached_tokens


@pytest.mark.parametrize(
    ("first", "fields", "num_tokens", "reason"),
    [
        (60, {"max_tokens": 1}, 1, "length"),
        (EOS, {"max_tokens": 1}, 1, "stop"),
        (EOS, {"max_tokens": 1, "ignore_eos": True}, 1, "length"),
        (EOS, {"max_tokens": 4}, 1, "stop"),
        (EOS, {"max_tokens": 4, "ignore_eos": True}, 4, "length"),
        (60, {"max_tokens": 4, "stop_token_ids": [60]}, 1, "stop"),
        (60, {"max_tokens": 4, "stop_token_ids": [61]}, 4, "length"),
    ],
)
async def test_what_prefills_token_decides_is_decided(
    world, events, first, fields, num_tokens, reason
):
    world.script.plan = (first, 70, 71, 72)
    for usage, last in await whole_and_streamed(world, events, "complete", **fields):
        assert (usage["completion_tokens"], last) == (num_tokens, reason)
    await world.until(world.quiescent)


async def test_several_answers_to_several_prompts_with_all_that_goes_with_them(world):
    prompts, fields = [[9, 9], [8]], {"n": 2, "max_tokens": 3}
    scored = (await world.complete(prompts, logprobs=2, **fields)).json()["choices"]
    assert [choice["index"] for choice in scored] == [0, 1, 2, 3]
    assert all(len(choice["logprobs"]["tokens"]) == 3 for choice in scored)
    echoed = (await world.complete(prompts, echo=True, **fields)).json()["choices"]
    shown = [world.tokenizer.decode(prompt, skip_special_tokens=False) for prompt in prompts]
    assert all(c["text"].startswith(shown[c["index"] // 2]) for c in echoed)
    both = (await world.complete(prompts, echo=True, logprobs=2, **fields)).json()["choices"]
    assert [c["text"] for c in both] == [c["text"] for c in echoed]
    await world.until(world.quiescent)


async def test_after_a_burst_of_ten_times_the_capacity_a_request_is_served_at_once(make_world):
    world = await make_world(router={"max_queue": 30, "request_timeout_s": 20})
    world.add_prefill()
    world.add_decode()
    answers = await asyncio.gather(*(world.complete([9] * 30, max_tokens=20) for _ in range(40)))
    assert {answer.status_code for answer in answers} == {200, 429}
    assert sum(answer.status_code == 200 for answer in answers) >= 30
    await world.until(world.quiescent)
    seen = world.seen_requests()
    late = asyncio.create_task(world.complete())
    await world.until(lambda: len(seen) == 1)
    assert len(world.service.queue) == 0
    assert (await late).json()["choices"][0]["text"] == world.expected()


async def test_a_short_request_behind_many_that_leave_is_next(world):
    prefill = world.prefills["prefill-0"]
    prefill.gate.clear()
    leaving = [world.raw(prompt=[7] * 60, max_tokens=9) for _ in range(50)]
    await world.until(lambda: len(prefill.at_work) + len(world.service.queue) == 50)
    num_started = len(prefill.at_work)
    short = asyncio.create_task(world.complete([5]))
    await world.until(lambda: len(world.service.queue) == 51 - num_started)
    await asyncio.gather(*(request.leave() for request in leaving))
    prefill.gate.set()
    assert (await short).status_code == 200
    assert prefill.calls.count("run") == num_started + 1  # nothing was computed for who had left
    await world.until(world.quiescent)
