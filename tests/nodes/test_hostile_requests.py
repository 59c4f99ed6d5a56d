"""One request's numbers, schema or damaged rows end that request, and nothing else on a node."""

import json
import shutil
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from sluice.protocol.grammar import Matcher
from sluice.protocol.messages import ChoiceFailed, FinishReason, InvalidRequest, NodeError
from sluice.transfer.local_transport import LocalTransport

sys.path.insert(0, str(Path(__file__).parent))

from attempts import attempt

VOCAB = 512
POISON = 77  # the token whose embedding is NaN in the poisoned checkpoint
MODEL = Path(__file__).parents[2] / "deploy/models/tiny-v4"  # it has a tokenizer
SLOW = json.dumps({"type": "integer", "multipleOf": 99_991})  # more than half a second's work
GROWS_TOO_LARGE = json.dumps({"type": "string", "pattern": "(([a-z]{1,50}){1,50}){1,50}"})

numbers = st.one_of(
    st.floats(),
    st.integers(),
    st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**400, 1e-60, 1e-300, 5e-324, 0.5, 3, 1]),
)
some_numbers = st.dictionaries(
    st.sampled_from(
        ["temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "presence_penalty",
         "frequency_penalty", "repetition_penalty", "num_top_logprobs", "max_tokens"]
    ),
    numbers,
    min_size=1,
    max_size=3,
)  # fmt: skip


@pytest.fixture
def pair(tiny_checkpoint, config_of, start_local):
    return start_local(config_of(tiny_checkpoint))


