"""Several answers, list prompts, echo, log-probabilities, and what reaches the nodes."""

from __future__ import annotations

import pytest

EOS = 1


def by_index(stream: list[dict]) -> dict[int, list[dict]]:
    found: dict[int, list[dict]] = {}
    for choice in (choice for event in stream for choice in event["choices"]):
        found.setdefault(choice["index"], []).append(choice)
    return found


async def test_sampling_fields_reach_the_nodes(world):
    seen = world.seen_requests()
    await world.complete(
        min_p=0.1, presence_penalty=0.5, frequency_penalty=-1, repetition_penalty=1.1,
        logit_bias={"7": 5, "9": -100}, min_tokens=3, response_format={"type": "text"},
    )  # fmt: skip
    sampling = seen[0].sampling
    assert (sampling.min_p, sampling.presence_penalty, sampling.frequency_penalty) == (0.1, 0.5, -1)
    assert sampling.repetition_penalty == 1.1 and sampling.min_tokens == 3
    assert sampling.logit_bias == ((7, 5.0), (9, -100.0))
    assert sampling.num_top_logprobs is None and sampling.json_schema == ""


async def test_n_answers_have_seeds_in_a_row_and_one_counted_prompt(world):
    seen = world.seen_requests()
    answer = (await world.complete(n=3, seed=11)).json()
    assert sorted(request.sampling.seed for request in seen) == [11, 12, 13]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in answer["choices"]] == [world.expected()] * 3
    num_prompt_tokens = len(world.ids("the cat"))
    assert answer["usage"]["prompt_tokens"] == num_prompt_tokens
    assert answer["usage"]["completion_tokens"] == 3 * 8
    assert answer["usage"]["total_tokens"] == num_prompt_tokens + 24
    await world.until(world.quiescent)


async def test_one_answer_has_the_seed_that_was_asked_for(world):
    seen = world.seen_requests()
    await world.complete(seed=11)
    await world.complete(n=2, seed=10)
    assert seen[0].sampling.seed == 11 and seen[0].sampling.seed in {
        request.sampling.seed for request in seen[1:]
    }


@pytest.mark.parametrize("as_ids", [False, True])
async def test_list_prompts_have_their_answers_in_order(world, as_ids):
    prompts = ["the cat", "the hat and", "of"]
    sent = [list(world.ids(prompt)) for prompt in prompts] if as_ids else prompts
    answer = (await world.complete(sent, n=2)).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [world.expected(prompt) for prompt in prompts for _ in range(2)]
    expected = sum(len(world.ids(prompt)) for prompt in prompts)
    assert answer["usage"]["prompt_tokens"] == expected


@pytest.mark.parametrize("kind", ["complete", "chat"])
async def test_a_stream_interleaves_answers_that_are_the_whole_ones(world, events, kind):
    send = getattr(world, kind)
    whole = (await send(n=3)).json()
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    stream, done = events((await send(n=3, **fields)).text)
    choices = by_index(stream)
    order = [event["choices"][0]["index"] for event in stream[:-1]]
    assert done and order != sorted(order), "one answer after the other"
    for index, expected in enumerate(whole["choices"]):
        pieces = choices[index]
        text = "".join(p.get("text") or p.get("delta", {}).get("content", "") for p in pieces)
        assert text == (expected.get("text") or expected["message"]["content"])
        assert [p["finish_reason"] for p in pieces if p["finish_reason"]] == ["length"]
        if kind == "chat":
            assert pieces[0]["delta"] == {"role": "assistant", "content": ""}
    assert stream[-1]["usage"] == whole["usage"]


async def test_cached_tokens_count_once_for_each_prompt(world):
    world.prefills["prefill-0"].num_cached_tokens = 2
    usage = (await world.complete(["the cat", "the hat"], n=2)).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}


async def test_a_client_that_leaves_ends_all_its_answers(world):
    world.decodes["decode-0"].gate.clear()
    request = world.raw(n=3, stream=True)
    await world.until(lambda: len(world.decodes["decode-0"].generating) == 3)
    await request.leave()
    await world.until(world.quiescent)


async def test_an_answer_that_fails_fails_the_request_and_ends_the_others(world):
    world.prefills["prefill-0"].faults = [ZeroDivisionError("bug")]
    assert (await world.complete(n=3)).status_code == 500
    await world.until(world.quiescent)


async def test_echo_shows_the_prompt_first_streamed_or_whole(world, events):
    ids = list(world.ids("the cat"))
    for prompt in ("the cat", ids):
        answer = (await world.complete(prompt, echo=True)).json()
        assert answer["choices"][0]["text"] == "the cat" + world.expected()
        stream, _ = events((await world.complete(prompt, echo=True, stream=True)).text)
        text = "".join(event["choices"][0]["text"] for event in stream)
        assert text == "the cat" + world.expected()


