"""Reuse on both roles: the same tokens as without a cache, and the hits one would expect."""

import random
from dataclasses import replace

import pytest

from sluice.cache.spec import unit_tokens
from sluice.protocol.messages import ConfigError, GenerateRequest, Refused, SamplingParams
from sluice.router.dispatch.cached import CachedPrefixes
from sluice.router.dispatch.prompt import Prompt

PAGE, WINDOW = 32, 8  # of the tiny checkpoint: Full pools' page, sliding window
KEPT = {"prefix_cache": True}
CACHED = KEPT | {"resume_every_tokens": 32}


@pytest.fixture
def config(tiny_checkpoint, config_of):
    return config_of(tiny_checkpoint, prefill=CACHED, decode=KEPT)


@pytest.fixture(scope="module")
def single(tiny_checkpoint, config_of, single_of):
    return single_of(config_of(tiny_checkpoint))


def request(prompt, max_tokens=4, name="r", salt=""):
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return GenerateRequest(name, tuple(prompt), params, cache_salt=salt)


def random_tokens(rng, count):
    return [rng.randrange(3, 500) for _ in range(count)]


def computed_tokens(pair, role):
    """Tokens the node has computed so far."""
    status = pair.statuses()[0 if role == "prefill" else 1]
    return sum(
        value
        for family in status.metrics
        for name, labels, value in family.samples
        if name == "sluice:computed_tokens_total" and labels["kind"] == role
    )


def sent_bytes(pair):
    return sum(
        value
        for family in pair.statuses()[0].metrics
        for name, _, value in family.samples
        if name == "sluice:transfer_bytes_total"
    )


@pytest.mark.parametrize(
    "num_tokens", sorted({n + d for n in (4, WINDOW, 16, PAGE, 64, 128) for d in (-1, 0, 1)})
)
def test_a_longer_prompt_resumes_at_the_end_of_the_shorter_one(
    num_tokens, config, start_local, single
):
    pair, rng = start_local(config), random.Random(num_tokens)
    first = random_tokens(rng, num_tokens)
    pair.generate(request(first))
    longer = request([*first, *random_tokens(rng, 20)], max_tokens=12)
    before = computed_tokens(pair, "prefill")
    tokens, arrived = pair.generate(longer)
    assert computed_tokens(pair, "prefill") - before == 20
    expected, rows = single.generate(longer)
    assert tokens == expected
    assert {name: len(data) for name, data in arrived.items()} == {
        name: len(data) for name, data in rows.items()
    }


@pytest.mark.parametrize("num_tokens", [17, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1, 100])
def test_the_same_prompt_again_computes_little(num_tokens, config, start_local, single):
    """A short one its last token, others what follows the last unit before that."""
    pair, rng = start_local(config), random.Random(num_tokens)
    prompt = random_tokens(rng, num_tokens)
    expected = single.generate(request(prompt))[0]
    unit = unit_tokens(pair.prefill.info.specs)
    kept = (num_tokens - 1) // unit * unit or num_tokens - 1
    for name, num_cached in (("a", 0), ("b", kept), ("c", kept)):
        asked = request(prompt, name=name)
        grant = pair.reserve(asked)
        first = pair.prefill.run(asked, grant).result(30)
        assert first.num_cached_tokens == num_cached
        assert [first.token_id, *pair.finish(grant)[0]] == expected


def test_a_hit_is_reported_and_moves_only_what_is_new(config, start_local, single):
    pair, rng = start_local(config), random.Random(5)
    shared = random_tokens(rng, 256)
    pair.generate(request([*shared, *random_tokens(rng, 10)]))
    full_bytes = sent_bytes(pair)
    follower = request([*shared, *random_tokens(rng, 10)])
    grant = pair.reserve(follower)
    assert grant.skip_tokens == 256
    first = pair.prefill.run(follower, grant).result(30)
    assert first.num_cached_tokens == 256
    tokens, error = pair.finish(grant)
    assert error is None
    assert [first.token_id, *tokens] == single.generate(follower)[0]
    assert sent_bytes(pair) - full_bytes < full_bytes / 2


def test_a_request_that_ends_with_its_first_token_moves_nothing(config, start_local, single):
    pair, rng = start_local(config), random.Random(9)
    asked = request(random_tokens(rng, 10), max_tokens=1)  # one chunk
    grant = pair.reserve(asked)
    first = pair.prefill.run(asked, grant).result(30)
    assert [first.token_id] == single.generate(asked)[0] and first.finish_reason is not None
    assert sent_bytes(pair) == 0


