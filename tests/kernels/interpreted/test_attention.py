"""The sparse attention kernels: whole rows and split rows, present, absent and poisoned."""

import pytest
import torch
from row_formats import FP8_ODD, FP8_SMALL, FP8_V4

from sluice.kernels import attention
from sluice.kernels.attention import sparse_attention, sparse_attention_reference
from sluice.kernels.formats import pack_reference, unpack_reference
from sluice.kernels.packed_rows import PackedRows

MANY_ROWS = 2 * attention.MIN_SPLIT_ROWS + 5  # enough for two ranges


def source(num_tokens, num_rows, dim, *, rows_per_page, dtype, absent):
    """A layer of a pool whose unlisted rows are NaN, and slots of which a part is -1."""
    pool = torch.full((40, 2, rows_per_page, dim), torch.nan, dtype=dtype)
    slots = torch.randint(rows_per_page, 40 * rows_per_page, (num_tokens, num_rows))
    slots[torch.rand(num_tokens, num_rows) < absent] = -1
    listed = slots[slots >= 0]
    pool[listed // rows_per_page, 1, listed % rows_per_page] = torch.randn(
        len(listed), dim, dtype=dtype
    )
    return pool[:, 1], slots


def case(num_tokens, num_heads, dim, counts, *, dtype=torch.float32, absent=0.3, rope_dim=4):
    sources = [
        source(num_tokens, count, dim, rows_per_page=page, dtype=dtype, absent=absent)
        for count, page in zip(counts, (8, 3), strict=False)
    ]
    queries = torch.randn(num_tokens, num_heads, dim, dtype=dtype)
    angles = torch.randn(num_tokens, rope_dim // 2)
    turn = torch.polar(torch.ones_like(angles), angles)
    return queries, sources, torch.randn(num_heads), dim**-0.5, turn


@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "dim", "counts"),
    [
        (1, 3, 8, [5]),
        (2, 70, 24, [8, 0]),  # more heads than one program takes
        (4, 3, 24, [7, 40]),
        (1, 3, 8, [33, MANY_ROWS]),
    ],
)
def test_the_kernel_equals_the_reference(num_tokens, num_heads, dim, counts):
    given = case(num_tokens, num_heads, dim, counts)
    given[1][0][1][:, -1] = 17  # every query has a row
    given[1][0][0][2, 1] = 1.0
    expected = sparse_attention_reference(*given)
    torch.testing.assert_close(sparse_attention(*given), expected, atol=1e-5, rtol=1e-5)


def test_bf16_equals_the_reference_to_its_precision():
    given = case(3, 16, 64, [20, 40], dtype=torch.bfloat16)
    given[1][0][1][:, -1] = 17
    given[1][0][0][2, 1] = 1.0
    expected = sparse_attention_reference(*given)
    torch.testing.assert_close(sparse_attention(*given), expected, atol=3e-2, rtol=3e-2)


def test_pools_may_be_stored_in_different_dtypes():
    queries, (window, chosen), *rest = case(3, 3, 8, [6, 9], absent=0.1)
    sources = [window, (chosen[0].to(torch.bfloat16), chosen[1])]
    expected = sparse_attention_reference(queries, sources, *rest)
    actual = sparse_attention(queries, sources, *rest)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def packed(rows, form):
    """The same rows as another pool keeps them: NaN stays NaN. And what is read from them."""
    pool = torch.stack([torch.zeros_like(rows), rows], dim=1)  # rows of two layers in a page
    view = pack_reference(pool, form)[:, 1]
    return PackedRows(view, form), unpack_reference(view, form, torch.float32)


@pytest.mark.parametrize(
    ("form", "num_tokens", "num_heads", "counts"),
    [
        (FP8_SMALL, 3, 3, [7, 40]),
        (FP8_ODD, 1, 20, [33, MANY_ROWS]),
        (FP8_ODD, 2, 3, [5]),
        (FP8_V4, 1, 2, [17, 3]),
    ],
)
def test_packed_rows_are_read_as_if_unpacked(form, num_tokens, num_heads, counts):
    queries, sources, *rest = case(num_tokens, num_heads, form.dim, counts)
    pairs = [packed(rows, form) for rows, _ in sources]
    slots = [slots for _, slots in sources]
    expected = [(plain, at) for (_, plain), at in zip(pairs, slots, strict=True)]
    actual = [(rows, at) for (rows, _), at in zip(pairs, slots, strict=True)]
    expected = sparse_attention_reference(queries, expected, *rest)
    torch.testing.assert_close(
        sparse_attention(queries, actual, *rest), expected, atol=1e-5, rtol=1e-5
    )


def test_one_pool_may_be_packed_and_the_other_not():
    queries, (window, chosen), *rest = case(2, 3, FP8_SMALL.dim, [6, 9])
    rows, plain = packed(chosen[0], FP8_SMALL)
    expected = sparse_attention_reference(queries, [window, (plain, chosen[1])], *rest)
    for sources in ([window, (rows, chosen[1])], [(rows, chosen[1]), window]):
        actual = sparse_attention(queries, sources, *rest)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("counts", [[5], [7, MANY_ROWS]])
def test_a_padding_query_without_rows_gives_zeros(counts):
    result = sparse_attention(*case(1, 3, 8, counts, absent=1.0))
    assert (result == 0).all()


def test_no_queries_give_an_empty_result():
    assert sparse_attention(*case(0, 3, 8, [5, 6])).shape == (0, 3, 8)
    queries, sources, *rest = case(0, 3, FP8_SMALL.dim, [5, 6])
    sources = [(packed(rows, FP8_SMALL)[0], slots) for rows, slots in sources]
    assert sparse_attention(queries, sources, *rest).shape == queries.shape