async def test_chat_logprobs_describe_every_token(world):
    world.script.plan = (*world.ids("the 日"), EOS)
    choice = (await world.chat(logprobs=True, top_logprobs=2, max_tokens=20)).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == len(world.script.plan)
    spelled = b"".join(bytes(entry["bytes"]) for entry in content[:-1])
    assert spelled.decode() == choice["message"]["content"] == "the 日"
    for entry, token_id in zip(content, world.script.plan, strict=False):
        assert entry["logprob"] == -0.5 - token_id and len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0] == {
            key: entry[key] for key in ("token", "logprob", "bytes")
        }
    assert content[0]["token"] == "the" and content[-2]["token"].startswith("bytes:\\x")
    assert content[-1]["token"] == "<eos>", "the token that stops has no text, but it counts"


async def test_completion_logprobs_have_offsets_into_the_text(world):
    world.script.plan = (*world.ids("the cat and the hat"), EOS)
    choice = (await world.complete(logprobs=3, max_tokens=20)).json()["choices"][0]
    logprobs, text = choice["logprobs"], choice["text"]
    assert text == "the cat and the hat"
    for token, offset in zip(logprobs["tokens"][:-1], logprobs["text_offset"], strict=False):
        assert text[offset : offset + len(token)] == token
    assert (logprobs["tokens"][-1], logprobs["text_offset"][-1]) == ("<eos>", len(text))
    assert all(len(top) == 3 for top in logprobs["top_logprobs"])
    chosen = [top[t] for top, t in zip(logprobs["top_logprobs"], logprobs["tokens"], strict=True)]
    assert chosen == logprobs["token_logprobs"]
    zero = (await world.complete(logprobs=0, max_tokens=20)).json()["choices"][0]["logprobs"]
    assert [list(top) for top in zero["top_logprobs"]] == [[t] for t in zero["tokens"]]


@pytest.mark.parametrize("kind", ["complete", "chat"])
async def test_streamed_logprobs_are_the_whole_ones(world, events, kind):
    world.script.plan = (*world.ids("naïve café ☕ of the hat"), EOS)
    fields = {"stop": "zzz", "logprobs": 2 if kind == "complete" else True, "max_tokens": 60}
    send = getattr(world, kind)
    whole = (await send(**fields)).json()["choices"][0]["logprobs"]
    stream, _ = events((await send(**fields, stream=True)).text)
    pieces = [event["choices"][0]["logprobs"] for event in stream]
    for key in ("content",) if kind == "chat" else ("tokens", "token_logprobs", "text_offset"):
        assert [entry for piece in pieces for entry in piece[key]] == whole[key]


ENDS = {
    "by itself": {},
    "at a stop token": {"stop_token_ids": [50]},
    "at a stop string": {"stop": "c"},
    "inside a stop string": {"stop": "hat of", "max_tokens": 3},
    "at the limit": {"max_tokens": 2},
    "at once": {"stop": "t"},
}


@pytest.mark.parametrize("fields", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("kind", ["complete", "chat"])
@pytest.mark.parametrize("tokens_per_chunk", [1, 5])
async def test_every_counted_token_has_its_logprobs_however_an_answer_ends(
    world, events, kind, tokens_per_chunk, fields
):
    world.decodes["decode-0"].tokens_per_chunk = tokens_per_chunk
    world.script.plan = (*world.ids("the cat☕"), 50, *world.ids(" and the hat"), EOS)
    asked = {"max_tokens": 40, "logprobs": 1 if kind == "complete" else True, **fields}
    answer = (await getattr(world, kind)(**asked)).json()
    logprobs = answer["choices"][0]["logprobs"]
    whole = logprobs["token_logprobs"] if kind == "complete" else logprobs["content"]
    assert len(whole) == answer["usage"]["completion_tokens"]
    stream, _ = events((await getattr(world, kind)(stream=True, **asked)).text)
    pieces = [event["choices"][0]["logprobs"] for event in stream]
    key = "token_logprobs" if kind == "complete" else "content"
    assert [entry for piece in pieces for entry in piece[key]] == whole


async def test_logprobs_survive_a_fail_over(world):
    world.add_decode("decode-1")
    world.decodes["decode-0"].die_after = 3
    world.decodes["decode-1"].die_after = 30
    choice = (await world.complete(logprobs=1, max_tokens=20)).json()["choices"][0]
    tokens = world.script.reference(world.ids("the cat"), 20)
    assert choice["logprobs"]["token_logprobs"] == [-0.5 - token for token in tokens]


async def test_a_stop_string_may_begin_only_after_min_tokens(world):
    world.script.plan = world.ids("the hat and the hat and the")
    first = (await world.complete(stop="hat", max_tokens=16)).json()["choices"][0]
    num_tokens = len(world.ids("the hat"))
    later = await world.complete(stop="hat", min_tokens=num_tokens, max_tokens=16)
    assert first["text"] == "the "
    assert later.json()["choices"][0]["text"] == "the hat and the "
