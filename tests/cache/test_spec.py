"""PoolSpec's arithmetic, against the rows one can count by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.cache.row_format import RowFormat
from sluice.cache.spec import Block, Full, PoolSpec, TableSpec, Window, tables_of

RETENTIONS = st.one_of(
    st.just(Full()),
    st.builds(Window, st.integers(1, 40)),
    st.builds(Block, st.sampled_from([1, 4, 16]), st.integers(0, 2)),
)


def pool(**changes):
    fields = dict(
        name="p", layers=(0, 2), row_shape=(3,), dtype="float32",
        tokens_per_row=4, tokens_per_page=16, retention=Full(),
    )  # fmt: skip
    return PoolSpec(**(fields | changes))


def test_sizes_follow_from_shape_and_span():
    spec = pool()
    assert (spec.rows_per_page, spec.row_bytes, spec.page_bytes) == (4, 12, 2 * 4 * 12)


def test_a_packed_row_has_its_formats_bytes_and_stays_the_vector_that_it_was():
    packing = RowFormat("small", 2, 1, tile=2, code="e4m3", scale="ue8m0")
    spec = pool(choices=("bfloat16", packing)).stored_as("small")
    assert (spec.format, spec.row_bytes, spec.number_dtype) == (packing, 8, "uint8")
    assert (spec.row_shape, spec.page_shape) == ((3,), (2, 4, 8))
    assert spec.stored_as("bfloat16").page_shape == (2, 4, 3)


def test_only_declared_dtypes_and_formats_can_be_chosen():
    with pytest.raises(ValueError, match="pool p: dtype is 'float16', expected float32,"):
        pool().stored_as("float16")
    with pytest.raises(ValueError, match="pool p: dtype is 'fp9'"):
        pool(dtype="fp9")


@pytest.mark.parametrize(
    ("retention", "num_tokens", "first"),
    [
        (Full(), 1000, 0),
        (Window(128), 127, 0),
        (Window(128), 128, 1),
        (Window(128), 1000, 873),
        (Block(4, overlap=1), 3, 0),
        (Block(4, overlap=1), 8, 4),
        (Block(4, overlap=1), 11, 4),
        (Block(128), 255, 128),
        (Block(128), 256, 256),
    ],
)
def test_first_live_token_of_each_retention(retention, num_tokens, first):
    assert retention.first_live(num_tokens) == first


def test_an_aligned_block_pool_holds_nothing():
    spec = pool(tokens_per_row=16, retention=Block(16))
    assert len(spec.pages(32, 32)) == 0
    assert spec.live_rows(32) == range(2, 2)
    assert spec.live_rows(33) == range(2, 3)


def test_a_full_pool_keeps_complete_rows_only():
    assert pool().live_rows(11) == range(2)


@given(RETENTIONS, st.integers(1, 20), st.integers(0, 300), st.integers(0, 60))
def test_pages_cover_every_live_and_computed_token(retention, span, start, count):
    pages = TableSpec(span, retention).pages(start, start + count)
    for token in range(retention.first_live(start), start + count):
        assert token // span in pages


@given(RETENTIONS, st.integers(1, 20), st.integers(0, 300), st.integers(0, 60))
def test_max_pages_bounds_pages(retention, span, start, count):
    table = TableSpec(span, retention)
    assert len(table.pages(start, start + count)) <= table.max_pages(count, start + count)


def test_pools_of_equal_span_and_retention_share_a_table():
    specs = [pool(name="a"), pool(name="b", tokens_per_row=16), pool(name="c", tokens_per_page=32)]
    assert len(tables_of(specs)) == 2


def test_a_span_of_broken_rows_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"pool p: tokens_per_page is 18, .* multiple of .* \(4\)"):
        pool(tokens_per_page=18)