@pytest.fixture(scope="module")
def poisoned(tiny_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("poisoned") / "checkpoint"
    shutil.copytree(tiny_checkpoint, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def outcome(pair, request):
    """Tokens, and the error that ended them."""
    request = attempt(request)
    grant = pair.reserve(request)
    try:
        first = pair.prefill.run(request, grant).result(30)
    except (NodeError, InvalidRequest) as error:
        pair.decode.release(grant.request_id, in_flight=False).result(10)
        return [], error
    tokens, error = [first.token_id], None
    if first.finish_reason is None:
        more, error = pair.finish(grant)
        tokens += more
    pair.decode.release(grant.request_id, in_flight=False).result(10)
    return tokens, error


def failures(node_metrics):
    return {
        labels["reason"]: value
        for family in node_metrics.families()
        for name, labels, value in family.samples
        if name == "sluice:node_request_failures_total"
    }


def test_numbers_are_refused_or_computed_with_and_the_nodes_live_on(pair, make_request):
    plain = make_request(20, vocab_size=VOCAB)
    expected = outcome(pair, plain)

    @settings(
        max_examples=60,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(some_numbers)
    def ask(fields):
        good = attempt(plain)
        bad = replace(good, sampling=replace(plain.sampling, **fields))
        grant = pair.reserve(good)  # so that prefill sees the numbers in any case
        try:
            pair.prefill.run(bad, grant).result(30)
        except InvalidRequest:
            with pytest.raises(InvalidRequest):
                pair.reserve(attempt(bad))
        finally:
            pair.prefill.abort(grant.request_id).result(10)
            pair.decode.release(grant.request_id, in_flight=False).result(10)

    ask()
    assert outcome(pair, plain) == expected
    assert pair.used_pages() == 0


@pytest.mark.parametrize(
    "tokens",
    [(VOCAB,), (-1,), (2**63,), (3,) * 2000, ()],
    ids=["over", "under", "huge", "long", "no"],
)
def test_prompts_that_the_model_cannot_take_are_refused(tokens, pair, make_request):
    request = make_request(20, vocab_size=VOCAB)
    with pytest.raises(InvalidRequest, match="prompt|max_tokens"):
        pair.reserve(replace(request, prompt_token_ids=tokens))
    outcome(pair, request)


def test_a_schema_that_takes_its_time_holds_up_no_other_request(
    config_of, start_local, make_request
):
    pair = start_local(config_of(MODEL))
    plain = make_request(20, vocab_size=VOCAB)
    slow = replace(plain, request_id="slow", sampling=replace(plain.sampling, json_schema=SLOW))
    reserving = pair.decode.reserve(slow)
    tokens, error = outcome(pair, plain)
    assert len(tokens) == 8 and error is None
    assert not reserving.done(), "it was not slow enough to show anything"
    grant = reserving.result(30)

    running = pair.prefill.run(slow, grant)
    assert outcome(pair, plain)[0] == tokens
    assert not running.done()
    assert running.result(30).token_id >= 0
    pair.decode.release(grant.request_id, in_flight=False).result(10)


def test_a_slow_grammar_sits_out_and_gets_the_same_tokens(
    config_of, start_local, make_request, monkeypatch
):
    pair = start_local(config_of(MODEL))
    plain = make_request(20, vocab_size=VOCAB)
    schema = json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 3})
    slow = make_request(21, vocab_size=VOCAB, json_schema=schema, max_tokens=12, temperature=1.0)
    expected = [outcome(pair, plain), outcome(pair, slow)]
    asked, let_go, look_ahead = threading.Event(), threading.Event(), Matcher.look_ahead

    def late(matcher, output):
        if threading.current_thread().name.startswith("d-masks"):
            asked.set()
            assert let_go.wait(30)
        look_ahead(matcher, output)

    monkeypatch.setattr(Matcher, "look_ahead", late)
    slow = attempt(slow)
    grant = pair.reserve(slow)
    tokens = [pair.prefill.run(slow, grant).result(30).token_id]
    assert asked.wait(30)
    assert outcome(pair, plain) == expected[0]  # while the other one waits
    let_go.set()
    more, error = pair.finish(grant)
    assert ([*tokens, *more], error) == expected[1]


def test_a_grammar_that_cannot_go_on_is_the_clients_fault(config_of, start_local, make_request):
    pair = start_local(config_of(MODEL))
    schema = dict(json_schema=GROWS_TOO_LARGE, temperature=2.0)
    request = make_request(20, vocab_size=VOCAB, max_tokens=400, **schema)
    grant = pair.reserve(request)
    first = pair.prefill.run(request, grant).result(30)
    causes = []
    while not causes:
        causes = [chunk.cause for chunk in pair.chunks.get(timeout=30) if chunk.error]
    assert first.finish_reason is None
    assert isinstance(causes[0], InvalidRequest) and causes[0].param == "response_format"


def test_a_tokenizer_without_grammars_is_served_without_schemas(
    tmp_path, config_of, start_local, make_request
):
    folder = tmp_path / "odd"
    shutil.copytree(MODEL, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["decoder"] = {"type": "Fuse"}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    pair = start_local(config_of(folder))
    assert outcome(pair, make_request(20, vocab_size=VOCAB))[1] is None
    with pytest.raises(InvalidRequest, match="response_format: .*tokenizer"):
        pair.reserve(make_request(20, vocab_size=VOCAB, json_schema="{}"))


@pytest.mark.parametrize("token", [-1, VOCAB, 2**40])
def test_a_first_token_out_of_the_vocabulary_ends_its_request_alone(
    token, pair, make_request, monkeypatch
):
    request = make_request(20, vocab_size=VOCAB)
    expected, take = outcome(pair, request), pair.decode._take_arrival
    monkeypatch.setattr(
        pair.decode, "_take_arrival", lambda s, a: take(s, replace(a, first_token=token))
    )
    tokens, error = outcome(pair, request)
    assert len(tokens) == 1 and "first token" in error
    monkeypatch.undo()
    assert outcome(pair, request) == expected


def test_damaged_rows_end_their_request_and_leave_the_batch_alone(
    poisoned, config_of, start_local, single_of, make_request
):
    config = config_of(poisoned)
    pair = start_local(config)
    others = [make_request(n, vocab_size=POISON, seed=n, max_tokens=30) for n in (20, 33, 60)]
    expected = [single_of(config).generate(request)[0] for request in others]
    forced = make_request(25, vocab_size=POISON, logit_bias=((POISON, 100.0),))
    requests = [others[0], forced, *others[1:]]
    grants = [pair.reserve(request) for request in requests]
    firsts = [pair.prefill.run(r, g).result(30) for r, g in zip(requests, grants, strict=True)]
    tokens = {g.request_id: [f.token_id] for g, f in zip(grants, firsts, strict=True)}
    causes = {}
    while len(causes) < len(grants):
        for chunk in pair.chunks.get(timeout=30):
            tokens[chunk.request_id] += chunk.token_ids
            if chunk.finish_reason is not None or chunk.error is not None:
                causes[chunk.request_id] = chunk.cause
    assert [tokens[request.request_id] for request in others] == expected
    assert tokens[forced.request_id] == [POISON]
    assert isinstance(causes.pop(forced.request_id), ChoiceFailed)
    assert set(causes.values()) == {None}
    assert failures(pair.decode.metrics) == {"ChoiceFailed": 1}


def test_a_prompt_whose_logits_are_no_numbers_is_an_error_not_an_answer(
    poisoned, config_of, start_local, make_request
):
    pair = start_local(config_of(poisoned, prefill={"prefix_cache": True}))
    good = make_request(60, vocab_size=POISON)
    expected = outcome(pair, good)
    bad = replace(good, request_id="bad", prompt_token_ids=(*good.prompt_token_ids[:30], POISON))
    for _ in range(2):
        tokens, error = outcome(pair, bad)
        assert tokens == [] and isinstance(error, ChoiceFailed)
    assert outcome(pair, good) == expected
    assert failures(pair.prefill.metrics) == {"ChoiceFailed": 2}
    assert pair.used_pages() == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("step", ["expire", "cache_history"])
def test_what_breaks_after_a_step_ends_its_request_alone(
    role, step, pair, make_request, monkeypatch
):
    good, bad = (make_request(30, vocab_size=VOCAB, seed=seed, max_tokens=20) for seed in (1, 2))
    expected = outcome(pair, good)
    good = attempt(good)
    grants = [pair.reserve(good), pair.reserve(bad)]
    manager = getattr(pair, role).runner.manager
    sound = getattr(manager, step)

    def trip(grant_id, *arguments):
        if grant_id == grants[1].grant_id:
            raise RuntimeError("tripped")
        return sound(grant_id, *arguments)

    monkeypatch.setattr(manager, step, trip)
    runs = [pair.prefill.run(r, g) for r, g in zip((good, bad), grants, strict=True)]
    tokens, errors = [runs[0].result(30).token_id], []
    if role == "prefill":
        with pytest.raises(NodeError, match="tripped"):
            runs[1].result(30)
    reason = None
    while reason is None or (role == "decode" and not errors):
        for chunk in pair.chunks.get(timeout=30):
            if chunk.request_id == good.request_id:
                tokens += chunk.token_ids
                reason = chunk.finish_reason
            elif chunk.error:
                errors.append(chunk.error)
    assert (tokens, None) == expected and all("tripped" in error for error in errors)
    for grant in grants:
        pair.decode.release(grant.request_id, in_flight=False).result(10)
    assert pair.used_pages() == 0


class CountingTransport(LocalTransport):
    """Counts what is posted."""

    num_posts = 0

    def post(self, *arguments):
        self.num_posts += 1
        return super().post(*arguments)


def test_a_request_that_ends_with_its_first_token_is_not_sent(
    tiny_checkpoint, config_of, start_local, make_request
):
    pair = start_local(config_of(tiny_checkpoint), send_through=CountingTransport)
    request = make_request(20, vocab_size=VOCAB, max_tokens=1)
    grant = pair.reserve(request)
    assert pair.prefill.run(request, grant).result(30).finish_reason is FinishReason.LENGTH
    assert pair.prefill._sender._transport.num_posts == 0
