"""The native path's own properties; test_oracle.py holds it to transformers' logits.

Its cost in bytes is printed: `pytest -s tests/model/test_native.py`.
"""

import dataclasses
import random
from pathlib import Path

import pytest
import torch

from sluice.cache.spec import Full
from sluice.model.make_checkpoint import TINY
from sluice.model.presets import PRESETS, preset_pools
from sluice.model.registry import declare_pools, load_model
from sluice.model.v4.config import LayerType, read_config
from sluice.model.v4.pools import declare, declare_native

TRAINED = Path(__file__).parents[2] / "deploy" / "models" / "tiny-v4"


def bytes_per_token(specs):
    return sum(s.page_bytes / s.tokens_per_page for s in specs if isinstance(s.retention, Full))


def test_one_pool_of_all_layers_holds_everything():
    [spec] = declare_pools(TRAINED, "native", "bfloat16")
    assert (spec.name, spec.dtype, spec.retention) == ("kv", "float32", Full())
    assert spec.layers == tuple(range(5))
    assert spec.row_shape == (64 + 2 * 2 * 64 + 2 * 2 * 64,), "the CSA layers', the widest"


def test_rows_are_no_wider_than_the_layers_that_there_are():
    layers = (LayerType.SLIDING, LayerType.HCA)
    config = dataclasses.replace(TINY, layer_types=layers, mlp_types=TINY.mlp_types[:2])
    assert declare_native(config)[0].row_shape == (32 + 2 * 32,)
    config = dataclasses.replace(config, layer_types=(LayerType.SLIDING,) * 2)
    assert declare_native(config)[0].row_shape == (32,)


@pytest.mark.parametrize(
    ("name", "hybrid", "native"),
    [("tiny-v4", 260, 11_520), ("v4-flash", 6880, 528_384), ("v4-pro", 9848, 749_568)],
)
def test_bytes_per_token_are_the_price(name, hybrid, native):
    config = PRESETS[name] if name in PRESETS else read_config(TRAINED)
    pools = preset_pools(name, "bfloat16") if name in PRESETS else declare(config)
    found = bytes_per_token(pools), bytes_per_token(declare_native(config))
    print(
        f"{name}: hybrid {found[0]:,} native {found[1]:,} bytes a token, {found[1] / found[0]:.1f}x"
    )
    assert found == (hybrid, native)


@pytest.mark.parametrize("tokens_per_page", [1, 4, 7, 16, 100])
def test_any_page_size_gives_the_same(tokens_per_page, tiny_checkpoint, driver):
    """Pages need not hold whole blocks: a role may choose any size."""
    model = load_model(tiny_checkpoint, cache_path="native")
    ids = [(i * 37) % TINY.vocab_size for i in range(90)]
    expected = driver(model).run("r", ids, [90])
    specs = [dataclasses.replace(model.specs[0], tokens_per_page=tokens_per_page)]
    torch.testing.assert_close(driver(model, specs=specs).run("r", ids, [41, 1, 48]), expected)


def test_bfloat16_rows_are_rounded_as_on_the_hybrid_path(driver):
    """Logits differ by rounding alone, far less than bfloat16 itself costs."""
    rng = random.Random(0)
    ids = [rng.randrange(3, 2048) for _ in range(300)]
    exact = driver(load_model(TRAINED)).run("r", ids, [300])
    hybrid, native = (
        driver(load_model(TRAINED, cache_path=path, dtype="bfloat16")).run("r", ids, [250, 1, 49])
        for path in ("hybrid", "native")
    )
    assert (native - hybrid).abs().mean() < (hybrid - exact).abs().mean() / 10
