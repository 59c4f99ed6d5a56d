"""DeepSeek-V4-Flash at its real shapes: what a request moves, and in how many descriptors."""

import csv

import pytest

from sluice.benchmarks import payload
from sluice.benchmarks.provenance import write_csv


@pytest.mark.parametrize("num_tokens", [1, 127, 128, 129, 1_000, 8_191, 8_192, 8_193])
def test_no_pool_moves_more_than_the_pages_a_request_holds(num_tokens):
    for pool in payload.measure("fp8", num_tokens, "scattered"):
        assert pool.bytes <= pool.held_bytes, pool


def test_a_long_request_needs_few_descriptors_even_on_scattered_pages():
    pools = payload.measure("fp4", payload.LONG_TOKENS, "scattered")
    assert sum(pool.descriptors for pool in pools) <= payload.MAX_DESCRIPTORS


def test_the_payload_is_below_the_smallest_that_is_published():
    pools = payload.measure("fp8", payload.COMPARED_TOKENS, "scattered")
    assert sum(pool.bytes for pool in pools) < payload.SGLANG_ALIGNED_MB * 1e6


def test_the_csv_has_a_line_for_each_pool_length_and_placement(tmp_path):
    write_csv(tmp_path / "payload.csv", {"commit": "abc"}, payload.result_rows())
    with (tmp_path / "payload.csv").open() as file:
        lines = list(csv.DictReader(file))
    num_pools = len(payload.measure("fp4", 1, "contiguous"))
    assert len(lines) == num_pools * len(payload.LENGTHS) * 2 * 2
    assert {line["commit"] for line in lines} == {"abc"}
