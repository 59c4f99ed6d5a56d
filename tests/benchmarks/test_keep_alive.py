"""Clients that come back when their idle connections expire, in small."""

from __future__ import annotations

from sluice.benchmarks.instant_nodes import MODEL, run_router
from sluice.benchmarks.keep_alive import all_clients
from sluice.benchmarks.router_overhead import server_process


async def test_no_client_meets_a_connection_that_is_being_closed():
    """A round of the benchmark, with httpx's own expiry."""
    with server_process(run_router) as server:
        seen = await all_clients(f"http://127.0.0.1:{server.port}", 48, 2)
    assert seen.pop("connections") >= 48
    assert seen == {"200": 96}


async def test_a_server_that_gives_up_first_is_seen():
    """What is measured can fail: connections are gone when the second round comes."""
    with server_process(run_router, 1, 0, MODEL, {"keep_alive_s": 1}) as server:
        seen = await all_clients(f"http://127.0.0.1:{server.port}", 8, 2, pause_s=(1.9, 2.1))
    assert seen["connections"] == 16
