"""Short prompts computed on decode: the same tokens, in batches with others, and nothing moves."""

import dataclasses

import pytest

PAGE = 32
LOCAL = {"local_prefill_below_tokens": 64}


@pytest.fixture
def config(tiny_checkpoint, config_of):
    return config_of(
        tiny_checkpoint,
        prefill={"prefix_cache": True},
        decode={"prefix_cache": True, "max_batch_tokens": 20},
        router=LOCAL,
    )


@pytest.fixture
def single(tiny_checkpoint, config_of, single_of):
    return single_of(config_of(tiny_checkpoint))


def local(request):
    return dataclasses.replace(request, local=True)


def computed_tokens(status, kind):
    return sum(
        value
        for family in status.metrics
        for name, labels, value in family.samples
        if name == "sluice:computed_tokens_total" and labels["kind"] == kind
    )


@pytest.mark.parametrize("num_tokens", [1, 4, 19, 20, 21, 40, 63, 200])
def test_a_prompt_computed_on_decode_gives_the_tokens_of_one_process(
    num_tokens, config, start_local, single, make_request
):
    pair, request = start_local(config), make_request(num_tokens, vocab_size=511, max_tokens=12)
    tokens, error = pair.finish(pair.reserve(local(request)))
    assert error is None
    assert tokens == single.generate(request)[0]
    prefill, decode = pair.statuses()
    assert computed_tokens(prefill, "prefill") == 0
    assert computed_tokens(decode, "prefill") == num_tokens
    assert pair.used_pages() == 0


def test_local_prompts_share_steps_with_prompts_from_prefill(
    config, start_local, single, make_request
):
    pair = start_local(config)
    requests = [make_request(n, vocab_size=511, seed=n, max_tokens=25) for n in (90, 50, 33, 7)]
    tokens = {request.request_id: [] for request in requests}
    for number, request in enumerate(requests):
        grant = pair.reserve(local(request) if number % 2 else request)
        if not number % 2:
            first = pair.prefill.run(request, grant).result(30)
            tokens[request.request_id].append(first.token_id)
    running = len(requests)
    while running:
        for chunk in pair.chunks.get(timeout=30):
            assert chunk.error is None
            tokens[chunk.request_id] += chunk.token_ids
            running -= chunk.finish_reason is not None
    for request in requests:
        assert tokens[request.request_id] == single.generate(request)[0], request.request_id


def test_a_local_prompt_goes_on_from_what_decode_has_cached(
    config, start_local, single, make_request
):
    pair, request = start_local(config), make_request(5 * PAGE, vocab_size=511, max_tokens=2)
    pair.finish(pair.reserve(local(request)))
    longer = dataclasses.replace(
        request, request_id="b", prompt_token_ids=(*request.prompt_token_ids, 7, 8, 9)
    )
    grant = pair.reserve(local(longer))
    replay = pair.decode.runner.model.replay_tokens
    assert grant.skip_tokens == 5 * PAGE - replay > 0
    assert pair.finish(grant)[0] == single.generate(longer)[0]


async def test_the_router_leaves_short_prompts_to_decode(config, start_local, http_over):
    pair = start_local(config)
    async with http_over(pair) as client:
        for num_tokens, on_decode in ((63, True), (64, False)):
            before = computed_tokens((pair.prefill.status("router").result(30)), "prefill")
            answer = await client.post(
                "/v1/completions",
                json={
                    "model": config.model.served_name,
                    "prompt": [5 + n for n in range(num_tokens)],
                    "max_tokens": 6,
                    "temperature": 0,
                },
            )
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_tokens, 6)
            after = computed_tokens((pair.prefill.status("router").result(30)), "prefill")
            assert (after == before) == on_decode
    assert pair.used_pages() == 0