def test_pages_that_arrive_renew_their_lease(config, start_local):
    pair, rng = start_local(config), random.Random(10)
    asked = request(random_tokens(rng, 20))
    grant = pair.reserve(asked)
    stream = pair.decode._grants.get(grant.grant_id)
    promised = stream.deadline
    pair.prefill.run(asked, grant).result(30)
    pair.finish(grant)
    assert stream.deadline > promised


def test_another_salt_neither_computes_nor_moves_less(config, start_local):
    pair, rng = start_local(config), random.Random(6)
    prompt = random_tokens(rng, 100)
    pair.generate(request(prompt, salt="a"))
    follower = request(prompt, salt="b")
    grant = pair.reserve(follower)
    assert grant.skip_tokens == 0
    assert pair.prefill.run(follower, grant).result(30).num_cached_tokens == 0
    pair.finish(grant)


def test_the_next_turn_finds_the_answer_on_decode(config, start_local, single):
    pair, rng = start_local(config), random.Random(7)
    prompt = random_tokens(rng, 60)
    answer, _ = pair.generate(request(prompt, max_tokens=40))
    turn = request([*prompt, *answer, *random_tokens(rng, 5)])
    grant = pair.reserve(turn)
    assert grant.skip_tokens == 96, "60 prompt tokens and the answer, in whole pages"
    first = pair.prefill.run(turn, grant).result(30)
    tokens, _ = pair.finish(grant)
    assert [first.token_id, *tokens] == single.generate(turn)[0]


@pytest.mark.parametrize("cache_bytes", [8 << 20, 1_300_000])
def test_random_conversations_give_the_tokens_they_give_without_a_cache(
    cache_bytes, tiny_checkpoint, config_of, start_local, single
):
    size = {"cache_bytes": cache_bytes}
    pair = start_local(config_of(tiny_checkpoint, prefill=CACHED | size, decode=KEPT | size))
    seed = 11
    rng = random.Random(seed)
    system = random_tokens(rng, 70)
    talks = [[*system, *random_tokens(rng, 10)] for _ in range(6)]
    hits = 0
    for turn in range(30):
        talk = rng.choice(talks)
        if rng.random() < 0.2:  # an edit: branch off somewhere in the past
            talk = talk[: rng.randrange(len(system), len(talk))]
            talks.append(talk)
        talk += random_tokens(rng, rng.randrange(1, 30))
        if len(talk) > 400:
            talks.remove(talk)
            continue
        question = request(talk, max_tokens=rng.randrange(2, 12), name=f"seed{seed}-turn{turn}")
        grant = pair.reserve(question)
        first = pair.prefill.run(question, grant).result(30)
        hits += first.num_cached_tokens > 0
        tokens, error = pair.finish(grant)
        assert error is None
        assert [first.token_id, *tokens] == single.generate(question)[0], question.request_id
        talk += [first.token_id, *tokens]
        pair.prefill.runner.manager.check()
        pair.decode.runner.manager.check()
    assert hits > 12
    assert pair.used_pages() == 0


def least_cache_bytes(config_of_decode):
    """The least memory the role's config is accepted with; the message of the refusal names it."""
    with pytest.raises(ConfigError, match="expected at least") as refusal:
        config_of_decode(1)
    return int(str(refusal.value).split("at least ")[1].split()[0])


def test_preempted_requests_go_on_after_another_prefill(
    tiny_checkpoint, config_of, start_local, single
):
    def decode_with(cache_bytes):
        decode = {"cache_bytes": cache_bytes, "max_running_requests": 6}
        return start_local(config_of(tiny_checkpoint, decode=KEPT | decode))

    page_bytes = 32 * 144  # of the Full pools, all layers: 144 bytes a token
    pair = decode_with(least_cache_bytes(decode_with) + 8 * page_bytes)
    rng = random.Random(12)
    todo = [request(random_tokens(rng, 10), 120, name=f"p{n}") for n in range(4)]
    expected = {r.request_id: single.generate(r)[0] for r in todo}
    output, num_preempted = run_all(pair, todo)
    assert num_preempted > 0
    assert output == expected
    assert pair.used_pages() == 0


