"""A whole step through the Triton kernels gives the logits that their references give."""

import dataclasses
import importlib
import pkgutil
from pathlib import Path

import pytest
import torch
from released import RELEASED, released_tensors, write_released

import sluice.kernels
from sluice.model.registry import load_model

FOLDER = Path(__file__).parents[3] / "deploy" / "models" / "tiny-v4"
PACKED = {"swa_kv": "fp8_v4", "c4_kv": "fp8_v4", "c128_kv": "fp8_v4", "c4_index_k": "fp4"}


def use_kernels(monkeypatch, wanted):
    for module in pkgutil.iter_modules(sluice.kernels.__path__):
        name = f"sluice.kernels.{module.name}"
        if hasattr(importlib.import_module(name), "runs_triton"):
            monkeypatch.setattr(f"{name}.runs_triton", lambda tensor: wanted)


def logits(model, driver, monkeypatch, *, kernels):
    """Of a chunk that completes rows of both ratios beside a new prompt, then of one token each."""
    run = driver(model, num_pages=20, seed=1)
    ids = torch.arange(5, 140).tolist()
    use_kernels(monkeypatch, False)
    run.step({"long": ids[:126]})
    use_kernels(monkeypatch, kernels)
    mixed = run.step({"long": ids[126:129], "new": [7, 8, 9, 7, 8]})
    single = run.step({"long": ids[129:130], "new": [9]})
    return torch.cat([*mixed.values(), *single.values()])


@pytest.mark.parametrize("cache_path", ["hybrid", "native"])
def test_a_step_through_the_kernels_equals_the_references(cache_path, driver, monkeypatch):
    model = load_model(FOLDER, cache_path=cache_path)
    expected = logits(model, driver, monkeypatch, kernels=False)
    actual = logits(model, driver, monkeypatch, kernels=True)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_a_token_over_packed_pools_is_computed_as_by_the_references(driver, monkeypatch):
    """It completes a row of both ratios."""
    model, ids = load_model(FOLDER), torch.arange(5, 133).tolist()
    specs = tuple(spec.stored_as(PACKED.get(spec.name, spec.dtype)) for spec in model.specs)
    results = []
    for kernels in (False, True):
        run = driver(model, specs=specs, num_pages=20, seed=1)
        use_kernels(monkeypatch, False)
        run.step({"r": ids[:127]})
        use_kernels(monkeypatch, kernels)
        results.append(run.step({"r": ids[127:]})["r"])
    # What falls to the other side of a tie of its code moves logits by more than fp32 does.
    torch.testing.assert_close(results[1], results[0], atol=0.05, rtol=0)


def test_a_step_multiplies_released_weights_as_the_references_do(tmp_path, driver, monkeypatch):
    # All experts and all rows are chosen, so that rounding changes no choice.
    config = dataclasses.replace(
        RELEASED,
        num_experts=2,
        index_topk=64,
        layer_types=RELEASED.layer_types[1:3],
        mlp_types=RELEASED.mlp_types[1:3],
    )
    write_released(tmp_path, released_tensors(config), config)
    results = []
    for kernels in (False, True):
        use_kernels(monkeypatch, kernels)
        run = driver(load_model(tmp_path), num_pages=20, seed=1)
        results.append(
            torch.cat([run.step({"r": [5, 6, 7, 8, 9]})["r"], run.step({"r": [4]})["r"]])
        )
    # What falls to the other side of a tie of its code moves logits by more than fp32 does.
    torch.testing.assert_close(results[1], results[0], atol=0.05, rtol=0)
