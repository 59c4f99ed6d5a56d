"""The trained checkpoint continues as recorded when it runs over pool pages."""

import json
from pathlib import Path

import pytest

from sluice.model.registry import load_model

FOLDER = Path(__file__).parents[2] / "deploy" / "models" / "tiny-v4"
PAIRS = json.loads((FOLDER / "golden.json").read_text(encoding="utf-8"))["pairs"]


@pytest.fixture(scope="module")
def trained():
    return load_model(FOLDER)


def greedy(run, prompt, num_tokens, chunk_size):
    sizes = [chunk_size] * (len(prompt) // chunk_size)
    sizes += [len(prompt) - sum(sizes)] if sum(sizes) < len(prompt) else []
    output = [int(run.run("r", prompt, sizes)[-1].argmax())]
    while len(output) < num_tokens:
        logits = run.step({"r": [output[-1]]}, all_logits=False)["r"]
        output.append(int(logits.argmax()))
    return output


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_greedy_tokens_equal_the_recorded_ones(number, trained, driver):
    pair = PAIRS[number]
    run = driver(trained, num_pages=60 + 512 // 8, seed=number)
    expected = pair["completion_ids"]
    output = greedy(run, pair["prompt_ids"], len(expected), chunk_size=257)
    assert output == expected, f"{pair['kind']}: margins {pair['top2_logit_margin']}"


def test_bfloat16_recalls_the_needle(driver):
    model = load_model(FOLDER, dtype="bfloat16")
    pair = next(pair for pair in PAIRS if pair["kind"] == "needle at distance 512")
    run = driver(model, num_pages=60 + 512 // 8)
    output = greedy(run, pair["prompt_ids"], 4, chunk_size=512)
    assert output == pair["completion_ids"]
    assert run.pools["swa_kv"].tensor.element_size() == 2
