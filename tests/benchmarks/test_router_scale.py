"""The benchmark of many nodes runs: its burst is answered over its simulated nodes."""

from __future__ import annotations

from sluice.benchmarks import router_scale


async def test_a_burst_over_simulated_nodes_is_drained(monkeypatch):
    monkeypatch.setattr(router_scale, "BURST", 20)
    monkeypatch.setattr(router_scale, "COMPUTING_S", 0.01)
    seconds, cpu = await router_scale.drain_burst(2)
    assert seconds < 10 and cpu > 0
