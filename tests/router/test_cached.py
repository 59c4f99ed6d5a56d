"""The router's view of what a node has cached follows the node's reports."""

from __future__ import annotations

import pytest

from sluice.cache.journal import CacheReport
from sluice.protocol.messages import GenerateRequest, SamplingParams
from sluice.router.dispatch.cached import CachedPrefixes
from sluice.router.dispatch.prompt import Prompt

UNIT = 4


def prompt(*token_ids):
    return Prompt(GenerateRequest("r", token_ids, SamplingParams(max_tokens=1)))


@pytest.fixture
def one():
    return prompt(*[1] * 3 * UNIT)


@pytest.fixture
def two():
    return prompt(*[2] * 2 * UNIT)


@pytest.fixture
def cached(one):
    """Of a node that has told of the first prompt."""
    cached = CachedPrefixes("node", UNIT)
    cached.take(CacheReport(3, 0, one.keys("node", UNIT), ()))
    return cached


def test_a_whole_report_takes_the_place_of_what_was_told_before(cached, one, two):
    cached.take(CacheReport(9, 0, two.keys("node", UNIT), ()))
    assert (cached.num_tokens(one), cached.num_tokens(two)) == (0, 2 * UNIT)


def test_changes_are_added_to_what_was_told_before(cached, one, two):
    gone = one.keys("node", UNIT)[2:]
    cached.take(CacheReport(5, 3, two.keys("node", UNIT), gone))
    assert (cached.num_tokens(one), cached.num_tokens(two)) == (2 * UNIT, 2 * UNIT)


@pytest.mark.parametrize(("version", "since"), [(2, 0), (2, 1), (6, 4), (6, 5)])
def test_what_another_report_has_overtaken_or_does_not_follow_changes_nothing(
    cached, one, two, version, since
):
    cached.take(CacheReport(version, since, two.keys("node", UNIT), one.keys("node", UNIT)))
    assert (cached.num_tokens(one), cached.num_tokens(two)) == (3 * UNIT, 0)
    assert cached.version == 3


def test_what_is_on_its_way_counts_until_reports_tell_of_it(cached, two):
    cached.expect("holder", two)
    assert cached.num_tokens(two) == 2 * UNIT
    cached.end("holder")
    cached.end("holder")
    assert cached.num_tokens(two) == 2 * UNIT, "the node has not been heard of since"
    cached.take(CacheReport(3, 3, (), ()))
    cached.take(CacheReport(3, 3, (), ()))
    assert cached.num_tokens(two) == 0
