"""Byte runs against a slow reference, on random layouts; the fewest runs; what is refused."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.cache.spec import DTYPE_BYTES, Block, Full, PoolSpec, Window
from sluice.protocol.messages import IncompatiblePeers, PageRun, TransferFailed
from sluice.transfer.plan import byte_runs, check_mapping, rows_to_receive, rows_to_send

NUM_PAGES = 24
RETENTIONS = st.one_of(
    st.just(Full()),
    st.builds(Window, st.integers(1, 40)),
    st.builds(Block, st.sampled_from([4, 8]), st.integers(0, 2)),
)


@st.composite
def layouts(draw):
    """Two specs of one pool with unequal pages, a page run of each, and rows within both."""
    tokens_per_row = draw(st.sampled_from([1, 4]))
    num_layers = draw(st.integers(1, 3))
    spec = PoolSpec(
        name="pool",
        layers=tuple(range(num_layers)),
        row_shape=draw(st.sampled_from([(1,), (3,), (2, 2)])),
        dtype=draw(st.sampled_from(sorted(DTYPE_BYTES))),
        tokens_per_row=tokens_per_row,
        tokens_per_page=tokens_per_row,
        retention=draw(RETENTIONS),
    )
    start = draw(st.integers(0, 30))
    rows = range(start, start + draw(st.integers(0, 20)))
    sides = []
    for _ in range(2):
        rows_per_page = draw(st.integers(1, 9))
        side = dataclasses.replace(spec, tokens_per_page=rows_per_page * tokens_per_row)
        first = draw(st.integers(0, rows.start // rows_per_page))
        count = -(-rows.stop // rows_per_page) - first
        if draw(st.booleans()):  # neighbours, so that runs can merge
            pages = list(range(1, count + 1))
        else:
            pages = draw(st.permutations(range(1, max(count, NUM_PAGES) + 1)))[:count]
        sides.append((side, PageRun(first, tuple(pages))))
    return *sides[0], *sides[1], rows


def pages_of(spec, seed, num_pages=60):
    """Random bytes [num_pages, num_layers, rows_per_page, row_bytes]."""
    shape = (num_pages, len(spec.layers), spec.rows_per_page, spec.row_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@settings(max_examples=300, deadline=None)
@given(layouts())
def test_runs_move_exactly_the_rows_and_touch_nothing_else(layout):
    source, source_run, target, target_run, rows = layout
    from_pages, to_pages = pages_of(source, 1), pages_of(target, 2)
    expected = to_pages.copy()
    for row in rows:
        here = source_run.pages[row // source.rows_per_page - source_run.first]
        there = target_run.pages[row // target.rows_per_page - target_run.first]
        expected[there, :, row % target.rows_per_page] = from_pages[
            here, :, row % source.rows_per_page
        ]
    runs = byte_runs(source, source_run, target, target_run, rows)
    source_bytes, target_bytes = from_pages.reshape(-1), to_pages.reshape(-1)
    for s, t, n in zip(runs.source_offset, runs.target_offset, runs.num_bytes, strict=True):
        target_bytes[t : t + n] = source_bytes[s : s + n]
    assert np.array_equal(to_pages, expected)
    assert runs.total_bytes == len(rows) * len(source.layers) * source.row_bytes


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_no_two_runs_could_be_one(layout):
    source, source_run, target, target_run, rows = layout
    runs = byte_runs(source, source_run, target, target_run, rows)
    ends = set(
        zip(runs.source_offset + runs.num_bytes, runs.target_offset + runs.num_bytes, strict=True)
    )
    assert not ends & set(zip(runs.source_offset, runs.target_offset, strict=True))


POOL = PoolSpec("pool", (1, 4, 7), (8,), "bfloat16", 4, 16, Full())


def run_count(rows, source_pages, target_pages, target=POOL):
    runs = byte_runs(POOL, PageRun(0, source_pages), target, PageRun(0, target_pages), rows)
    return len(runs)


def test_a_full_page_is_one_run_of_all_layers():
    assert run_count(range(12), (9, 3, 5), (2, 8, 4)) == 3


def test_neighbouring_pages_are_one_run_in_any_order():
    assert run_count(range(12), (3, 4, 5), (7, 8, 9)) == 1
    assert run_count(range(12), (4, 5, 3), (8, 9, 7)) == 1
    assert run_count(range(12), (5, 4, 3), (7, 8, 9)) == 3  # neighbours, but crosswise


def test_a_partial_page_is_one_run_a_layer():
    assert run_count(range(1, 3), (9,), (2,)) == 3
    assert run_count(range(2, 8), (3, 9), (7, 1)) == 3 + 1
    assert run_count(range(2, 8), (3, 4), (7, 8)) == 3  # the last layer reaches the next page


def test_no_rows_are_no_runs():
    assert run_count(range(5, 5), (), ()) == 0


@pytest.mark.parametrize("rows", [range(3, 5), range(8, 9), range(12)])
def test_rows_outside_the_listed_pages_are_refused(rows):
    inside, outside = PageRun(0, (1, 2, 3)), PageRun(1, (5,))
    with pytest.raises(TransferFailed, match="pool pool.*target.*pages \\[1, 2\\)"):
        byte_runs(POOL, inside, POOL, outside, rows)
    with pytest.raises(TransferFailed, match="source"):
        byte_runs(POOL, outside, POOL, inside, rows)


def test_the_null_page_is_refused():
    with pytest.raises(TransferFailed, match="page 0"):
        byte_runs(POOL, PageRun(0, (3,)), POOL, PageRun(0, (0,)), range(4))


@settings(max_examples=200, deadline=None)
@given(
    retention=RETENTIONS,
    tokens_per_row=st.sampled_from([1, 4]),
    num_tokens=st.integers(1, 200),
    skip_tokens=st.integers(0, 220),
    cuts=st.lists(st.integers(1, 199), max_size=5),
)
def test_chunks_together_send_each_wanted_row_once(
    retention, tokens_per_row, num_tokens, skip_tokens, cuts
):
    spec = PoolSpec("pool", (0,), (1,), "uint8", tokens_per_row, 8, retention)
    ends = sorted({cut for cut in cuts if cut < num_tokens} | {num_tokens})
    sent, start = [], 0
    for end in ends:
        sent += rows_to_send(
            spec, start=start, end=end, num_tokens=num_tokens, skip_tokens=skip_tokens
        )
        start = end
    assert sent == list(rows_to_receive(spec, num_tokens, skip_tokens))
    assert set(sent) <= set(spec.live_rows(num_tokens))


def test_bounded_pools_send_nothing_before_the_last_chunk():
    spec = PoolSpec("window", (0,), (1,), "uint8", 1, 8, Window(16))
    assert not rows_to_send(spec, start=0, end=64, num_tokens=100)
    assert rows_to_send(spec, start=64, end=100, num_tokens=100) == range(85, 100)


def test_rows_that_decode_has_are_counted_from_the_front():
    assert rows_to_send(POOL, start=0, end=40, num_tokens=40, skip_tokens=18) == range(4, 10)


def test_pools_pair_by_name_with_any_page_size_and_device():
    other = dataclasses.replace(POOL, name="other")
    relaid = dataclasses.replace(POOL, tokens_per_page=64, device="cuda")
    check_mapping([POOL, other], [other, relaid])


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("layers", (1, 4, 8), r"layers is \(1, 4, 7\).*\(1, 4, 8\)"),
        ("row_shape", (9,), r"row_shape is \(8,\).*\(9,\)"),
        ("dtype", "float32", "dtype is bfloat16.*float32"),
        ("tokens_per_row", 8, "tokens_per_row is 4.*8"),
        ("retention", Window(9), r"retention is Full\(\).*Window\(size=9\)"),
    ],
)
def test_what_has_no_mapping_is_refused_by_pool_and_field(field, value, shown):
    with pytest.raises(IncompatiblePeers, match=f"pool pool: {shown}"):
        check_mapping([POOL], [dataclasses.replace(POOL, **{field: value})])


def test_a_missing_pool_is_refused_on_either_side():
    other = dataclasses.replace(POOL, name="other")
    with pytest.raises(IncompatiblePeers, match="pool other: the target has no such pool"):
        check_mapping([POOL, other], [POOL])
    with pytest.raises(IncompatiblePeers, match="pool other: the source has no such pool"):
        check_mapping([POOL], [POOL, other])


def test_one_name_for_two_pools_is_refused():
    twin = dataclasses.replace(POOL, tokens_per_page=32)
    with pytest.raises(IncompatiblePeers, match="pool pool: the target declares it more than once"):
        check_mapping([POOL], [POOL, twin])
