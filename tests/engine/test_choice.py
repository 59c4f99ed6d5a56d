"""What a request asks of its tokens: penalties, biases, masks and reports, alone as in a batch."""

import random
from dataclasses import replace

import pytest
import torch

from sluice.engine.choice import choose
from sluice.engine.penalties import penalise
from sluice.engine.request import Request
from sluice.protocol.messages import ChoiceFailed, GenerateRequest, InvalidRequest, SamplingParams

VOCAB = 50
PROMPT = (3, 4, 4)


def request(output=(), **sampling):
    params = SamplingParams(max_tokens=20, **({"temperature": 0.0} | sampling))
    return Request.of(GenerateRequest("r", PROMPT, params, tuple(output)), "g")


def logits(rows=1, seed=0):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def token(row, asked):
    [choice] = choose(row, [asked])
    return choice.token_id


def ranked(row):
    return row[0].argsort(descending=True).tolist()


def slow_penalise(row, asked):
    """The formulas, one token at a time."""
    p, prompt, output = asked.sampling, asked.token_ids[:3], asked.token_ids[3:]
    result = row[0].clone()
    for t in range(VOCAB):
        if t in prompt or t in output:
            result[t] = result[t] / p.repetition_penalty if result[t] > 0 else result[t] * (
                p.repetition_penalty
            )  # fmt: skip
        result[t] -= p.frequency_penalty * output.count(t) + p.presence_penalty * (t in output)
    return result


def test_penalties_follow_their_formulas_over_a_growing_output():
    seed = random.randrange(2**32)
    print(f"seed={seed}")
    rng = random.Random(seed)
    penalties = dict(presence_penalty=0.7, frequency_penalty=-0.3, repetition_penalty=1.4)
    asked = request(**penalties)
    for step in range(12):
        row = logits(seed=step)
        assert torch.allclose(penalise(row, [asked])[0], slow_penalise(row, asked), atol=1e-5)
        asked.append(rng.randrange(VOCAB))


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_the_prompt_counts_for_repetition_only(name):
    row = torch.zeros(1, VOCAB)
    row[0, 4], row[0, 9] = 2.0, 1.0
    assert token(row, request(**{name: 2.0})) == 4
    assert token(row, request(repetition_penalty=3.0)) == 9


def test_emitted_tokens_count_as_output_after_a_fail_over():
    row, output = logits(), []
    settings = dict(presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.2)
    one_node = request(**settings)
    for _ in range(10):
        output.append(token(row, one_node))
        one_node.append(output[-1])
        assert token(row, request(output, **settings)) == token(row, one_node)
    assert len(set(output)) > 3


def test_a_bias_moves_the_choice_and_leaves_the_logits_alone():
    row = logits()
    before, [first, second, *_] = row.clone(), ranked(row)
    assert token(row, request(logit_bias=((first, -100.0),))) == second
    assert token(row, request(logit_bias=((7, 100.0),))) == 7
    assert torch.equal(row, before)


def test_no_stop_token_before_min_tokens():
    row = logits()
    [first, second, third, *_] = ranked(row)
    limits = dict(min_tokens=2, stop_token_ids=(first, second), logit_bias=((first, 50.0),))
    assert token(row, request([0], **limits)) == third
    assert token(row, request([0, 0], **limits)) == first


def test_min_p_keeps_what_is_likely_enough():
    row = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    drawn = {token(row, request(temperature=1.0, min_p=0.4, seed=s)) for s in range(200)}
    assert drawn == {0, 1}


def test_logprobs_are_the_models_own_whatever_is_drawn():
    row = logits()
    [choice] = choose(row, [request(logit_bias=((7, 100.0),), num_top_logprobs=3)])
    expected = row[0].log_softmax(-1)
    assert choice.token_id == 7
    assert choice.logprobs.chosen == pytest.approx(expected[7].item(), abs=1e-6)
    assert [t for t, _ in choice.logprobs.top] == ranked(row)[:3]
    assert choose(row, [request(num_top_logprobs=0)])[0].logprobs.top == ()
    assert choose(row, [request()])[0].logprobs is None


def test_a_choice_is_the_same_in_a_batch_as_alone():
    rows = logits(6)
    asked = [
        dict(temperature=0.8, seed=1, presence_penalty=1.0, num_top_logprobs=2),
        dict(),
        dict(temperature=1.0, seed=2, min_p=0.1, logit_bias=((3, 5.0), (9, -1.0))),
        dict(frequency_penalty=2.0, num_top_logprobs=5),
        dict(min_tokens=9, stop_token_ids=(1, 2), repetition_penalty=0.8),
        dict(temperature=0.5, seed=3, top_p=0.9, num_top_logprobs=0),
    ]
    together = choose(rows, [request([5, 6, 6], **fields) for fields in asked])
    for index, fields in enumerate(asked):
        assert choose(rows[index : index + 1], [request([5, 6, 6], **fields)]) == [together[index]]


def test_logits_from_inference_mode_can_be_adjusted():
    with torch.inference_mode():
        row = logits() + 0
    plain = replace(request().sampling, logit_bias=((7, 100.0),))
    assert token(row, request(logit_bias=plain.logit_bias, presence_penalty=1.0)) == 7


OTHERS = [
    dict(),
    dict(temperature=0.9, seed=1),
    dict(temperature=0.7, seed=2, top_p=0.8, num_top_logprobs=2),
    dict(presence_penalty=1.0, logit_bias=((3, 5.0),)),
]


def without(index, choices):
    return choices[:index] + choices[index + 1 :]


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("victim", range(len(OTHERS)))
def test_a_row_that_is_not_finite_ends_its_request_alone(number, victim):
    rows, asked = logits(4), [request([5], **fields) for fields in OTHERS]
    alone = choose(rows, asked)
    rows[victim, 17] = number
    choices = choose(rows, asked)
    assert isinstance(choices[victim].error, ChoiceFailed)
    assert without(victim, choices) == without(victim, alone)


@pytest.mark.parametrize("number", [torch.nan, -torch.inf])
def test_a_row_without_any_number_is_an_error(number):
    for fields in OTHERS:
        [choice] = choose(torch.full((1, VOCAB), number), [request([5], **fields)])
        assert isinstance(choice.error, ChoiceFailed) and "not finite" in str(choice.error)


@pytest.mark.parametrize("victim", range(4))
def test_what_raises_for_one_row_ends_its_request_alone(victim):
    rows, asked = logits(4), [request([5], **fields) for fields in OTHERS]
    alone = choose(rows, asked)
    asked[victim] = request([VOCAB + 7], frequency_penalty=1.0)  # no place to count it in
    choices = choose(rows, asked)
    assert isinstance(choices[victim].error, ChoiceFailed)
    assert without(victim, choices) == without(victim, alone)


def test_a_request_that_excludes_every_token_is_told_so():
    row, everything = logits(), tuple(range(VOCAB))
    [choice] = choose(row, [request(min_tokens=2, stop_token_ids=everything)])
    assert isinstance(choice.error, InvalidRequest) and "min_tokens" in str(choice.error)


def test_top_k_beyond_the_vocabulary_keeps_everything():
    for seed in range(20):
        asked = dict(temperature=1.0, seed=seed)
        assert token(logits(), request(top_k=2**31 - 1, **asked)) == token(
            logits(), request(**asked)
        )


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-6])
@pytest.mark.parametrize("more", [{}, {"top_p": 0.5}, {"min_p": 0.2}], ids=str)
def test_a_temperature_next_to_nothing_is_greedy(temperature, more):
    row = logits()
    row[0, 40] = row[0].max()
    assert token(row, request(temperature=temperature, seed=5, **more)) == token(row, request())
