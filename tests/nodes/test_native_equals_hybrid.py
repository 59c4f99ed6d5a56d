"""Native and hybrid give the same tokens at temperature 0 in fp32, through prefill and decode."""

import json
from pathlib import Path

import pytest

from sluice.protocol.messages import GenerateRequest, SamplingParams

TRAINED = Path(__file__).parents[2] / "deploy" / "models" / "tiny-v4"  # ratios 4 and 128, window 32
PROMPTS = [
    pair["prompt_ids"] for pair in json.loads((TRAINED / "golden.json").read_text("utf-8"))["pairs"]
]
BOUNDARIES = [n + d for n in (4, 32, 64, 128, 512) for d in (-1, 0, 1)]
LONG = [1000, 2047, 3001, 3999, 4000]


@pytest.fixture
def paths_of(config_of, start_local):
    """The same checkpoint on PD pairs of both paths; chunks are no whole number of blocks."""

    def paths(checkpoint, *, chunk_tokens, start_native=start_local):
        pairs = []
        for path, start in (("hybrid", start_local), ("native", start_native)):
            config = config_of(
                checkpoint,
                model={"cache_path": path, "max_model_len": 4096},
                prefill={"max_batch_tokens": chunk_tokens, "cache_bytes": 160 << 20},
                decode={"cache_bytes": 160 << 20},
            )
            pairs.append(start(config))
        return pairs

    return paths


def same(hybrid, native, request):
    expected, _ = hybrid.generate(request)
    tokens, arrived = native.generate(request)
    assert tokens == expected, request.request_id
    assert len(tokens) == 1 or list(arrived) == ["kv"]


def test_real_text_of_the_trained_model(paths_of):
    hybrid, native = paths_of(TRAINED, chunk_tokens=500)
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=12 if len(prompt) < 500 else 6, temperature=0.0)
        same(hybrid, native, GenerateRequest(f"golden-{number}", tuple(prompt), params))
    assert hybrid.used_pages() == native.used_pages() == 0


def test_random_prompts_up_to_4000_tokens(paths_of, make_request):
    hybrid, native = paths_of(TRAINED, chunk_tokens=500)
    for num_tokens in BOUNDARIES + LONG:
        max_tokens = 6 if num_tokens < 1000 else 3
        same(hybrid, native, make_request(num_tokens, vocab_size=2048, max_tokens=max_tokens))


def test_random_weights_over_nixl_in_two_processes(
    paths_of, start_pair, tiny_checkpoint, make_request
):
    hybrid, native = paths_of(tiny_checkpoint, chunk_tokens=48, start_native=start_pair)
    for seed, num_tokens in enumerate((1, 8, 15, 16, 64, 129, 205, 256, 333, 700)):
        same(hybrid, native, make_request(num_tokens, vocab_size=512, seed=seed, max_tokens=16))
    native.decode.zero("kv")
    request = make_request(205, vocab_size=512, max_tokens=16)
    assert native.generate(request)[0] != hybrid.generate(request)[0]
