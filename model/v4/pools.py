"""The cache pools of DeepSeek-V4, and the only names they have.

    swa_kv            every layer   one row a token          the sliding window
    c4_kv             CSA layers    one row a CSA block      everything
    c4_index_k        CSA layers    one row a CSA block      everything (the indexer's keys)
    c128_kv           HCA layers    one row an HCA block     everything
    c4_state          CSA layers    kv and score a token     the unfinished block and one before
    c4_index_state    CSA layers    kv and score a token     the same, of the indexer's compressor
    c128_state        HCA layers    max, sum, weighted kv    the unfinished block, as one row

Names stay whatever the ratios are: c4 is the CSA branch, c128 the HCA branch. A pool that no layer
uses is not declared. The native path has one pool instead:

    kv            every layer   raw inputs of a token    everything
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sluice.cache.row_format import RowFormat
from sluice.cache.spec import Block, Full, PoolSpec, Window
from sluice.model.v4.config import DeepseekV4Config, LayerType

SWA_KV = "swa_kv"
C4_KV = "c4_kv"
C4_INDEX_K = "c4_index_k"
C128_KV = "c128_kv"
C4_STATE = "c4_state"
C4_INDEX_STATE = "c4_index_state"
C128_STATE = "c128_state"
KV = "kv"  # the one pool of the native path

MAX_WINDOW_PAGE_TOKENS = 64  # 64 rows: the page of FlashMLA's kernels
STATE_PAGE_BLOCKS = 2  # a CSA state page spans the live block and the one before
NATIVE_PAGE_TOKENS = 64  # at V4-Flash's shapes a page of all layers has 34 MB
VECTOR_DTYPES = ("float32", "bfloat16")  # of kv and index rows that are not packed
FULL_PAGE_BLOCKS = 2  # of the coarsest ratio: 256 tokens, hence 64 CSA rows, for 4 and 128


def declare(config: DeepseekV4Config, *, dtype: str = "float32") -> tuple[PoolSpec, ...]:
    """The pools of the hybrid path in their default layout.

    Rows of kv and of index keys are vectors of `dtype`, and a role may choose to pack them;
    compressor state is always fp32.
    """
    csa, hca = config.layers_of(LayerType.CSA), config.layers_of(LayerType.HCA)
    kv, index = _kv_row(config, dtype), _index_row(config, dtype)
    specs = [_window(config, kv)]
    if csa:
        specs += [_compressed(C4_KV, csa, kv, config.csa_ratio, config)]
        specs += [_compressed(C4_INDEX_K, csa, index, config.csa_ratio, config)]
    if hca:
        specs += [_compressed(C128_KV, hca, kv, config.hca_ratio, config)]
    if csa:
        specs += [_raw_state(C4_STATE, csa, config.head_dim, config.csa_ratio)]
        specs += [_raw_state(C4_INDEX_STATE, csa, config.index_head_dim, config.csa_ratio)]
    if hca:
        specs += [_accumulators(hca, config)]
    return tuple(specs)


def replay_tokens(specs: Sequence[PoolSpec], sliding_window: int) -> int:
    """How far before a length n computing must start for every row live at n to come out right.

    Rows of Full pools up to n are at hand, those of window and state are not; n is a multiple of
    the Full pools' spans. A token's row in layer l is made of its input to that layer, which saw
    the window of the layer below, and so on down to the token ids:

        layer 0     ├──────────────────────────────►   right from the first token on
        layer 1               ├────────────────────►   from sliding_window - 1 tokens later on
        layer 2                         ├──────────►   and so on
                                               ├──┤    live at n
    """
    far = math.lcm(*(spec.tokens_per_row for spec in specs)) << 32  # n, where all have a past
    return max(
        (
            max(spec.layers) * (sliding_window - 1) + far - spec.retention.first_live(far)
            for spec in specs
            if not isinstance(spec.retention, Full)
        ),
        default=0,
    )


@dataclass(frozen=True)
class Row:
    """What a pool stores for a layer at one place, and what a role may store instead."""

    shape: tuple[int, ...]
    dtype: str
    choices: tuple[str | RowFormat, ...]


def _kv_row(config: DeepseekV4Config, dtype: str) -> Row:
    """fp8_v4 is the released models' own: channels without position fp8, those with it bf16."""
    fp8 = RowFormat(
        name="fp8_v4",
        num_coded=config.head_dim - config.rope_dim,
        num_plain=config.rope_dim,
        tile=64,
        code="e4m3",
        scale="ue8m0",
    )
    return Row((config.head_dim,), dtype, (*VECTOR_DTYPES, fp8))


