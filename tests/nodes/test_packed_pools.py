"""A role's YAML may have its pools packed: packed rows go through both nodes as they are."""

import pytest

PACKED = {"swa_kv": "fp8_v4", "c4_kv": "fp8_v4", "c128_kv": "fp8_v4", "c4_index_k": "fp4"}


@pytest.fixture
def config(tiny_checkpoint, config_of):
    pools = {name: {"dtype": dtype} for name, dtype in PACKED.items()}
    limits = {"max_running_requests": 4, "cache_bytes": 8 << 20, "prefix_cache": False}
    role = limits | {"pools": pools}
    return config_of(tiny_checkpoint, prefill=role | {"max_batch_tokens": 48}, decode=role)


@pytest.mark.parametrize("num_tokens", [3, 17, 95, 200])
def test_packed_pools_give_the_tokens_and_bytes_of_one_process(
    num_tokens, config, start_local, single_of, make_request
):
    request = make_request(num_tokens, vocab_size=512)
    single = single_of(config)
    expected_tokens, expected_rows = single.generate(request)
    tokens, arrived = start_local(config).generate(request)
    assert tokens == expected_tokens
    assert arrived == expected_rows
    for spec in single.runner.specs:
        num_rows = len(spec.live_rows(num_tokens))
        assert len(arrived[spec.name]) == num_rows * len(spec.layers) * spec.row_bytes
        assert spec.dtype == PACKED.get(spec.name, "float32")
