"""A whole step through the Triton kernels gives the logits that their references give."""

import importlib
import pkgutil
from pathlib import Path

import pytest
import torch

import sluice.kernels
from sluice.model.registry import load_model

FOLDER = Path(__file__).parents[3] / "deploy" / "models" / "tiny-v4"


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