def run_all(pair, todo):
    """Run requests to their ends as a router would; returns outputs and how many came back.

    A request that comes back is another attempt, with as many primes behind its name.
    """
    output = {r.request_id: [] for r in todo}
    running, num_preempted = {}, 0
    while todo or running:
        while todo and (grant := try_reserve(pair, todo[0])) is not None:
            again = todo.pop(0)
            running[again.request_id] = again
            first = pair.prefill.run(again, grant).result(30)
            output[again.request_id.rstrip("'")].append(first.token_id)
        for chunk in pair.chunks.get(timeout=30):
            so_far = output[chunk.request_id.rstrip("'")]
            so_far += chunk.token_ids
            assert chunk.error is None or chunk.preempted, chunk.error
            if chunk.finish_reason is not None or chunk.preempted:
                ended = running.pop(chunk.request_id)
            if chunk.preempted:
                num_preempted += 1
                again = f"{chunk.request_id}'"
                todo.append(replace(ended, request_id=again, emitted_token_ids=tuple(so_far)))
    return output, num_preempted


def try_reserve(pair, wanted):
    try:
        return pair.reserve(wanted)
    except Refused:
        return None


@pytest.mark.parametrize("max_batch_tokens", [16, 48])
def test_where_only_window_and_state_are_gone_the_last_window_is_computed_again(
    max_batch_tokens, tiny_checkpoint, config_of, start_local, single
):
    prefill = KEPT | {"resume_every_tokens": 4096, "max_batch_tokens": max_batch_tokens}
    config = config_of(tiny_checkpoint, prefill=prefill, decode=KEPT)
    pair, rng = start_local(config), random.Random(8)
    shared = random_tokens(rng, 10 * PAGE + 3)
    pair.generate(request([*shared, *random_tokens(rng, 100)]))
    expected_hit = 10 * PAGE - pair.prefill.runner.model.replay_tokens
    for name in ("b", "c"):
        turn = request([*shared, *random_tokens(rng, 30)], max_tokens=8, name=name)
        grant = pair.reserve(turn)
        first = pair.prefill.run(turn, grant).result(30)
        tokens, _ = pair.finish(grant)
        assert [first.token_id, *tokens] == single.generate(turn)[0]
        assert first.num_cached_tokens == expected_hit
        expected_hit = 10 * PAGE  # where prompts turned off before, later ones resume


def test_nothing_is_resumed_from_among_replayed_tokens(
    tiny_checkpoint, config_of, start_local, single
):
    """Their window and state are not right before the replay has come to its end."""
    config = config_of(tiny_checkpoint, prefill=KEPT | {"resume_every_tokens": 4096}, decode=KEPT)
    pair, rng = start_local(config), random.Random(11)
    shared = random_tokens(rng, 10 * PAGE + 3)
    pair.generate(request([*shared, *random_tokens(rng, 100)]))
    pair.prefill._scheduler._resume_every_tokens = 4  # from now on at every chance
    for num_shared, whole_pages in ((len(shared), 10), (9 * PAGE + 4, 9)):
        prompt = [*shared[:num_shared], *random_tokens(rng, 30)]
        turn = request(prompt, max_tokens=8, name=f"r{num_shared}")
        grant = pair.reserve(turn)
        first = pair.prefill.run(turn, grant).result(30)
        tokens, _ = pair.finish(grant)
        replayed_from = whole_pages * PAGE - pair.prefill.runner.model.replay_tokens
        assert first.num_cached_tokens == replayed_from, "the other's replay left nothing behind"
        assert [first.token_id, *tokens] == single.generate(turn)[0]


def test_both_nodes_tell_which_prefixes_they_have_in_keys_that_the_router_computes(
    config, start_local
):
    pair, rng = start_local(config), random.Random(5)
    asked = request(random_tokens(rng, 3 * PAGE + 5), max_tokens=2, salt="tenant")
    pair.generate(asked)
    told = [pair.prefill.status("router", 0).result(30), pair.decode.status("router", 0).result(30)]
    for info, status in zip((pair.prefill.info, pair.decode.info), told, strict=True):
        cached = CachedPrefixes(info.fingerprint, unit_tokens(info.specs))
        cached.take(status.cached)
        assert cached.num_tokens(Prompt(asked)) == 3 * PAGE
        assert cached.num_tokens(Prompt(replace(asked, cache_salt="other"))) == 0
