"""What a node should hold for the router, against what it says it holds."""

from __future__ import annotations

import pytest

from sluice.router.dispatch.held import Held

PATIENCE_S = 2.0


@pytest.fixture
def missed():
    """Ids that were called missing."""
    return []


@pytest.fixture
def held(missed):
    """One attempt that the node should list since 10."""
    held = Held(PATIENCE_S)
    held.expect("a", 10.0, lambda: missed.append("a"))
    return held


def looked(held, listed, at):
    held.compare(listed, asked_at=at, now=at)


def test_what_the_node_lists_is_never_missing(held, missed):
    for at in (11.0, 15.0, 30.0):
        looked(held, ["a", "b"], at)
    assert missed == []


def test_what_it_does_not_list_for_long_enough_is_missing_once(held, missed):
    looked(held, [], 11.0)
    looked(held, [], 11.0 + PATIENCE_S - 0.01)
    assert missed == []
    looked(held, [], 11.0 + PATIENCE_S)
    looked(held, [], 99.0)
    assert missed == ["a"]


def test_a_list_that_was_asked_for_before_it_came_says_nothing(held, missed):
    held.compare([], asked_at=9.0, now=12.0)
    looked(held, [], 13.0)
    looked(held, [], 13.0 + PATIENCE_S - 0.01)
    assert missed == []


def test_what_is_listed_again_was_on_its_way(held, missed):
    looked(held, [], 11.0)
    looked(held, ["a"], 12.0)
    looked(held, [], 13.0)
    looked(held, [], 13.0 + PATIENCE_S - 0.01)
    assert missed == []


def test_what_has_ended_is_not_missed(held, missed):
    looked(held, [], 11.0)
    held.end("a")
    held.end("unknown")
    looked(held, [], 99.0)
    assert missed == []
