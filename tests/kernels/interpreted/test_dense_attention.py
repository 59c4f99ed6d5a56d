"""The paged grouped-query kernel: chunks and single queries, whole and split, among NaN."""

import pytest
import torch

from sluice.kernels.dense_attention import (
    BLOCK_QUERIES,
    MIN_SPLIT_TOKENS,
    Span,
    decode_attention,
    decode_attention_reference,
    prompt_attention,
    prompt_attention_reference,
)

PAGE, NUM_KV_HEADS = 4, 2


def paged(lengths, dim):
    """Rows of requests at random pages, NaN beyond their ends; and the page table."""
    max_pages = -(-max(lengths) // PAGE)
    pool = torch.full((len(lengths) * max_pages + 1, 2, PAGE, 2, NUM_KV_HEADS, dim), torch.nan)
    table = 1 + torch.randperm(len(lengths) * max_pages).view(len(lengths), max_pages)
    for pages, length in zip(table, lengths, strict=True):
        token = torch.arange(length)
        pool[pages[token // PAGE], 1, token % PAGE] = torch.randn(length, 2, NUM_KV_HEADS, dim)
    return pool[:, 1], table


@pytest.mark.parametrize("dim", [8, 24])
@pytest.mark.parametrize("lengths", [[1], [4, 33, 8], [2 * MIN_SPLIT_TOKENS + 3, 1]])
def test_decode_equals_the_reference(lengths, dim):
    rows, table = paged(lengths, dim)
    queries, num_tokens = torch.randn(len(lengths), 6, dim), torch.tensor(lengths)
    expected = decode_attention_reference(queries, rows, table, num_tokens, dim**-0.5)
    actual = decode_attention(queries, rows, table, num_tokens, dim**-0.5)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("counts", [[1], [7, 0, 5], [BLOCK_QUERIES // 3 + 2, 4]])
def test_chunks_equal_the_reference(counts):
    """Three heads a kv head, so that a tile's last lanes have no query."""
    lengths = [2 * count + 3 * place for place, count in enumerate(counts)]
    rows, table = paged(lengths, 8)
    ends = torch.tensor(counts).cumsum(0).tolist()
    spans = [Span(end - n, end, total) for n, end, total in zip(counts, ends, lengths, strict=True)]
    queries = torch.randn(sum(counts), 6, 8)
    expected = prompt_attention_reference(queries, rows, table, spans, 0.3)
    torch.testing.assert_close(prompt_attention(queries, rows, table, spans, 0.3), expected)


def test_bf16_equals_the_reference_to_its_precision():
    rows, table = paged([9, 40], 16)
    queries, num_tokens = torch.randn(2, 4, 16, dtype=torch.bfloat16), torch.tensor([9, 40])
    expected = decode_attention_reference(queries, rows, table, num_tokens, 0.25)
    actual = decode_attention(queries, rows, table, num_tokens, 0.25)
    torch.testing.assert_close(actual, expected, atol=3e-2, rtol=3e-2)


def test_no_queries_give_an_empty_result():
    rows, table = paged([4], 8)
    assert prompt_attention(torch.randn(0, 6, 8), rows, table, [Span(0, 0, 4)], 1.0).shape[0] == 0
    none = torch.zeros(0, dtype=torch.int64)
    assert decode_attention(torch.randn(0, 6, 8), rows, table[:0], none, 1.0).shape == (0, 6, 8)
