"""Faults that users of other systems met between prefill and decode, as scenarios for ours."""

import contextlib
import dataclasses
import queue
import time

import pytest

PAGE = 32
LEASE_S = 1.5  # longer than a busy machine keeps a thread waiting


@pytest.fixture
def hasty(tiny_checkpoint, config_of, start_local):
    return start_local(config_of(tiny_checkpoint, transfer={"lease_s": LEASE_S}))


def give_sign_of_life(pair):
    pair.statuses()


def test_every_prompt_length_up_to_three_pages_gives_the_tokens_of_one_process(
    tiny_checkpoint, config_of, start_local, single_of, make_request
):
    config = config_of(tiny_checkpoint)
    pair, single = start_local(config), single_of(config)
    for num_tokens in range(1, 3 * PAGE + 3):
        request = make_request(num_tokens, vocab_size=511, max_tokens=3)
        tokens, rows = pair.generate(request)
        assert (tokens, rows) == single.generate(request), num_tokens


def test_a_decode_node_frozen_past_its_lease_serves_nothing_it_had(hasty, make_request):
    """Others have given its pages up meanwhile; what it holds is void, however whole it looks."""
    request = make_request(50, vocab_size=511, max_tokens=900)
    grant = hasty.reserve(request)
    hasty.prefill.run(request, grant).result(10)
    give_sign_of_life(hasty)
    frozen = hasty.decode._loop.call(lambda: time.sleep(2 * LEASE_S))
    sign = hasty.decode.status("test-router")  # waits at the frozen node, and is there at its end
    frozen.result(10)
    sign.result(10)
    _, error = hasty.finish(grant)
    assert "lease" in error
    deadline = time.monotonic() + 10
    while hasty.used_pages():
        assert time.monotonic() < deadline


def test_a_lease_ends_though_an_earlier_one_is_renewed(hasty, make_request):
    early = hasty.reserve(make_request(120, vocab_size=511, seed=1))
    late = hasty.reserve(make_request(50, vocab_size=511, seed=2))
    renewed = hasty.decode._grants.get(early.grant_id)
    renewed.deadline += 1000
    ended = None
    while ended is None:
        give_sign_of_life(hasty)
        with contextlib.suppress(queue.Empty):  # signs come more often than the lease is long
            for chunk in hasty.chunks.get(timeout=LEASE_S / 10):
                ended = chunk.request_id if chunk.error else None
    assert ended == late.request_id
    assert hasty.decode._grants.get(early.grant_id) is renewed
    hasty.decode.release(early.request_id, in_flight=False).result(10)


def test_prompts_one_after_another_in_the_same_pages_never_answer_for_each_other(
    tiny_checkpoint, config_of, start_local, single_of, make_request
):
    """One request at a time fits, so each takes the pages that the last one left."""
    config = config_of(tiny_checkpoint, decode={"max_running_requests": 1})
    pair, single = start_local(config), single_of(config)
    for seed in range(6):
        request = make_request(100 + seed, vocab_size=511, seed=seed)
        request = dataclasses.replace(request, request_id=f"r{seed}")
        assert pair.generate(request)[0] == single.generate(request)[0]
