"""Work of the kernels around the pools: rows, attention, indexer and compressors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sluice.benchmarks.gpu_work import (
    Shape,
    Work,
    num_bytes_of,
    rounding,
    row_formats,
    spread,
)
from sluice.kernels.accumulators import accumulate_blocks
from sluice.kernels.attention import sparse_attention
from sluice.kernels.compressor import compress_overlapping
from sluice.kernels.dense_attention import Span, decode_attention, prompt_attention
from sluice.kernels.formats import pack, unpack_reference
from sluice.kernels.indexer import index_scores
from sluice.kernels.packed_rows import PackedRows, Rows
from sluice.kernels.rope import inverse_frequencies, rotations
from sluice.kernels.rows import gather_rows, write_rows
from sluice.kernels.topk import causal_topk

PAGE_ROWS = 64
CSA_RATIO, HCA_RATIO = 4, 128
KV_HEADS, GROUP, DENSE_DIM = 4, 4, 128  # of the dense model


def attention_work(shape: Shape) -> Iterator[Work]:
    yield _gather(shape)
    yield _write(shape)
    compressed = min(shape.top_k, shape.context // CSA_RATIO)
    yield _sparse(shape, "decode, CSA", shape.batch, compressed)
    yield _sparse(shape, "decode, CSA", shape.batch, compressed, "fp8_v4")
    yield _sparse(shape, "prompt, CSA", shape.chunk, compressed)
    yield _sparse(shape, "prompt, HCA", shape.chunk, max(1, shape.context // HCA_RATIO))
    yield _scores(shape, "decode", shape.batch, 1)
    yield _scores(shape, "decode", shape.batch, 1, "fp8")
    yield _scores(shape, "decode", shape.batch, 1, "fp4")
    yield _scores(shape, "prompt", 1, shape.chunk)
    yield _top_k(shape)
    yield _compress(shape)
    yield _accumulate(shape)
    yield _dense_decode(shape)
    yield _dense_prompt(shape)


def _pool(num_rows: int, *row_shape: int, dtype: torch.dtype) -> Tensor:
    """A layer's view of a pool of two layers with room for `num_rows`, NaN in the null page."""
    num_pages = 1 + -(-num_rows // PAGE_ROWS)
    pool = torch.randn(num_pages, 2, PAGE_ROWS, *row_shape, dtype=dtype)
    pool[0] = torch.nan
    return pool[:, 1]


def _stored(rows: Tensor, shape: Shape, form: str | None) -> Rows:
    """A pool's rows as they are, or packed."""
    if form is None:
        return rows
    row_format = row_formats(shape)[form]
    return PackedRows(pack(rows, row_format), row_format)


def _at(rows: Rows, slots: Tensor) -> Tensor:
    """fp64 vectors at slots, zeros at -1."""
    page, offset = slots // PAGE_ROWS, slots % PAGE_ROWS
    if isinstance(rows, Tensor):
        found = rows[page, offset].double()
    else:
        found = unpack_reference(rows.rows[page, offset], rows.form, torch.float32).double()
    found[slots < 0] = 0
    return found


def _memory(rows: Rows) -> Tensor:
    return rows if isinstance(rows, Tensor) else rows.rows


def _slots(rows: Rows, *size: int) -> Tensor:
    """Random slots beyond the null page."""
    return torch.randint(PAGE_ROWS, _memory(rows).shape[0] * PAGE_ROWS, size)


def _gather(shape: Shape) -> Work:
    rows = _pool(shape.context, shape.head_dim, dtype=shape.dtype)
    slots = _slots(rows, shape.chunk)
    slots[0] = -1
    return Work(
        "copy_rows", "gather", lambda: gather_rows(rows, slots), lambda: _at(rows, slots),
        tolerance=0, num_bytes=2 * num_bytes_of(rows[0, 0]) * len(slots),
    )  # fmt: skip


def _write(shape: Shape) -> Work:
    rows = _pool(shape.chunk, shape.head_dim, dtype=shape.dtype)
    slots = PAGE_ROWS + torch.randperm(shape.chunk)
    values = torch.randn(shape.chunk, shape.head_dim, dtype=shape.dtype)

    def run() -> Tensor:
        write_rows(rows, slots, values)
        return rows

    def expected() -> Tensor:
        result = rows.double().clone()
        result[slots // PAGE_ROWS, slots % PAGE_ROWS] = values.double()
        return result[1:]

    sample = torch.arange(1, rows.shape[0])
    return Work("copy_rows", "write", run, expected, 0, 2 * num_bytes_of(values), sample=sample)


def _sparse(
    shape: Shape, label: str, num_tokens: int, num_compressed: int, form: str | None = None
) -> Work:
    window, compressed = (
        _stored(_pool(num_rows, shape.head_dim, dtype=shape.dtype), shape, form)
        for num_rows in (
            num_tokens + shape.window,
            max(num_compressed, shape.context // CSA_RATIO),
        )
    )
    sources = [
        (window, _slots(window, num_tokens, shape.window)),
        (compressed, _slots(compressed, num_tokens, num_compressed)),
    ]
    sources[1][1][:, num_compressed // 2 + 1 :: 7] = -1
    queries = torch.randn(num_tokens, shape.num_heads, shape.head_dim, dtype=shape.dtype)
    sinks, scale = torch.randn(shape.num_heads), shape.head_dim**-0.5
    positions = torch.arange(num_tokens) * 7
    turns = rotations(positions, inverse_frequencies(1e4, shape.rope_dim))
    sample = spread(num_tokens)

    def expected() -> Tensor:
        keys = torch.cat([_at(rows, slots[sample]) for rows, slots in sources], 1)
        absent = torch.cat([slots[sample] < 0 for _, slots in sources], 1)
        scores = torch.einsum("thd,trd->thr", queries[sample].double(), keys) * scale
        scores = scores.masked_fill(absent[:, None], -torch.inf)
        sink = sinks.double().expand(len(sample), -1).unsqueeze(2)
        weights = torch.cat([scores, sink], 2).softmax(2)[..., :-1]
        result = torch.einsum("thr,trd->thd", weights, keys)
        return _unrotated(result, turns[sample])

    num_rows = shape.window + num_compressed
    memory = _memory(window), _memory(compressed)
    touched = num_tokens * num_rows * num_bytes_of(memory[0][0, 0])
    return Work(
        "sparse_attention",
        _labelled(label, form),
        lambda: sparse_attention(queries, sources, sinks, scale, turns),
        expected,
        tolerance=rounding(shape),
        num_bytes=min(touched, num_bytes_of(*memory)) + 2 * num_bytes_of(queries),
        flops=4 * num_tokens * shape.num_heads * num_rows * shape.head_dim,
        sample=sample,
    )


def _labelled(label: str, form: str | None) -> str:
    return label if form is None else f"{label}, {form} rows"


def _unrotated(x: Tensor, turns: Tensor) -> Tensor:
    """fp64 [n, heads, dim] with the last channels turned back."""
    tail = x[..., -2 * turns.shape[1] :].unflatten(-1, (-1, 2)).contiguous()
    turned = torch.view_as_complex(tail) * turns.conj().to(torch.complex128)[:, None]
    x[..., -2 * turns.shape[1] :] = torch.view_as_real(turned).flatten(-2)
    return x


def _scores(
    shape: Shape, label: str, num_requests: int, tokens_each: int, form: str | None = None
) -> Work:
    num_rows, num_tokens = shape.context // CSA_RATIO, num_requests * tokens_each
    pool = _pool(num_requests * num_rows, shape.index_dim, dtype=shape.dtype)
    rows = _stored(pool, shape, form)
    slots = PAGE_ROWS + torch.arange(num_requests * num_rows).view(num_requests, num_rows)
    queries = torch.randn(num_tokens, shape.index_heads, shape.index_dim, dtype=shape.dtype)
    weights = torch.randn(num_tokens, shape.index_heads)
    start = torch.arange(num_requests + 1) * tokens_each
    sample = spread(num_tokens, 8)

    def expected() -> Tensor:
        keys = _at(rows, slots[torch.div(sample, tokens_each, rounding_mode="floor")])
        products = torch.einsum("thd,trd->thr", queries[sample].double(), keys).relu()
        return torch.einsum("thr,th->tr", products, weights[sample].double())

    keys_bytes = num_requests * num_rows * num_bytes_of(_memory(rows)[0, 0])
    return Work(
        "index_scores",
        _labelled(label, form),
        lambda: index_scores(queries, weights, rows, slots, start),
        expected,
        tolerance=1e-5 if shape.dtype == torch.float32 else 1e-4,
        num_bytes=keys_bytes + num_bytes_of(queries) + 4 * num_tokens * num_rows,
        flops=2 * num_tokens * num_rows * shape.index_heads * shape.index_dim,
        sample=sample,
    )


def _top_k(shape: Shape) -> Work:
    num_rows = shape.context // CSA_RATIO
    scores = torch.randn(shape.batch, num_rows).mul(50).round()  # many ties
    visible = torch.randint(1, num_rows + 1, (shape.batch,))
    k = min(shape.top_k, num_rows - 1)

    def expected() -> Tensor:
        result = torch.full((shape.batch, k), -1.0, dtype=torch.float64)
        for row, count in enumerate(visible.tolist()):
            order = scores[row, :count].sort(descending=True, stable=True).indices[:k]
            result[row, : len(order)] = order.sort().values.double()
        return result

    return Work(
        "causal_topk", f"{k} of {num_rows}", lambda: causal_topk(scores, visible, k), expected,
        tolerance=0, num_bytes=num_bytes_of(scores) + 8 * k * shape.batch,
    )  # fmt: skip


def _compress(shape: Shape) -> Work:
    num_blocks = shape.chunk // CSA_RATIO
    rows = _pool(shape.chunk, 2, 2 * shape.head_dim, dtype=torch.float32)
    tokens = torch.arange(num_blocks)[:, None] * CSA_RATIO + torch.arange(-CSA_RATIO, CSA_RATIO)
    slots = torch.where(tokens >= 0, tokens + PAGE_ROWS, -1)

    def expected() -> Tensor:
        states, dim = _at(rows, slots), shape.head_dim
        before, own = states[:, :CSA_RATIO, :, :dim], states[:, CSA_RATIO:, :, dim:]
        kv, score = torch.cat([before, own], 1).unbind(2)
        score = score.masked_fill((slots < 0).unsqueeze(-1), -torch.inf)
        return (kv * score.softmax(1)).sum(1)

    return Work(
        "compress_overlapping",
        "prompt",
        lambda: compress_overlapping(rows, slots),
        expected,
        tolerance=1e-5,
        num_bytes=shape.chunk * num_bytes_of(rows[0, 0]) + 4 * num_blocks * shape.head_dim,
    )


def _accumulate(shape: Shape) -> Work:
    """The first block goes on, the others begin."""
    size = min(HCA_RATIO, 1 + shape.chunk // 3)
    block_of_token = torch.div(torch.arange(shape.chunk), size, rounding_mode="floor")
    num_blocks = int(block_of_token[-1]) + 1
    rows = _pool(PAGE_ROWS, 3, shape.head_dim, dtype=torch.float32)
    slots = torch.full((num_blocks,), -1)
    slots[0] = PAGE_ROWS + 3
    kv, score = torch.randn(2, shape.chunk, shape.head_dim)

    def expected() -> Tensor:
        result = torch.empty(num_blocks, 3, shape.head_dim, dtype=torch.float64)
        for block in range(num_blocks):
            mine = block_of_token == block
            scores, values = score[mine].double(), kv[mine].double()
            peak = scores.amax(0)
            old = _at(rows, slots[:1])[0] if block == 0 else None
            if old is not None:
                peak = torch.maximum(peak, old[0])
            weight = (scores - peak).exp()
            total, weighted = weight.sum(0), (weight * values).sum(0)
            if old is not None:
                kept = (old[0] - peak).exp()
                total, weighted = total + old[1] * kept, weighted + old[2] * kept
            result[block] = torch.stack([peak, total, weighted])
        return result

    return Work(
        "accumulate_blocks", "prompt",
        lambda: accumulate_blocks(rows, slots, block_of_token, kv, score), expected,
        tolerance=1e-5, num_bytes=num_bytes_of(kv, score) + 12 * num_blocks * shape.head_dim,
    )  # fmt: skip


def _dense_pool(shape: Shape, num_requests: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """A layer's rows, and page tables [num_requests, max_pages]."""
    pages_each = -(-num_tokens // PAGE_ROWS)
    num_rows = num_requests * pages_each * PAGE_ROWS
    rows = _pool(num_rows, 2, KV_HEADS, DENSE_DIM, dtype=shape.dtype)
    table = 1 + torch.randperm(num_requests * pages_each).view(num_requests, pages_each)
    return rows, table


def _dense_expected(queries: Tensor, kv: Tensor, lengths: Tensor) -> Tensor:
    """fp64 attention of queries [n, heads, dim] over the first `lengths[i]` of kv [n|1, t, ..]."""
    keys, values = kv.double().repeat_interleave(GROUP, 3).unbind(2)
    scores = torch.einsum("nhd,nthd->nht", queries.double(), keys.expand(len(queries), -1, -1, -1))
    hidden = torch.arange(kv.shape[1]) >= lengths[:, None]
    weights = (scores * DENSE_DIM**-0.5).masked_fill(hidden[:, None], -torch.inf).softmax(2)
    return torch.einsum("nht,nthd->nhd", weights, values.expand(len(queries), -1, -1, -1))


def _dense_decode(shape: Shape) -> Work:
    num_requests, most = shape.batch // 2 + 1, shape.context // 4
    rows, table = _dense_pool(shape, num_requests, most)
    num_tokens = torch.randint(most // 2, most + 1, (num_requests,))
    queries = torch.randn(num_requests, KV_HEADS * GROUP, DENSE_DIM, dtype=shape.dtype)
    sample = spread(num_requests, 4)

    def expected() -> Tensor:
        return _dense_expected(
            queries[sample], rows[table[sample]].flatten(1, 2), num_tokens[sample]
        )

    return Work(
        "paged_attention",
        "decode",
        lambda: decode_attention(queries, rows, table, num_tokens, DENSE_DIM**-0.5),
        expected,
        tolerance=rounding(shape),
        num_bytes=int(num_tokens.sum()) * num_bytes_of(rows[0, 0]) + 2 * num_bytes_of(queries),
        flops=4 * int(num_tokens.sum()) * KV_HEADS * GROUP * DENSE_DIM,
        sample=sample,
    )


def _dense_prompt(shape: Shape) -> Work:
    rows, table = _dense_pool(shape, 1, shape.chunk)
    spans = [Span(0, shape.chunk, shape.chunk)]
    queries = torch.randn(shape.chunk, KV_HEADS * GROUP, DENSE_DIM, dtype=shape.dtype)
    sample = spread(shape.chunk, 8)

    def expected() -> Tensor:
        return _dense_expected(queries[sample], rows[table].flatten(1, 2), sample + 1)

    pairs = shape.chunk * (shape.chunk + 1) // 2
    return Work(
        "paged_attention",
        "prompt",
        lambda: prompt_attention(queries, rows, table, spans, DENSE_DIM**-0.5),
        expected,
        tolerance=rounding(shape),
        num_bytes=shape.chunk * num_bytes_of(rows[0, 0]) + 2 * num_bytes_of(queries),
        flops=4 * pairs * KV_HEADS * GROUP * DENSE_DIM,
        sample=sample,
    )
