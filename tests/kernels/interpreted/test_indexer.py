"""The scoring kernel against its reference: ragged requests, absent and poisoned rows."""

import pytest
import torch
from row_formats import FP4_INDEX, FP8_INDEX, FP8_ODD

from sluice.kernels.formats import pack_reference, unpack_reference
from sluice.kernels.indexer import index_scores, index_scores_reference
from sluice.kernels.packed_rows import PackedRows


def scored(lengths, num_rows, *, num_heads=5, dim=24, dtype=torch.float32):
    """Arguments of `index_scores`; the last rows of a request are absent, unlisted ones NaN."""
    pool = torch.full((50, 2, 4, dim), torch.nan, dtype=dtype)
    slots = (torch.randperm(196)[: len(lengths) * num_rows] + 4).view(len(lengths), num_rows)
    for request in range(len(lengths)):
        slots[request, num_rows - request :] = -1
    listed = slots[slots >= 0]
    pool[listed // 4, 1, listed % 4] = torch.randn(len(listed), dim, dtype=dtype)
    queries = torch.randn(sum(lengths), num_heads, dim, dtype=dtype)
    weights = torch.randn(sum(lengths), num_heads)
    return queries, weights, pool[:, 1], slots, torch.tensor([0, *lengths]).cumsum(0)


def present(slots, lengths):
    """[num_tokens, num_rows]: whether a token's request has the row."""
    return (slots >= 0).repeat_interleave(torch.tensor(lengths), 0)


@pytest.mark.parametrize("block_rows", [4, 64])
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [4, 0, 37], [20]])
def test_scores_equal_the_references(lengths, block_rows, monkeypatch):
    monkeypatch.setattr("sluice.kernels.indexer.BLOCK_ROWS", {4: block_rows})
    given = scored(lengths, 9)
    there = present(given[3], lengths)
    expected = index_scores_reference(*given)[there]
    torch.testing.assert_close(index_scores(*given)[there], expected, atol=1e-5, rtol=1e-5)


def test_bf16_scores_equal_the_references_to_fp32s_precision():
    """Products of bf16 are exact in fp32, so only the order of sums differs."""
    given = scored([3, 4], 9, dtype=torch.bfloat16)
    there = present(given[3], [3, 4])
    expected = index_scores_reference(*given)[there]
    torch.testing.assert_close(index_scores(*given)[there], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("form", [FP8_INDEX, FP4_INDEX, FP8_ODD], ids=str)
@pytest.mark.parametrize("lengths", [[1, 1], [3, 0, 18], [0]])
def test_packed_keys_are_scored_as_if_unpacked(form, lengths):
    queries, weights, rows, slots, query_start = scored(lengths, 9, dim=form.dim)
    pool = pack_reference(torch.stack([rows, rows], dim=1), form)[:, 1]
    plain = unpack_reference(pool, form, torch.float32)
    there = present(slots, lengths)
    expected = index_scores_reference(queries, weights, plain, slots, query_start)[there]
    found = index_scores(queries, weights, PackedRows(pool, form), slots, query_start)[there]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


def test_no_tokens_and_no_rows_give_empty_scores():
    assert index_scores(*scored([0], 9)).shape == (0, 9)
    assert index_scores(*scored([2], 0)).shape == (2, 0)
