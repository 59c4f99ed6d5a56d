"""Checkpoints as released, FP8 and FP4: dequantised exactly, or multiplied with as stored."""

import dataclasses
import json
import math

import pytest
import torch
from released import (
    RELEASED,
    dequantised,
    form_of,
    official_config,
    released_tensors,
    write_released,
)

from sluice.engine.runner import Runner
from sluice.kernels.matmul import BlockScaled
from sluice.model.common.checkpoint import read_weights
from sluice.model.presets import V4_FLASH
from sluice.model.registry import load_model
from sluice.model.v4.config import parse_config
from sluice.model.v4.inventory import tensor_shapes
from sluice.protocol.config import parse_config as config_of
from sluice.protocol.messages import ConfigError, Role

BYTES = {  # with the scales
    "fp8": lambda out, channels: out * channels + -(-out // 128) * -(-channels // 128),
    "fp4": lambda out, channels: out * channels // 2 + out * channels // 32,
    "bf16": lambda *shape: 2 * math.prod(shape),
    "fp32": lambda *shape: 4 * math.prod(shape),
    "i64": lambda *shape: 8 * math.prod(shape),
}
IDS = torch.arange(3, 43).tolist()


@pytest.fixture
def logits(driver):
    """(folder, how to load) -> logits of a prompt in three chunks."""
    return lambda folder, **how: driver(load_model(folder, **how)).run("r", IDS, [13, 1, 26])


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def plain(weights):
    return {n: w.plain() if isinstance(w, BlockScaled) else w for n, w in weights.items()}


def test_the_form_of_these_tests_is_the_releases():
    """By V4-Flash's published totals, less those of its MTP layer."""
    shapes = tensor_shapes(V4_FLASH)
    forms = {name: form_of(name) for name in shapes}
    num_scales = sum(form in ("fp8", "fp4") for form in forms.values())
    assert len(shapes) + num_scales == 69_187 - 1_575
    num_bytes = sum(BYTES[forms[name]](*shape) for name, shape in shapes.items())
    assert num_bytes == 159_609_485_896 - 3_593_787_756


@pytest.mark.parametrize("experts", ["fp4", "fp8"])
def test_weights_are_read_to_the_bit(tmp_path, experts):
    tensors = released_tensors(RELEASED, experts=experts)
    write_released(tmp_path, tensors | {"mtp.0.e_proj.scale": torch.ones(1)})
    assert same(plain(read_weights(tmp_path)), dequantised(tensors))


@pytest.mark.parametrize("experts", ["fp4", "fp8"])
def test_a_dequantised_model_is_that_of_the_plain_weights(tmp_path, logits, experts):
    tensors = released_tensors(RELEASED, experts=experts)
    write_released(tmp_path / "released", tensors)
    write_released(tmp_path / "plain", dequantised(tensors))
    found = logits(tmp_path / "released", weights="dequantized")
    assert torch.equal(found, logits(tmp_path / "plain"))


@pytest.mark.parametrize("experts", ["fp4", "fp8"])
def test_a_model_as_stored_differs_by_the_rounding_of_activations(tmp_path, logits, experts):
    # All experts and all rows are chosen, so that rounding changes no choice.
    config = dataclasses.replace(RELEASED, num_experts=2, index_topk=64)
    write_released(tmp_path, released_tensors(config, experts=experts), config)
    expected = logits(tmp_path, weights="dequantized")
    error = (logits(tmp_path) - expected).std() / expected.std()
    assert 0.005 < error < 0.1  # e4m3 keeps three bits: 2 % of each factor, in five layers


def test_a_model_as_stored_holds_the_codes(tmp_path):
    write_released(tmp_path, released_tensors(RELEASED))
    stored = load_model(tmp_path, dtype="bfloat16").weights.layers[1]
    exact = load_model(tmp_path, dtype="bfloat16", weights="dequantized").weights.layers[1]
    for part, names in (
        ("attention", ("wq_a", "wq_b", "wkv", "wo_b")),
        ("moe", ("w13", "w2", "shared_w13", "shared_w2")),
    ):
        for name in names:
            kept, expected = (getattr(getattr(layer, part), name) for layer in (stored, exact))
            assert isinstance(kept, BlockScaled) and expected.dtype == torch.bfloat16
            assert torch.equal(kept.plain(), expected.float()), name
    assert isinstance(stored.attention.indexer.wq_b, BlockScaled)
    assert stored.attention.wo_a.dtype == torch.bfloat16, "the release multiplies it unrounded"


def test_peers_that_hold_weights_in_different_forms_are_told_apart(tmp_path):
    tensors = released_tensors(RELEASED)
    write_released(tmp_path / "released", tensors)
    write_released(tmp_path / "plain", dequantised(tensors))
    both = ("stored", "dequantized")
    released = {load_model(tmp_path / "released", weights=form).fingerprint for form in both}
    unquantised = {load_model(tmp_path / "plain", weights=form).fingerprint for form in both}
    assert len(released) == 2 and len(unquantised) == 1


@pytest.mark.parametrize("form", ["stored", "dequantized"])
def test_a_node_holds_weights_in_the_form_that_its_config_says(tmp_path, form):
    write_released(tmp_path, released_tensors(RELEASED))
    config = config_of({"model": {"path": tmp_path, "weights": form}})
    moe = Runner.load(config, Role.DECODE).model.weights.layers[0].moe
    assert isinstance(moe.w13, BlockScaled) == (form == "stored")


def in_transformers_names(tensors):
    """With experts in one tensor, and `weight_scale_inv`."""
    names = {n.replace(".scale", ".weight_scale_inv"): t for n, t in tensors.items()}
    for layer in range(RELEASED.num_layers):
        for part, ending in (("weight", ""), ("weight_scale_inv", "_scale_inv")):
            stem = f"layers.{layer}.ffn.experts"
            w1, w2, w3 = (
                torch.stack(
                    [
                        names.pop(f"{stem}.{e}.{w}.{part}").view(torch.uint8)
                        for e in range(RELEASED.num_experts)
                    ]
                )
                for w in ("w1", "w2", "w3")
            )
            names[f"{stem}.gate_up_proj{ending}"] = torch.cat([w1, w3], dim=1)
            names[f"{stem}.down_proj{ending}"] = w2
    return {f"model.{n.replace('.ffn.', '.mlp.')}": t for n, t in names.items()}


def test_transformers_names_are_read_alike(tmp_path):
    tensors = released_tensors(RELEASED)
    write_released(tmp_path, in_transformers_names(tensors))
    assert same(plain(read_weights(tmp_path)), dequantised(tensors))


WKV = "layers.0.attn.wkv"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{WKV}.scale"), rf"{WKV}\.weight is torch\.float8_e4m3fn without a"),
        (lambda t: t.pop(f"{WKV}.weight"), rf"{WKV}\.scale has no {WKV}\.weight"),
        (
            lambda t: t.update({f"{WKV}.scale": t[f"{WKV}.scale"][:, :1].contiguous()}),
            rf"{WKV}\.weight and its scale: .*\(32, 160\), scales \(1, 1\), expected .*\(1, 2\)",
        ),
        (
            lambda t: t.update({f"{WKV}.scale": torch.ones(1, 2)}),
            rf"{WKV}\.weight and its scale: scales are torch\.float32, expected float8_e8m0fnu",
        ),
        (
            lambda t: t.update({f"{WKV}.weight": torch.ones(32, 160)}),
            rf"{WKV}\.weight and its scale: codes are torch\.float32",
        ),
    ],
)
def test_codes_and_scales_that_do_not_fit_are_named(tmp_path, change, message):
    tensors = released_tensors(RELEASED)
    change(tensors)
    write_released(tmp_path, tensors)
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize("experts", ["fp4", "fp8"])
def test_a_width_that_codes_cannot_be_joined_at_is_refused(tmp_path, logits, experts):
    config = dataclasses.replace(RELEASED, expert_width=96)
    write_released(tmp_path, released_tensors(config, experts=experts), config)
    with pytest.raises(ConfigError, match=r"moe_intermediate_size is 96.* to dequantized"):
        load_model(tmp_path)
    assert logits(tmp_path, weights="dequantized").isfinite().all()


def test_experts_of_several_kinds_are_refused_as_stored(tmp_path, logits):
    tensors = released_tensors(RELEASED)
    name = "layers.2.ffn.experts.5.w2"
    tensors[f"{name}.weight"] = dequantised(tensors)[f"{name}.weight"]
    del tensors[f"{name}.scale"]
    write_released(tmp_path, tensors)
    with pytest.raises(ConfigError, match=r"layers\.2\.ffn\.experts: some weights are FP8"):
        load_model(tmp_path)
    assert logits(tmp_path, weights="dequantized").isfinite().all()


def test_other_blocks_are_refused_by_the_config():
    data = official_config(RELEASED)
    data["quantization_config"]["weight_block_size"] = [32, 32]
    with pytest.raises(ConfigError, match=r"quantization_config: weight_block_size is \[32, 32\]"):
        parse_config(json.loads(json.dumps(data)))
