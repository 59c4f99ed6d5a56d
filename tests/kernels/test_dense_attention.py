"""Paged grouped-query attention reads a request's own rows and nothing else."""

import random

import pytest
import torch
import torch.nn.functional as F

from sluice.kernels.dense_attention import Span, decode_attention, prompt_attention

NUM_HEADS, NUM_KV_HEADS, DIM, PAGE = 6, 2, 8, 4
SCALE = DIM**-0.5


def paged(lengths, seed=0):
    """Rows of requests at random pages among NaN; page table; keys and values by request."""
    rng = random.Random(seed)
    pool = torch.full((40, 3, PAGE, 2, NUM_KV_HEADS, DIM), torch.nan)  # three layers
    free = rng.sample(range(1, 40), 39)
    table = torch.zeros(len(lengths), -(-max(lengths) // PAGE), dtype=torch.int64)
    kv = [torch.randn(length, 2, NUM_KV_HEADS, DIM) for length in lengths]
    for request, rows in enumerate(kv):
        for number, part in enumerate(rows.split(PAGE)):
            table[request, number] = page = free.pop()
            pool[page, 1, : len(part)] = part
    return pool[:, 1], table, kv


def reference(queries, kv):
    """Queries at the last places of kv, one by one."""
    groups = NUM_HEADS // NUM_KV_HEADS
    keys, values = kv.repeat_interleave(groups, dim=2).permute(1, 2, 0, 3)
    first = len(kv) - len(queries)
    outputs = []
    for n, query in enumerate(queries):
        seen = slice(0, first + n + 1)
        scores = torch.einsum("hd,hld->hl", query, keys[:, seen]) * SCALE
        outputs.append(torch.einsum("hl,hld->hd", scores.softmax(1), values[:, seen]))
    return torch.stack(outputs)


@pytest.mark.parametrize("lengths", [[1], [4], [5, 1, 16], [9, 9, 13, 2]])
def test_decode_sees_each_requests_tokens_only(lengths):
    rows, table, kv = paged(lengths)
    queries = torch.randn(len(lengths), NUM_HEADS, DIM)
    actual = decode_attention(queries, rows, table, torch.tensor(lengths), SCALE)
    expected = [reference(query[None], own) for query, own in zip(queries, kv, strict=True)]
    torch.testing.assert_close(actual, torch.cat(expected))


@pytest.mark.parametrize("seed", range(5))
def test_chunks_see_their_own_past_and_are_causal(seed):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 20) for _ in range(4)]
    counts = [rng.randint(1, length) for length in lengths]
    rows, table, kv = paged(lengths, seed)
    queries = torch.randn(sum(counts), NUM_HEADS, DIM)
    ends = torch.tensor(counts).cumsum(0).tolist()
    spans = [Span(end - n, end, total) for n, end, total in zip(counts, ends, lengths, strict=True)]
    actual = prompt_attention(queries, rows, table, spans, SCALE)
    parts = zip(queries.split(counts), kv, strict=True)
    expected = [reference(own, rows_of) for own, rows_of in parts]
    torch.testing.assert_close(actual, torch.cat(expected))


def test_a_page_table_wider_than_needed_changes_nothing():
    rows, table, _ = paged([5, 7])
    queries = torch.randn(2, NUM_HEADS, DIM)
    num_tokens = torch.tensor([5, 7])
    exact = decode_attention(queries, rows, table, num_tokens, SCALE)
    wide = decode_attention(queries, rows, F.pad(table, (0, 3)), num_tokens, SCALE)
    torch.testing.assert_close(exact, wide)
