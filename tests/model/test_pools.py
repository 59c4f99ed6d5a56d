"""The declared pools: spans, sharing of tables, and bytes at the real shapes."""

import dataclasses

import pytest

from sluice.cache.spec import Full, tables_of
from sluice.model.make_checkpoint import TINY
from sluice.model.presets import V4_FLASH, preset_pools
from sluice.model.v4.config import LayerType
from sluice.model.v4.pools import declare
from sluice.protocol.messages import ConfigError


def bytes_per_token(specs):
    return sum(
        spec.page_bytes / spec.tokens_per_page for spec in specs if isinstance(spec.retention, Full)
    )


@pytest.mark.parametrize(
    ("name", "storage", "index_storage", "expected"),
    [
        ("v4-flash", "fp8", "fp4", 3514.25),
        ("v4-flash", "fp8", "fp8", 3850.25),
        ("v4-flash", "bfloat16", "fp4", 6880),
        ("v4-pro", "fp8", "fp4", 5031.4375),
        ("v4-pro", "fp8", "fp8", 5511.4375),
        ("v4-pro", "bfloat16", "fp4", 9848),
    ],
)
def test_bytes_per_token_are_the_published_ones(name, storage, index_storage, expected):
    assert bytes_per_token(preset_pools(name, storage, index_storage)) == expected


def test_flash_state_of_a_request_is_small():
    specs = {spec.name: spec for spec in preset_pools("v4-flash")}
    accumulators = specs["c128_state"]
    assert len(accumulators.live_rows(127)) * accumulators.row_bytes * 20 == 122_880
    assert len(accumulators.live_rows(128)) == 0


@pytest.mark.parametrize("config", [TINY, V4_FLASH])
def test_full_pools_share_one_table_and_states_another(config):
    specs = {spec.name: spec for spec in declare(config)}
    assert specs["c4_kv"].table == specs["c4_index_k"].table == specs["c128_kv"].table
    assert specs["c4_state"].table == specs["c4_index_state"].table
    assert len(tables_of(specs.values())) == 4
    assert specs["c4_kv"].tokens_per_page % config.hca_ratio == 0


def test_pools_without_layers_are_not_declared():
    layers = (LayerType.SLIDING, LayerType.HCA, LayerType.SLIDING)
    config = dataclasses.replace(TINY, layer_types=layers, mlp_types=TINY.mlp_types[:3])
    assert [spec.name for spec in declare(config)] == ["swa_kv", "c128_kv", "c128_state"]


def test_an_unknown_preset_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="known: v4-flash, v4-pro"):
        preset_pools("v4-mini")
