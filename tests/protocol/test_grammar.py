"""Grammars: random logits under a mask give a JSON text that its schema allows."""

import json
from dataclasses import replace

import pytest
import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sluice.engine.choice import choose
from sluice.engine.request import Request
from sluice.protocol.grammar import Grammars
from sluice.protocol.messages import GenerateRequest, InvalidRequest, SamplingParams

EOS = 1
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"enum": ["cat", "hat"]}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(['{"name": "cat", "ok": true}'] * 9, trainer)
    return tokenizer


@pytest.fixture(scope="module")
def grammars(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("grammar")
    tokenizer.save(str(folder / "tokenizer.json"))
    return Grammars(folder, vocab_size=320, eos_token_ids=(EOS,))  # 320: wider than the tokenizer


def request(grammars, emitted=(), seed=0, max_tokens=200):
    params = SamplingParams(max_tokens, seed=seed, stop_token_ids=(EOS,), json_schema=SCHEMA)
    attempt = GenerateRequest("r", (5, 6), params, tuple(emitted))
    return Request.of(attempt, "g", grammars.matcher(SCHEMA))


def generate(asked, likely=()):
    """Output under random logits that depend on the position only; `likely` tokens stand out."""
    while True:
        generator = torch.Generator().manual_seed(asked.num_output_tokens)
        logits = torch.randn(1, 320, generator=generator)
        logits[0, list(likely)] += 50.0
        [choice] = choose(logits, [asked])
        assert choice.error is None
        if asked.append(choice.token_id) is not None:
            return asked.token_ids[2:]


@pytest.mark.parametrize("seed", range(5))
def test_the_output_is_a_json_text_of_the_schema_and_then_ends(seed, grammars, tokenizer):
    output = generate(request(grammars, seed=seed))
    assert output[-1] == EOS
    value = json.loads(tokenizer.decode(output[:-1]))
    assert value["name"] in ("cat", "hat") and isinstance(value["ok"], bool)


def test_a_model_that_loves_white_space_comes_to_an_end(grammars, tokenizer):
    likely = [tokenizer.encode(space).ids[0] for space in (" ", "\n", "\t")]
    assert generate(request(grammars, max_tokens=400), likely)[-1] == EOS


def test_a_request_goes_on_after_a_fail_over_where_it_was(grammars):
    whole = generate(request(grammars))
    for cut in range(1, len(whole)):
        assert generate(request(grammars, emitted=whole[:cut])) == whole


def test_schemas_that_cannot_be_followed_are_refused(grammars, tmp_path):
    with pytest.raises(InvalidRequest, match="Invalid type"):
        grammars.matcher('{"type": "objct"}')
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json"):
        Grammars(tmp_path, vocab_size=320, eos_token_ids=()).matcher(SCHEMA)


def test_any_stop_token_may_end_a_complete_text(grammars, tokenizer):
    text = tokenizer.encode('{"name": "cat", "ok": true}').ids
    asked = request(grammars, emitted=text)
    asked.sampling = replace(asked.sampling, stop_token_ids=(9,), temperature=0.0)
    row = torch.zeros(1, 320)
    row[0, 9] = 1.0
    assert choose(row, [asked])[0].token_id == 9


def test_a_token_outside_the_grammar_is_an_error_that_does_not_quote_it(grammars, tokenizer):
    strayed = request(grammars, emitted=[7])
    [choice] = choose(torch.zeros(1, 320), [strayed])
    assert isinstance(choice.error, InvalidRequest) and choice.error.param == "response_format"
    assert tokenizer.decode([7]) not in str(choice.error)


def test_an_output_follows_any_grammar_that_comes_with_the_request(grammars, tokenizer):
    grammar = LLMatcher.grammar_from_lark('start: "cat" ("," "cat")~2')
    params = SamplingParams(50, stop_token_ids=(EOS,), grammar=grammar)
    asked = Request.of(
        GenerateRequest("r", (5,), params), "g", grammars.matcher_of(grammar, param="tools")
    )
    generate(asked)
    assert tokenizer.decode(asked.token_ids[1:]) == "cat,cat,cat"
