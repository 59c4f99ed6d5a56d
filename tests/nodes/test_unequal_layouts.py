"""Prefill and decode in layouts of their own: the tokens and the rows of one process."""

import numpy as np
import pytest
import torch

from sluice.engine.runner import role_specs
from sluice.model.v4.pool_rows import convert_rows

PAGES = {"swa_kv": 3, "c4_kv": 16, "c4_index_k": 96, "c128_kv": 16, "c4_state": 12}
PACKED = {"swa_kv": "fp8_v4", "c4_kv": "bfloat16", "c128_kv": "fp8_v4", "c4_index_k": "fp4"}
LIMITS = {"max_running_requests": 4, "cache_bytes": 8 << 20, "prefix_cache": False}


@pytest.fixture
def config(tiny_checkpoint, config_of):
    def make(**pools):
        return config_of(
            tiny_checkpoint,
            prefill=LIMITS | {"max_batch_tokens": 48},
            decode=LIMITS | {"pools": pools},
        )

    return make


@pytest.mark.parametrize("num_tokens", [3, 17, 95, 96, 97, 200])
def test_unequal_pages_give_the_tokens_and_rows_of_one_process(
    num_tokens, config, start_local, single_of, make_request
):
    request = make_request(num_tokens, vocab_size=512)
    expected_tokens, expected_rows = single_of(config()).generate(request)
    pages = {name: {"tokens_per_page": size} for name, size in PAGES.items()}
    tokens, arrived = start_local(config(**pages)).generate(request)
    assert tokens == expected_tokens
    assert arrived == expected_rows


@pytest.mark.parametrize("num_tokens", [3, 17, 95, 200])
def test_unequal_dtypes_give_decode_the_rows_in_its_own(
    num_tokens, config, start_local, single_of, make_request
):
    request = make_request(num_tokens, vocab_size=512)
    single = single_of(config())
    _, expected_rows = single.generate(request)
    packed = config(**{name: {"dtype": dtype} for name, dtype in PACKED.items()})
    pair = start_local(packed)
    tokens, arrived = pair.generate(request)
    assert len(tokens) == request.sampling.max_tokens
    targets = {spec.name: spec for spec in role_specs(single.runner.model.specs, packed.decode)}
    for spec in single.runner.specs:
        rows = torch.from_numpy(np.frombuffer(expected_rows[spec.name], dtype=np.float32).copy())
        rows = convert_rows(rows.view(-1, *spec.row_shape), spec, targets[spec.name])
        assert arrived[spec.name] == rows.contiguous().view(torch.uint8).numpy().tobytes()
