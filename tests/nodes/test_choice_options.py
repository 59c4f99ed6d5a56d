"""Penalties, biases, limits and log-probabilities are the same over two nodes as in one process."""

from dataclasses import replace

import pytest

VOCAB = 512
OPTIONS = [
    dict(presence_penalty=-2.0, frequency_penalty=-2.0),
    dict(repetition_penalty=1.3, temperature=0.8, min_p=0.05, seed=4),
    dict(logit_bias=((5, 100.0), (6, 100.0)), frequency_penalty=2.0),
    dict(stop_token_ids=tuple(range(3, 400)), min_tokens=6),
]


@pytest.fixture(scope="module")
def config(tiny_checkpoint, config_of):
    return config_of(tiny_checkpoint)


@pytest.fixture(scope="module")
def single(config, single_of):
    return single_of(config)


def generate(pair, request):
    """Output tokens and their log-probabilities, prefill's first."""
    grant = pair.reserve(request)
    first = pair.prefill.run(request, grant).result(30)
    tokens, logprobs, reason = [first.token_id], [first.logprobs], first.finish_reason
    while reason is None:
        for chunk in pair.chunks.get(timeout=30):
            assert chunk.error is None, chunk.error
            tokens += chunk.token_ids
            logprobs += chunk.logprobs
            reason = chunk.finish_reason
    return tokens, logprobs


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
def test_two_nodes_choose_like_one_also_after_a_fail_over(
    options, config, start_local, single, make_request
):
    request = make_request(45, vocab_size=VOCAB, max_tokens=12, **options)
    expected, _ = single.generate(request)
    plain, _ = single.generate(make_request(45, vocab_size=VOCAB, max_tokens=12))
    assert expected != plain, "the options change nothing, so nothing is tested"
    pair = start_local(config)
    assert generate(pair, request)[0] == expected
    resumed = replace(request, request_id="resumed", emitted_token_ids=tuple(expected[:5]))
    assert generate(pair, resumed)[0] == expected[5:]


def test_every_token_brings_its_logprobs_if_asked(config, start_local, make_request):
    pair = start_local(config)
    request = make_request(45, vocab_size=VOCAB, max_tokens=8, num_top_logprobs=3)
    tokens, logprobs = generate(pair, request)
    assert len(logprobs) == len(tokens) == 8
    for token, (chosen, top, _) in zip(tokens, logprobs, strict=True):
        assert top[0] == (token, chosen) and len(top) == 3  # greedy: the likeliest is chosen
    resumed = replace(request, request_id="resumed", emitted_token_ids=tuple(tokens[:3]))
    _, again = generate(pair, resumed)
    for (chosen, *_), (expected, *_) in zip(again, logprobs[3:], strict=True):
        assert chosen == pytest.approx(expected, abs=1e-4)
    assert generate(pair, make_request(45, vocab_size=VOCAB, seed=1))[1] == [None]
