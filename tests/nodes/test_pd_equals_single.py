"""PD over NIXL in two processes gives the tokens of one process, and the bytes of every pool."""

import random

import pytest

PAGE, WINDOW = 32, 8
LENGTHS = sorted(
    {n + d for n in (4, WINDOW, 16, PAGE, 48, 2 * PAGE, 96, 128, 256) for d in (-1, 0, 1)}
)
RANDOM_LENGTHS = random.Random(2).choices(range(1, 400), k=100)


@pytest.fixture(scope="module")
def config(tiny_checkpoint, config_of):
    return config_of(tiny_checkpoint)


@pytest.fixture(scope="module")
def pair(config, start_pair):
    return start_pair(config)


@pytest.fixture(scope="module")
def reading_pair(tiny_checkpoint, config_of, start_pair):
    return start_pair(config_of(tiny_checkpoint, transfer={"mode": "read"}))


@pytest.fixture(scope="module")
def single(config, single_of):
    return single_of(config)


def same(pair, single, request):
    tokens, arrived = pair.generate(request)
    expected_tokens, expected_rows = single.generate(request)
    assert tokens == expected_tokens, request.request_id
    assert arrived.keys() == expected_rows.keys()
    for pool, rows in expected_rows.items():
        assert arrived[pool] == rows, f"{request.request_id}: pool {pool} differs"


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_tokens_and_bytes_are_equal_around_every_boundary(num_tokens, pair, single, make_request):
    same(pair, single, make_request(num_tokens, vocab_size=512))


def test_tokens_and_bytes_are_equal_at_random_lengths(pair, single, make_request):
    for seed, num_tokens in enumerate(RANDOM_LENGTHS):
        same(pair, single, make_request(num_tokens, vocab_size=512, seed=seed, max_tokens=4))


@pytest.mark.parametrize("num_tokens", LENGTHS[::3])
def test_tokens_and_bytes_are_equal_where_decode_reads(
    num_tokens, reading_pair, single, make_request
):
    same(reading_pair, single, make_request(num_tokens, vocab_size=512))


def test_seeded_sampling_is_equal_too(pair, single, make_request):
    for seed in range(5):
        sampled = make_request(50 + seed, vocab_size=512, temperature=0.9, top_p=0.95, seed=seed)
        same(pair, single, sampled)


def test_a_single_output_token_needs_no_decode(pair, single, make_request):
    request = make_request(77, vocab_size=512, max_tokens=1)
    assert pair.generate(request)[0] == single.generate(request)[0]


def test_zeroing_any_one_pool_after_the_transfer_changes_the_output(pair, single, make_request):
    request = make_request(205, vocab_size=512, max_tokens=40)
    expected, _ = single.generate(request)
    for spec in single.runner.specs:
        pair.decode.zero(spec.name)
        changed, _ = pair.generate(request)
        pair.decode.zero(None)
        assert changed != expected, f"nobody noticed that {spec.name} was lost"
    assert pair.generate(request)[0] == expected


def test_nothing_stays_allocated_when_all_is_done(pair):
    assert pair.used_pages() == 0
