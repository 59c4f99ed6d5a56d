"""What a request may ask: whatever number comes, it is refused, or a step computes with it."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.engine.checks import checked_tokens
from sluice.engine.choice import choose
from sluice.engine.request import Request
from sluice.protocol.messages import GenerateRequest, InvalidRequest, SamplingParams

VOCAB = 50
MAX_MODEL_LEN = 64
GOOD = GenerateRequest("r", (3, 4, 5), SamplingParams(max_tokens=8, stop_token_ids=(1,)), (6,))

numbers = st.one_of(
    st.floats(),  # infinities, NaN and denormals too
    st.floats(0, 2),
    st.integers(),
    st.integers(-3, VOCAB + 3),
    st.sampled_from([2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 1e-60, 1e-300, 5e-324, True]),
)
ids = st.one_of(st.integers(0, VOCAB - 1), numbers)
fields = {
    "max_tokens": numbers,
    "temperature": numbers,
    "top_p": numbers,
    "top_k": numbers,
    "min_p": numbers,
    "seed": numbers,
    "stop_token_ids": st.lists(ids, max_size=4).map(tuple),
    "min_tokens": numbers,
    "presence_penalty": numbers,
    "frequency_penalty": numbers,
    "repetition_penalty": numbers,
    "logit_bias": st.lists(st.tuples(ids, numbers), max_size=4).map(tuple),
    "num_top_logprobs": st.none() | numbers,
}
some_of_them = st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: fields[name] for name in names})
)
logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0)) * 5


def taken(request):
    return checked_tokens(request, vocab_size=VOCAB, max_model_len=MAX_MODEL_LEN)


@settings(max_examples=400, derandomize=True, database=None, deadline=None)
@given(some_of_them)
def test_numbers_are_refused_or_a_token_is_chosen_with_them(numbers):
    request = replace(GOOD, sampling=replace(GOOD.sampling, **numbers))
    try:
        token_ids = taken(request)
    except InvalidRequest as error:
        assert error.param and len(str(error)) < 300
        return
    [choice] = choose(logits, [Request.of(request, "g", token_ids=token_ids)])
    assert choice.error is None and 0 <= choice.token_id < VOCAB


@settings(max_examples=100, derandomize=True, database=None, deadline=None)
@given(st.lists(ids, max_size=5).map(tuple), st.lists(ids, max_size=5).map(tuple))
def test_tokens_are_refused_or_all_in_the_vocabulary(prompt, emitted):
    try:
        token_ids = taken(replace(GOOD, prompt_token_ids=prompt, emitted_token_ids=emitted))
    except InvalidRequest as error:
        assert error.param in ("prompt", "max_tokens")
        return
    assert list(token_ids) == [*prompt, *emitted] and prompt
    assert all(0 <= token < VOCAB for token in token_ids)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        (dict(max_tokens=MAX_MODEL_LEN - 2), "max_tokens"),
        (dict(max_tokens=1), "max_tokens"),  # it is out already
        (dict(min_tokens=9), "min_tokens"),
        (dict(top_k=2**63), "top_k"),
        (dict(repetition_penalty=1e-60), "repetition_penalty"),
        (dict(logit_bias=((VOCAB, 1.0),)), "logit_bias"),
        (dict(logit_bias=((1, float("nan")),)), "logit_bias"),
        (dict(stop_token_ids=(-1,)), "stop_token_ids"),
    ],
    ids=str,
)
def test_a_refusal_names_the_field(changes, param):
    with pytest.raises(InvalidRequest, match=f"^{param}.*expected") as refusal:
        taken(replace(GOOD, sampling=replace(GOOD.sampling, **changes)))
    assert refusal.value.param == param
