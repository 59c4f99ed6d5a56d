"""What the load test and the router's comparison say of the figures they are given."""

import pytest

from sluice.benchmarks.memory import Sample, growth
from sluice.benchmarks.router_overhead import Measured, lines


def samples(process, *resident_mb):
    return [Sample(float(at), process, held) for at, held in enumerate(resident_mb)]


def test_growth_counts_from_when_a_process_is_warm():
    flat = samples("router", 10, 80, 100, 100, 100, 100, 100, 100)
    leaking = samples("decode", 100, 100, 100, 100, 110, 120, 130, 130)
    assert growth([*flat, *leaking]) == pytest.approx({"router": 0, "decode": 0.3})


def test_added_latency_is_what_comes_on_top_of_the_straight_way():
    rounds = [
        Measured(server, False, 64, rate, p50, 2 * p50, 0.5)
        for server, rate, p50 in (("straight", 9, 1), ("router", 4, 3), ("router", 6, 5))
    ]
    straight, router = lines(rounds)
    assert (straight.added_p50_ms, router.added_p50_ms, router.added_p99_ms) == (0, 3, 6)
    assert router.requests_per_s == 5
