"""The native path: raw rows are all that is kept, and compressed rows are made anew at every step.

One row of the pool, by the type of its layer:

    CSA       | window kv | compressor's kv and score | indexer's kv and score |
    HCA       | window kv | kv and score |                              unused |
    sliding   | window kv |                                             unused |

To the layers this looks like the hybrid path: each part of a raw row is a pool, and so are the
compressed rows, of which one layer's at a time exist. The cache is one simple pool that moves as it
is, for two prices: its size, and a pass over the whole context in every compressing layer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from sluice.cache.spec import Full, PoolSpec, Window
from sluice.model.common.inputs import PoolView
from sluice.model.v4 import placement
from sluice.model.v4.config import DeepseekV4Config
from sluice.model.v4.placement import Blocks
from sluice.model.v4.pools import C4_KV, C128_KV, C128_STATE, KV, declare, native_row
from sluice.model.v4.step import (
    AttentionStep,
    Planner,
    StepFrame,
    plan_csa,
    plan_hca,
    plan_hybrid,
    plan_step,
    raw_compressor,
)


def planner_for(specs: Sequence[PoolSpec], config: DeepseekV4Config, dtype: torch.dtype) -> Planner:
    """The planner of the path whose pools these are.

    On the native path, recomputed rows have the format that `dtype` gives them on the hybrid one.
    """
    if KV not in (spec.name for spec in specs):
        return plan_hybrid
    hybrid = declare(config, dtype=str(dtype).removeprefix("torch."))
    full = [spec for spec in hybrid if isinstance(spec.retention, Full)]
    return partial(_plan_native, compressed=[_one_row_a_page(spec) for spec in full])


def _one_row_a_page(spec: PoolSpec) -> PoolSpec:
    """A layout in which rows lie one after another, and none stays for the next step."""
    return dataclasses.replace(spec, tokens_per_page=spec.tokens_per_row, retention=Window(1))


def _plan_native(frame: StepFrame, *, compressed: list[PoolSpec]) -> AttentionStep:
    kv, inputs, config = frame.pools[KV], frame.inputs, frame.config
    blocks = {
        ratio: placement.context_blocks(inputs, ratio, kv.spec)
        for ratio in {spec.tokens_per_row for spec in compressed}
    }
    tables = {
        spec.table: placement.context_pages(inputs, spec.tokens_per_row, kv.spec)
        for spec in compressed
    }
    frame = dataclasses.replace(
        frame,
        inputs=dataclasses.replace(inputs, page_tables={**inputs.page_tables, **tables}),
        pools=_parts(config, kv) | {spec.name: _recomputed(spec, blocks) for spec in compressed},
    )
    csa, hca = None, None
    if C4_KV in frame.pools:
        csa = plan_csa(frame, blocks[config.csa_ratio])
    if C128_KV in frame.pools:
        raw = raw_compressor(frame, blocks[config.hca_ratio], C128_STATE, C128_KV, overlap=0)
        hca = plan_hca(frame, raw)
    return plan_step(frame, csa, hca)


@dataclass(frozen=True)
class Part:
    """A pool inside of another: elements [start, end) of each row, of the given shape."""

    rows: PoolView
    start: int
    end: int
    shape: tuple[int, ...]

    @property
    def spec(self) -> PoolSpec:
        """Of the whole rows: it says where a part lies, not what it is."""
        return self.rows.spec

    def layer(self, layer: int) -> Tensor:
        """View [num_pages, rows_per_page, *shape] of one of the model's layers."""
        return self.rows.layer(layer)[..., self.start : self.end].unflatten(-1, self.shape)


def _parts(config: DeepseekV4Config, rows: PoolView) -> dict[str, PoolView]:
    """The parts of the native rows, by the hybrid pool that each stands in for."""
    parts: dict[str, PoolView] = {}
    for layer_type in set(config.layer_types):
        shapes = native_row(config, layer_type)
        ends = list(accumulate(math.prod(shape) for shape in shapes.values()))
        for (name, shape), start, end in zip(shapes.items(), [0, *ends], ends, strict=False):
            parts[name] = Part(rows, start, end, shape)
    return parts


@dataclass(frozen=True)
class Recomputed:
    """Compressed rows of one layer: the next layer's take their place.

    tensor: [1 + num_blocks, 1, *row_shape]; page 0 is the null page.
    """

    spec: PoolSpec
    tensor: Tensor

    def layer(self, layer: int) -> Tensor:
        return self.tensor


def _recomputed(spec: PoolSpec, blocks: Mapping[int, Blocks]) -> PoolView:
    numbers = blocks[spec.tokens_per_row].number
    shape = (1 + len(numbers), 1, *spec.row_shape)
    dtype = getattr(torch, spec.dtype)
    return Recomputed(spec, torch.empty(shape, dtype=dtype, device=numbers.device))
