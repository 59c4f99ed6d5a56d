"""Pools in packed formats: what decode says stays near fp32, pool by pool.

The divergences are printed: `pytest -s tests/model/test_packed_pools.py`.
"""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from sluice.cache.row_format import RowFormat
from sluice.engine.runner import role_specs
from sluice.model.presets import V4_FLASH
from sluice.model.registry import load_model
from sluice.model.v4.pools import declare
from sluice.protocol.config import PoolConfig, RoleConfig
from sluice.protocol.messages import ConfigError

FOLDER = Path(__file__).parents[2] / "deploy" / "models" / "tiny-v4"
PAIRS = json.loads((FOLDER / "golden.json").read_text(encoding="utf-8"))["pairs"]
KINDS = ("needle at distance 512", "chat", "text")
MAX_DIVERGENCE = 0.015  # nats, mean over decoded tokens: the bound of SGLang's own test
EVERYTHING = {"swa_kv": "fp8_v4", "c4_kv": "fp8_v4", "c128_kv": "fp8_v4", "c4_index_k": "fp4"}
CHOICES = [
    *({name: form} for name, form in EVERYTHING.items()),
    {"c4_index_k": "fp8"},
    EVERYTHING,
]


@pytest.fixture(scope="module")
def trained():
    return load_model(FOLDER)


def stored_as(specs, formats):
    return tuple(spec.stored_as(formats.get(spec.name, spec.dtype)) for spec in specs)


def decoded(run, pair):
    """Log-probabilities [num_tokens, vocab] at each recorded token, decoded one by one."""
    prompt, output = pair["prompt_ids"], pair["completion_ids"]
    run.run("r", prompt, [len(prompt)])
    logits = [run.step({"r": [token]}, all_logits=False)["r"] for token in output]
    run.release("r")
    return torch.cat(logits).log_softmax(-1)


@pytest.mark.parametrize("formats", CHOICES, ids=lambda formats: "+".join(formats.values()))
def test_decode_diverges_little_from_fp32(formats, trained, driver):
    pairs = [next(pair for pair in PAIRS if pair["kind"] == kind) for kind in KINDS]
    exact, packed = driver(trained), driver(trained, specs=stored_as(trained.specs, formats))
    expected = torch.cat([decoded(exact, pair) for pair in pairs])
    found = torch.cat([decoded(packed, pair) for pair in pairs])
    divergence = (expected.exp() * (expected - found)).sum(-1)
    print(f"{formats}: mean {divergence.mean():.5f}, largest {divergence.max():.5f} nats")
    assert 0 < divergence.mean() < MAX_DIVERGENCE


def test_the_chunking_of_a_prompt_does_not_matter(trained, driver):
    """Long chunks unpack whole pages, single tokens the rows they see."""
    specs, ids = stored_as(trained.specs, EVERYTHING), PAIRS[4]["prompt_ids"]
    whole = driver(trained, specs=specs).run("r", ids, [len(ids)])
    parts = driver(trained, specs=specs).run("r", ids, [len(ids) - 40, *[1] * 40])
    torch.testing.assert_close(parts[-41:], whole[-41:], atol=0.02, rtol=0)


def test_packed_rows_take_the_published_bytes():
    specs = {spec.name: spec for spec in stored_as(declare(V4_FLASH), EVERYTHING)}
    assert {name: specs[name].row_bytes for name in EVERYTHING} == {
        "swa_kv": 584, "c4_kv": 584, "c128_kv": 584, "c4_index_k": 68,
    }  # fmt: skip
    assert specs["swa_kv"].page_shape == (43, 64, 584)


@pytest.mark.parametrize(
    ("pool", "dtype", "expected"),
    [
        ("swa_kv", "fp4", "pool swa_kv: dtype is 'fp4', expected float32 or bfloat16 or fp8_v4"),
        ("c4_index_k", "fp8_v4", "float32 or bfloat16 or fp8 or fp4"),
        ("c4_state", "bfloat16", "pool c4_state: dtype is 'bfloat16', expected float32,"),
    ],
)
def test_a_format_that_the_model_does_not_declare_is_refused(pool, dtype, expected):
    role = RoleConfig(pools={pool: PoolConfig(dtype=dtype)})
    with pytest.raises(ConfigError, match=expected):
        role_specs(declare(V4_FLASH), role)


def test_index_keys_of_a_size_without_a_hadamard_matrix_cannot_be_packed():
    specs = declare(dataclasses.replace(V4_FLASH, index_head_dim=96))
    [index] = [spec for spec in specs if spec.name == "c4_index_k"]
    assert not any(isinstance(choice, RowFormat) for choice in index.choices)
