"""Sparse attention over rows of pools, where K = V and a sink joins the softmax denominator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.aot import Case
from sluice.kernels.cpu import FEW_ROWS, call, compiled, dtype_of, place
from sluice.kernels.formats import read_rows
from sluice.kernels.launch import block_size, dot, runs_triton
from sluice.kernels.packed_rows import FP8_V4, LoadForm, PackedRows, RowLayout, Rows, load_rows
from sluice.kernels.rope import rotate_
from sluice.kernels.rows import row_offsets
from sluice.kernels.splits import (
    LOG2_E,
    LOWEST,
    combine_splits,
    num_splits,
    sink_share,
    unrotate,
    weigh,
)

MAX_GATHERED_ELEMENTS = 1 << 22  # of [queries, rows, dim] at a time: 16 MB, near the last cache
MIN_SPLIT_ROWS = 128
# By bytes of an element; 64 heads are what one instruction of a Hopper tensor core takes.
MAX_BLOCK_HEADS = {2: 64, 4: 16}
BLOCK_ROWS = {2: 32, 4: 16}
PACKED_BLOCK_ROWS = 16

Source = tuple[Rows, Tensor]


def sparse_attention(
    queries: Tensor, sources: Sequence[Source], sinks: Tensor, scale: float, rotation: Tensor
) -> Tensor:
    """Attention of each query over the rows listed for it: [num_tokens, num_heads, dim].

    queries: [num_tokens, num_heads, dim].
    sources: one or two pairs of a pool's layer view [num_pages, rows_per_page, dim], or of its
        packed rows, and the slots [num_tokens, num_rows] that each query attends to there; -1 =
        none. Every query needs at least one row in all. Heads share the rows, which are key and
        value both.
    sinks: [num_heads] fp32, a logit that takes weight from the rows and adds nothing.
    rotation: [num_tokens, rope_dim // 2] complex64 of the queries' positions. As K = V the output
        carries the keys' rotation in its last channels: it is undone by this one's inverse.
    Softmax and sums are fp32; the result has the dtype of `queries`.
    """
    if runs_triton(queries):
        run = _launch
    else:
        run = _attend_few if _is_few(queries, sources) else sparse_attention_reference
    return run(queries, sources, sinks, scale, rotation)


def sparse_attention_reference(
    queries: Tensor, sources: Sequence[Source], sinks: Tensor, scale: float, rotation: Tensor
) -> Tensor:
    """`sparse_attention` in torch, over as many queries at a time as bound the memory."""
    num_tokens, _, dim = queries.shape
    num_rows = sum(slots.shape[1] for _, slots in sources)
    tile = max(1, MAX_GATHERED_ELEMENTS // (num_rows * dim))
    result = torch.empty_like(queries)
    for first in range(0, num_tokens, tile):
        part = slice(first, first + tile)
        parts = [(rows, slots[part]) for rows, slots in sources]
        result[part] = _attend(queries[part], parts, sinks, scale)
    return rotate_(result, rotation.conj())


def _is_few(queries: Tensor, sources: Sequence[Source]) -> bool:
    pools = [rows for rows, _ in sources if isinstance(rows, Tensor)]
    alike = len(pools) == len(sources) and len({rows.dtype for rows in pools}) == 1
    return alike and len(queries) <= FEW_ROWS and compiled(queries, *pools)


def _attend_few(
    queries: Tensor, sources: Sequence[Source], sinks: Tensor, scale: float, rotation: Tensor
) -> Tensor:
    pools = [(rows, slots) for rows, slots in sources if isinstance(rows, Tensor)]
    first, second = pools[0], pools[-1]
    counts = [first[1].shape[1], second[1].shape[1] if len(pools) == 2 else 0]
    listed = [
        part
        for (rows, slots), count in zip((first, second), counts, strict=True)
        for part in (*place(rows), slots.contiguous(), count)
    ]
    result = queries.new_empty(queries.shape)
    sizes = (*queries.shape, scale, dtype_of(queries), dtype_of(first[0]), torch.get_num_threads())
    call("sparse_attention", queries.contiguous(), *listed, sinks, result, *sizes)
    return rotate_(result, rotation.conj())


def _attend(queries: Tensor, sources: Sequence[Source], sinks: Tensor, scale: float) -> Tensor:
    scaled = queries.float() * scale
    gathered = [read_rows(rows, slots, torch.float32) for rows, slots in sources]
    products = [torch.bmm(scaled, rows.transpose(1, 2)) for rows in gathered]
    sink = sinks.view(1, -1, 1).expand(len(queries), -1, 1)
    scores = torch.cat([*products, sink], dim=2)  # [num_tokens, num_heads, num_rows + 1]
    absent = torch.cat([slots < 0 for _, slots in sources], dim=1).unsqueeze(1)
    scores[:, :, :-1].masked_fill_(absent, -torch.inf)
    weights = scores.softmax(2).split([*(rows.shape[1] for rows in gathered), 1], dim=2)
    result = torch.bmm(weights[0], gathered[0])
    for weight, rows in zip(weights[1:-1], gathered[1:], strict=True):
        result.baddbmm_(weight, rows)
    return result.to(queries.dtype)


def _launch(
    queries: Tensor, sources: Sequence[Source], sinks: Tensor, scale: float, rotation: Tensor
) -> Tensor:
    num_tokens, num_heads, dim = queries.shape
    sources = _alike(sources, queries.dtype)
    first, second = RowLayout.of(sources[0][0]), RowLayout.of(sources[-1][0])
    tables = sources[0][1], sources[-1][1] if len(sources) > 1 else sources[0][1][:, :0]
    counts = [slots.shape[1] for slots in tables]
    block_heads = block_size(num_heads, low=16, high=MAX_BLOCK_HEADS[queries.element_size()])
    head_blocks = triton.cdiv(num_heads, block_heads)
    splits = num_splits(queries, num_tokens * head_blocks, sum(counts), MIN_SPLIT_ROWS)
    result = torch.empty_like(queries, memory_format=torch.contiguous_format)
    sums, peaks = None, None
    if splits > 1:
        shape = (num_tokens, splits, num_heads)
        sums = queries.new_empty(*shape, dim, dtype=torch.float32)
        peaks = queries.new_empty(*shape, 2, dtype=torch.float32)
    turns = torch.view_as_real(rotation).contiguous()
    if num_tokens:
        _sparse_attention[(num_tokens, head_blocks, splits)](
            queries.contiguous(),
            first.rows,
            tables[0],
            second.rows,
            tables[1],
            sinks,
            turns,
            result,
            sums,
            peaks,
            scale * LOG2_E.value,
            num_heads,
            *counts,
            triton.cdiv(sum(counts), splits),
            first.page_rows,
            second.page_rows,
            *first.strides,
            *second.strides,
            DIM=dim,
            ROPE_DIM=2 * rotation.shape[1],
            BLOCK_DIM=block_size(dim, low=16, high=1 << 30),
            BLOCK_HEADS=block_heads,
            BLOCK_ROWS=_block_rows(queries, first.form),
            FORM=first.form,
            **_SHAPE,
        )
    if sums is not None and peaks is not None:
        combine_splits(sums, peaks, sinks, turns, result)
    return result


def _block_rows(queries: Tensor, form: LoadForm | None) -> int:
    """Rows at a time: while packed ones are unpacked, no more fit into a Hopper's registers."""
    return BLOCK_ROWS[queries.element_size()] if form is None else PACKED_BLOCK_ROWS


def _alike(sources: Sequence[Source], dtype: torch.dtype) -> Sequence[Source]:
    """Sources as they are if rows are in one dtype or one packed format, else in one dtype.

    The kernel's loop reads one kind of row, and pools may be stored in several.
    """
    plain = [rows.dtype for rows, _ in sources if isinstance(rows, Tensor)]
    packed = {rows.form for rows, _ in sources if isinstance(rows, PackedRows)}
    if len({*plain, *packed}) == 1:
        return sources
    return [_in_dtype(plain[0] if plain else dtype, rows, slots) for rows, slots in sources]


def _in_dtype(dtype: torch.dtype, rows: Rows, slots: Tensor) -> Source:
    """A source as it is, or its rows copied one after another, a query's rows a page of them."""
    if isinstance(rows, Tensor) and rows.dtype == dtype:
        return rows, slots
    place = torch.arange(slots.numel(), device=slots.device).view_as(slots)
    return read_rows(rows, slots, dtype), torch.where(slots >= 0, place, -1)


@triton.jit
def _sparse_attention(
    queries: tl.tensor,
    first_rows: tl.tensor,
    first_slots: tl.tensor,
    second_rows: tl.tensor,
    second_slots: tl.tensor,
    sinks: tl.tensor,
    rotation: tl.tensor,
    result: tl.tensor,
    sums: tl.tensor,
    peaks: tl.tensor,
    scale: tl.tensor,
    num_heads: tl.tensor,
    num_first: tl.tensor,
    num_second: tl.tensor,
    split_rows: tl.tensor,
    first_page_rows: tl.tensor,
    second_page_rows: tl.tensor,
    first_page_stride: tl.tensor,
    first_row_stride: tl.tensor,
    second_page_stride: tl.tensor,
    second_row_stride: tl.tensor,
    DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    FORM: tl.constexpr,
) -> None:
    """BLOCK_HEADS heads of one query over one range of its rows: program (query, heads, split).

    queries, result: [num_tokens, num_heads, DIM]; first_slots: [num_tokens, num_first] int64,
    second_slots: [num_tokens, num_second]; all contiguous. A range is `split_rows` places
    of both lists in a row. Slots of -1 are not read. Rows of both are as FORM says: `load_rows`.
    Writes `result`, finished; or, where there are several ranges, `sums` and `peaks` as
    `combine_splits` takes them.
    """
    token, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    channel = tl.arange(0, BLOCK_DIM)
    element = head[:, None] * DIM + channel[None, :]
    within = (head < num_heads)[:, None] & (channel < DIM)[None, :]
    query = tl.load(queries + token * num_heads * DIM + element, mask=within, other=0.0)
    peak = tl.full([BLOCK_HEADS], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    acc = tl.zeros([BLOCK_HEADS, BLOCK_DIM], tl.float32)
    begin, end = split * split_rows, split * split_rows + split_rows
    for source in tl.range(2, disable_licm=True):
        # One copy of the loop below for both sources: two would not fit into the registers.
        is_first = source == 0
        rows = tl.where(is_first, first_rows, second_rows)
        slots = tl.where(is_first, first_slots, second_slots)
        num_rows = tl.where(is_first, num_first, num_second)
        page_rows = tl.where(is_first, first_page_rows, second_page_rows)
        page_stride = tl.where(is_first, first_page_stride, second_page_stride)
        row_stride = tl.where(is_first, first_row_stride, second_row_stride)
        skipped = tl.where(is_first, 0, num_first)
        slots += token * num_rows
        first = tl.minimum(tl.maximum(begin - skipped, 0), num_rows)
        last = tl.minimum(tl.maximum(end - skipped, 0), num_rows)
        low, high = _extent(slots, first, last, 4 * BLOCK_ROWS)
        for start in tl.range(low, high, BLOCK_ROWS, disable_licm=True):
            place = start + tl.arange(0, BLOCK_ROWS)
            slot = tl.load(slots + place, mask=place < high, other=-1)
            at = row_offsets(slot, page_stride, row_stride, page_rows)
            row = load_rows(rows, at, slot >= 0, DIM, BLOCK_DIM, FORM).to(query.dtype)
            scores = dot(query, tl.trans(row), tl.zeros([BLOCK_HEADS, BLOCK_ROWS], tl.float32))
            scores = tl.where((slot >= 0)[None, :], scores * scale, float("-inf"))
            weights, peak, total, kept = weigh(scores, peak, total)
            acc = dot(weights.to(row.dtype), row, acc * kept[:, None])

    if sums is not None:
        part = token * tl.num_programs(2) + split
        tl.store(sums + part * num_heads * DIM + element, acc, mask=within)
        at = peaks + (part * num_heads + head) * 2
        tl.store(at, peak, mask=head < num_heads)
        tl.store(at + 1, total, mask=head < num_heads)
    else:
        sink = tl.load(sinks + head, mask=head < num_heads, other=0.0) * LOG2_E
        acc *= sink_share(peak, total, sink)[:, None]
        turns = rotation + token * ROPE_DIM
        acc = unrotate(acc, turns, BLOCK_HEADS, DIM, ROPE_DIM, BLOCK_DIM)
        at = result + token * num_heads * DIM + element
        tl.store(at, acc.to(result.dtype.element_ty), mask=within)


@triton.jit
def _extent(
    slots: tl.tensor, first: tl.tensor, last: tl.tensor, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The part of places [first, last) outside of which every slot is -1.

    Tables are as wide as the longest request may become, and most requests are short.
    """
    low, high = last, first
    for start in range(first, last, BLOCK):
        place = start + tl.arange(0, BLOCK)
        there = tl.load(slots + place, mask=place < last, other=-1) >= 0
        low = tl.minimum(low, tl.min(tl.where(there, place, last), 0))
        high = tl.maximum(high, tl.max(tl.where(there, place + 1, first), 0))
    return low, high


_SHAPE: dict[str, Any] = {"num_warps": 8, "num_stages": 2}
_FLASH = {"DIM": 512, "ROPE_DIM": 64, "BLOCK_DIM": 512, "BLOCK_HEADS": 64, "BLOCK_ROWS": 32}
_SIGNATURE = {
    **dict.fromkeys(("queries", "first_rows", "second_rows"), "*bf16:16"),
    **dict.fromkeys(("first_slots", "second_slots"), "*i64:16"),
    **dict.fromkeys(("sinks", "rotation"), "*fp32:16"),
    "result": "*bf16:16",
    "scale": "fp32",
    "num_heads": "i32:16",
    **dict.fromkeys(("num_first", "num_second", "split_rows"), "i32"),
    **dict.fromkeys(("first_page_rows", "second_page_rows"), "i32"),
    **{f"{s}_{u}_stride": "i64:16" for s in ("first", "second") for u in ("page", "row")},
}
_SPLIT = _SIGNATURE | {"sums": "*fp32:16", "peaks": "*fp32:16"}
_PACKED = {f"{s}_rows": "*u8:16" for s in ("first", "second")}
_PACKED |= {f"{s}_{u}_stride": "i64" for s in ("first", "second") for u in ("page", "row")}
_FP8_ROWS = _FLASH | {"FORM": FP8_V4, "BLOCK_ROWS": PACKED_BLOCK_ROWS}
AOT = (
    Case(
        _sparse_attention,
        "V4-Flash decode, CSA layer",
        _SPLIT,
        _FLASH,
        **_SHAPE,
    ),
    Case(
        _sparse_attention,
        "V4-Flash decode, CSA layer, fp8_v4 rows",
        _SPLIT | _PACKED,
        _FP8_ROWS,
        **_SHAPE,
    ),
    Case(
        _sparse_attention,
        "V4-Flash decode of many requests, fp8_v4 rows",
        _SIGNATURE | _PACKED,
        _FP8_ROWS,
        **_SHAPE,
    ),
    Case(
        _sparse_attention,
        "V4-Flash prefill, HCA layer",
        _SIGNATURE,
        _FLASH,
        **_SHAPE,
        may_spill=True,  # a few bytes, outside of the loop over rows
    ),
)
