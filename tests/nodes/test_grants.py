"""Pages that a write may still reach are held until no write can."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sluice.decode_node.grants import Grants

LEASE_S = 10.0


@pytest.fixture
def held():
    """Grants that hold one from time 0 on, which had been served until 7."""
    grants = Grants(LEASE_S)
    grants.add(
        SimpleNamespace(
            grant=SimpleNamespace(grant_id="g"), request_id="r", deadline=7.0, running=False
        )
    )
    grants.hold("g", 0.0)
    return grants


def test_a_write_may_be_on_its_way_for_two_leases_after_the_grants_own(held):
    assert held.take_held(7 + 2 * LEASE_S - 0.01) == []
    assert held.take_held(7 + 2 * LEASE_S) == ["g"]
    assert held.num_held == 0 and held.id_of("r") is None


def test_a_write_that_was_seen_prolongs_that_by_its_senders_lease(held):
    held.hold_longer("g", 20.0)
    assert held.take_held(20 + 3 * LEASE_S - 0.01) == []
    assert held.take_held(20 + 3 * LEASE_S) == ["g"]


def test_what_is_let_go_is_held_no_more(held):
    assert held.let_go("g") and not held.let_go("g")
    held.hold_longer("g", 20.0)
    assert held.take_held(1e9) == []
