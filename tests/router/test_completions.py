"""Answers: the same text, counts and ends, streamed or whole, chat or plain."""

from __future__ import annotations

import json
import random

import pytest

EOS = 1


def text_of(stream: list[dict]) -> str:
    choices = [choice for event in stream for choice in event["choices"]]
    return "".join(
        choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices
    )


async def test_a_completion_is_the_reference_text(world):
    answer = (await world.complete(max_tokens=40)).json()
    assert answer["choices"][0]["text"] == world.expected(max_tokens=40)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["object"] == "text_completion" and answer["model"] == "tiny"


async def test_streamed_and_whole_answers_are_equal(world, events):
    for send in (world.complete, world.chat):
        whole = (await send(max_tokens=30)).json()
        fields = {"stream": True, "stream_options": {"include_usage": True}}
        stream, done = events((await send(max_tokens=30, **fields)).text)
        choice = whole["choices"][0]
        assert text_of(stream) == (choice.get("text") or choice["message"]["content"])
        assert stream[-2]["choices"][0]["finish_reason"] == choice["finish_reason"]
        assert stream[-1]["usage"] == whole["usage"] and stream[-1]["choices"] == [] and done


async def test_a_chat_stream_opens_with_the_role_and_has_no_usage_unasked(world, events):
    stream, _ = events((await world.chat(stream=True)).text)
    assert stream[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert not any("usage" in event for event in stream)


async def test_the_template_and_its_control_tokens_reach_the_nodes(world):
    seen = []
    run = world.prefills["prefill-0"].run
    world.prefills["prefill-0"].run = lambda request, grant: (
        seen.append(request) or run(request, grant)
    )
    await world.chat([{"type": "text", "text": "the"}, {"type": "text", "text": "<user>cat"}])
    ids = world.tokenizer.encode(
        "<bos><user>the\n<user>cat<assistant>", add_special_tokens=False
    ).ids
    assert seen[0].prompt_token_ids == tuple(ids) and ids[:2] == [0, 3]


async def test_a_chat_whose_answer_has_begun_is_continued(world):
    seen = []
    run = world.prefills["prefill-0"].run
    world.prefills["prefill-0"].run = lambda request, grant: (
        seen.append(request) or run(request, grant)
    )
    begun = {"role": "assistant", "content": "the cat", "prefix": True}
    messages = [{"role": "user", "content": "a"}, begun]
    body = {"model": "tiny", "messages": messages, "max_tokens": 4}
    answer = await world.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    text = "<bos><user>a<assistant>the cat"
    expected = world.tokenizer.encode(text, add_special_tokens=False).ids
    assert seen[0].prompt_token_ids == tuple(expected)


async def test_separators_of_lines_do_not_split_an_event(world):
    token_ids = world.ids("a\u2028b\u0085c")
    world.script.plan = token_ids
    answer = await world.complete(max_tokens=len(token_ids), stream=True)
    lines = [line for line in answer.text.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert text_of(events) == "a\u2028b\u0085c"


async def test_eos_as_the_first_token_ends_the_answer_before_decode(world):
    world.script.plan = (EOS,)
    answer = (await world.complete()).json()
    assert answer["choices"][0] == {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert answer["usage"]["completion_tokens"] == 1
    assert not world.decodes["decode-0"].generating
    await world.until(world.quiescent)


async def test_ignore_eos_goes_on(world):
    world.script.plan = (50, EOS, 51)
    answer = (await world.complete(ignore_eos=True, max_tokens=5)).json()
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_max_tokens_one_is_answered_by_prefill_alone(world):
    answer = (await world.complete(max_tokens=1)).json()
    assert answer["choices"][0]["text"] == world.expected(max_tokens=1)
    assert answer["usage"]["completion_tokens"] == 1
    await world.until(world.quiescent)


async def test_a_stop_token_from_the_client_is_not_shown(world):
    ids = world.script.reference(world.ids("the cat"), 8)
    answer = (await world.complete(stop_token_ids=[ids[4]])).json()
    index = ids.index(ids[4])
    assert answer["choices"][0]["text"] == world.tokenizer.decode(list(ids[:index]))
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == index + 1


async def test_a_stop_string_across_tokens_and_chunks_ends_the_answer(world):
    decode = world.decodes["decode-0"]
    world.script.plan = world.ids("naïve café ☕ of the hat")
    answers = []
    for tokens_per_chunk in (1, 3, 100):
        decode.tokens_per_chunk = tokens_per_chunk
        answers.append((await world.complete(max_tokens=30, stop=["é ☕ o", "zzz"])).json())
    assert [answer["choices"][0]["text"] for answer in answers] == ["naïve caf"] * 3
    assert len({answer["usage"]["completion_tokens"] for answer in answers}) == 1
    assert answers[0]["choices"][0]["finish_reason"] == "stop"
    await world.until(world.quiescent)


async def test_a_stop_string_may_begin_with_the_token_from_prefill(world):
    world.script.plan = world.ids("the hat")
    answer = (await world.complete(stop="the hat")).json()
    assert answer["choices"][0]["text"] == ""


async def test_held_back_stop_text_is_delivered_at_the_end(world, events):
    world.script.plan = (*world.ids("and the"), EOS)
    stream, _ = events((await world.complete(stop="the cat", stream=True)).text)
    assert text_of(stream) == "and the"


async def test_cached_tokens_come_from_prefill(world):
    world.prefills["prefill-0"].num_cached_tokens = 2
    usage = (await world.complete()).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8
    assert usage["prompt_cache_hit_tokens"] == 2  # as DeepSeek's API has it
    assert usage["prompt_cache_miss_tokens"] == usage["prompt_tokens"] - 2


async def test_token_id_prompts_and_single_lists_are_the_same_prompt(world):
    ids = list(world.ids("the cat"))
    texts = [(await world.complete(prompt)).json()["choices"][0]["text"] for prompt in
             ("the cat", ids, ["the cat"], [ids])]  # fmt: skip
    assert texts == [world.expected()] * 4


async def test_without_max_tokens_the_answer_fills_what_a_node_can_hold(world):
    world.add_decode(num_pages=5)
    answer = (await world.chat(max_tokens=None)).json()
    assert answer["usage"]["total_tokens"] == 5 * 16


@pytest.mark.parametrize("fields", [{"max_tokens": None}, {"max_completion_tokens": None}], ids=str)
async def test_without_max_tokens_a_text_is_continued_by_16_or_what_fits(world, fields):
    body = {"model": "tiny", "prompt": "the cat", **fields}
    answer = (await world.http.post("/v1/completions", json=body)).json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["text"] == world.expected(max_tokens=16)
    longer = (await world.complete(max_tokens=None, max_completion_tokens=20)).json()
    assert longer["usage"]["completion_tokens"] == 20
    last = (await world.complete([9] * 250, max_tokens=None)).json()
    assert last["usage"]["total_tokens"] == 256 and last["choices"][0]["finish_reason"] == "length"


async def test_a_seed_is_drawn_once_and_kept_within_63_bits(world):
    seen = []
    run = world.prefills["prefill-0"].run
    world.prefills["prefill-0"].run = lambda request, grant: (
        seen.append(request) or run(request, grant)
    )
    await world.complete(seed=-1)
    await world.complete()
    assert all(0 <= request.sampling.seed < 2**63 for request in seen)


async def test_random_unicode_streams_as_it_decodes(world, events):
    seed = random.randrange(2**32)
    print(f"seed={seed}")
    rng = random.Random(seed)
    for _ in range(20):
        text = "".join(rng.choice("aé☕🐈 \ufffd\u0301日") for _ in range(20))
        world.script.plan = (*world.ids(text), EOS)
        stream, _ = events((await world.complete(max_tokens=200, stream=True)).text)
        pieces = [event["choices"][0]["text"] for event in stream]
        assert "".join(pieces) == text
