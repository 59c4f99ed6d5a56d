"""The sparse attention kernels: whole rows and split rows, present, absent and poisoned."""

import pytest
import torch

from sluice.kernels import attention
from sluice.kernels.attention import sparse_attention, sparse_attention_reference

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


@pytest.mark.parametrize("counts", [[5], [7, MANY_ROWS]])
def test_a_padding_query_without_rows_gives_zeros(counts):
    result = sparse_attention(*case(1, 3, 8, counts, absent=1.0))
    assert (result == 0).all()


def test_no_queries_give_an_empty_result():
    assert sparse_attention(*case(0, 3, 8, [5, 6])).shape == (0, 3, 8)
