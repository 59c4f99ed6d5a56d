"""A pool that nobody outside the model knows passes through everything."""

import pytest
from toy_model import TOY, ModelWithToyPool

from sluice.protocol.messages import NodeStatus


@pytest.fixture
def config(tiny_checkpoint, config_of):
    return config_of(tiny_checkpoint)


def samples(status: NodeStatus, name: str) -> dict[str, float]:
    return {
        labels["pool"]: value
        for family in status.metrics
        for sample, labels, value in family.samples
        if sample == name
    }


@pytest.mark.parametrize("num_tokens", [1, 5, 6, 7, 12, 47, 48, 49, 100])
def test_a_toy_pool_is_allocated_prefilled_transferred_and_decoded(
    num_tokens, config, start_local, single_of, make_request
):
    request = make_request(num_tokens, vocab_size=512)
    pair = start_local(config, wrap=ModelWithToyPool)
    tokens, arrived = pair.generate(request)
    expected, rows = single_of(config, ModelWithToyPool).generate(request)
    assert tokens == expected
    assert arrived == rows
    assert len(arrived["toy"]) == len(TOY.live_rows(num_tokens)) * 3 * TOY.row_bytes


def test_the_toy_pool_appears_in_usage_and_metrics(config, start_local, make_request):
    pair = start_local(config, wrap=ModelWithToyPool)
    _, arrived = pair.generate(make_request(30, vocab_size=512))
    prefill, decode = pair.statuses()
    assert prefill.pools["toy"]["used"] == decode.pools["toy"]["used"] == 0
    assert samples(prefill, "sluice:transfer_bytes_total")["toy"] == len(arrived["toy"])


def test_losing_the_toy_pool_is_noticed(config, start_local, make_request):
    request = make_request(30, vocab_size=512)
    pair = start_local(config, wrap=ModelWithToyPool)
    expected, _ = pair.generate(request)
    pair.decode.zeroed_pool = "toy"
    assert pair.generate(request)[0] != expected
