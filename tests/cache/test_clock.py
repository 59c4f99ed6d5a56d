"""The leases' clock counts the time for which a host was suspended."""

import sys
import time

import pytest

from sluice.cache.clock import lease_clock


def test_it_never_goes_back():
    seen = [lease_clock() for _ in range(1000)]
    assert seen == sorted(seen)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts suspension apart")
def test_it_counts_suspension():
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= lease_clock() <= time.clock_gettime(time.CLOCK_BOOTTIME)
