"""The transfer benchmark measures every way it names, and judges what it says it judges."""

import dataclasses

import pytest

transfer = pytest.importorskip("sluice.benchmarks.transfer")


@pytest.fixture(scope="module")
def lines():
    return {line.layout: line for line in transfer.measure(300, repeats=1)}


def test_every_way_of_moving_a_request_is_measured(lines):
    ours = [f"{layout}{mode}" for mode in ("", ", read") for layout in transfer.SCALES]
    assert list(lines) == ["raw", *ours, "by layer"]
    assert all(line.milliseconds > line.preparation_ms for line in lines.values())


def test_merged_runs_are_fewer_than_a_list_by_layer_and_the_same_in_both_modes(lines):
    equal = lines["equal pages"].descriptors
    assert 1 < equal < lines["by layer"].descriptors
    assert equal == lines["equal pages, read"].descriptors


def test_what_misses_its_goal_is_named(lines):
    good = dataclasses.replace(
        lines["raw"], num_tokens=transfer.JUDGED_TOKENS, of_raw=1.0, preparation_ms=1.0
    )
    judged = [dataclasses.replace(good, layout=layout) for layout in transfer.SCALES]
    slow = dataclasses.replace(good, layout="by layer", of_raw=0.1)
    assert list(transfer.shortfalls([*judged, slow])) == []
    judged[0] = dataclasses.replace(judged[0], of_raw=0.8, preparation_ms=6.0)
    assert list(transfer.shortfalls([*judged, slow])) == [
        "equal pages: 0.8 of the raw rate, goal 0.9",
        "preparation 6.0 ms, goal 5.0",
    ]