def _index_row(config: DeepseekV4Config, dtype: str) -> Row:
    """fp4 as the released models simulate it in training, or fp8 with one scale a row."""
    dim = config.index_head_dim
    fp8 = RowFormat("fp8", dim, 0, tile=dim, code="e4m3", scale="float32", rotated=True)
    fp4 = RowFormat("fp4", dim, 0, tile=32, code="e2m1", scale="ue8m0", rotated=True)
    can_rotate = dim & (dim - 1) == 0  # a Hadamard matrix of any other size takes more to make
    return Row((dim,), dtype, (*VECTOR_DTYPES, fp8, fp4) if can_rotate else VECTOR_DTYPES)


def _window(config: DeepseekV4Config, row: Row) -> PoolSpec:
    return PoolSpec(
        name=SWA_KV,
        layers=tuple(range(config.num_layers)),
        row_shape=row.shape,
        dtype=row.dtype,
        tokens_per_row=1,
        tokens_per_page=min(MAX_WINDOW_PAGE_TOKENS, config.sliding_window),
        retention=Window(config.sliding_window),
        choices=row.choices,
    )


def _compressed(
    name: str, layers: tuple[int, ...], row: Row, ratio: int, config: DeepseekV4Config
) -> PoolSpec:
    return PoolSpec(
        name=name,
        layers=layers,
        row_shape=row.shape,
        dtype=row.dtype,
        tokens_per_row=ratio,
        tokens_per_page=_full_page_tokens(config),
        retention=Full(),
        choices=row.choices,
    )


def _full_page_tokens(config: DeepseekV4Config) -> int:
    """One span for all Full pools, so that they share a page table."""
    ratios = {LayerType.CSA: config.csa_ratio, LayerType.HCA: config.hca_ratio}
    used = [ratio for kind, ratio in ratios.items() if config.layers_of(kind)]
    return FULL_PAGE_BLOCKS * math.lcm(*used)


def _raw_state(name: str, layers: tuple[int, ...], dim: int, ratio: int) -> PoolSpec:
    return PoolSpec(
        name=name,
        layers=layers,
        row_shape=(2, 2 * dim),  # kv and score, each for the next block's row and its own
        dtype="float32",
        tokens_per_row=1,
        tokens_per_page=STATE_PAGE_BLOCKS * ratio,
        retention=Block(ratio, overlap=1),
    )


def _accumulators(layers: tuple[int, ...], config: DeepseekV4Config) -> PoolSpec:
    return PoolSpec(
        name=C128_STATE,
        layers=layers,
        row_shape=(3, config.head_dim),  # max, sum, weighted kv
        dtype="float32",
        tokens_per_row=config.hca_ratio,
        tokens_per_page=config.hca_ratio,
        retention=Block(config.hca_ratio),
    )


def declare_native(config: DeepseekV4Config) -> tuple[PoolSpec, ...]:
    """The one pool of the native path: what every token brings to every layer's attention, raw.

    A row is as wide as the widest layer needs; the rest of narrower layers' rows is never written
    and never read. fp32 whatever the model's dtype is: scores and what they weigh need it, and
    vectors of a smaller dtype come back from it unchanged.
    """
    used = (native_row(config, layer_type) for layer_type in set(config.layer_types))
    width = max(sum(math.prod(shape) for shape in parts.values()) for parts in used)
    return (
        PoolSpec(
            name=KV,
            layers=tuple(range(config.num_layers)),
            row_shape=(width,),
            dtype="float32",
            tokens_per_row=1,
            tokens_per_page=NATIVE_PAGE_TOKENS,
            retention=Full(),
        ),
    )


def native_row(config: DeepseekV4Config, layer_type: LayerType) -> dict[str, tuple[int, ...]]:
    """A native row of this type of layer: shapes of its parts in order.

    By the hybrid pool that a part stands in for; where that keeps accumulators, the part is the kv
    and score that they are made of.
    """
    parts: dict[str, tuple[int, ...]] = {SWA_KV: (config.head_dim,)}
    if layer_type is LayerType.CSA:
        parts[C4_STATE] = (2, 2 * config.head_dim)
        parts[C4_INDEX_STATE] = (2, 2 * config.index_head_dim)
    elif layer_type is LayerType.HCA:
        parts[C128_STATE] = (2, config.head_dim)
    return parts
