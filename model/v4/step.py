"""AttentionStep: the slots and rotations of one step, found once and shared by all layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.kernels.rope import rotations
from sluice.model.common.inputs import ForwardInputs, PoolView
from sluice.model.v4 import placement, pool_rows
from sluice.model.v4.config import DeepseekV4Config, LayerType
from sluice.model.v4.placement import Blocks
from sluice.model.v4.pool_rows import Source
from sluice.model.v4.pools import (
    C4_INDEX_K,
    C4_INDEX_STATE,
    C4_KV,
    C4_STATE,
    C128_KV,
    C128_STATE,
    SWA_KV,
)
from sluice.model.v4.state import AccumulatedState, RawState, State

Pools = Mapping[str, PoolView]


@dataclass(frozen=True)
class RopeFrequencies:
    """Angles per position, [rope_dim // 2] fp32: of sliding layers, and of CSA and HCA layers."""

    sliding: Tensor
    compressed: Tensor


@dataclass(frozen=True)
class StepFrame:
    """What every slot of a step is found from. Pools are only asked for their layout."""

    inputs: ForwardInputs
    config: DeepseekV4Config
    frequencies: RopeFrequencies
    pools: Pools


@dataclass(frozen=True)
class WindowStep:
    write: Tensor  # [T]
    read: Tensor  # [T, window]


@dataclass(frozen=True)
class CompressorStep:
    """One compressor's new rows, [n]: where they come from, and where they go."""

    state: State
    ape_row: Tensor  # [T], position within the block
    rows: str  # the pool of the rows
    row_write: Tensor  # [n]
    row_rotation: Tensor  # [n, rope_dim // 2], at each block's first token


@dataclass(frozen=True)
class CsaStep:
    compressor: CompressorStep
    indexer: CompressorStep
    index_read: Tensor  # [R, num_rows]
    num_visible: Tensor  # [T]


@dataclass(frozen=True)
class HcaStep:
    compressor: CompressorStep
    read: Tensor  # [T, num_rows]


@dataclass(frozen=True)
class AttentionStep:
    """One step's slots and rotations, shared by all layers; rotations are [T, rope_dim // 2]."""

    frame: StepFrame
    rotation: Mapping[LayerType, Tensor]
    window: WindowStep
    csa: CsaStep | None
    hca: HcaStep | None


@dataclass(frozen=True)
class LayerStep:
    """A step as one layer sees it."""

    layer: int
    step: AttentionStep

    @property
    def inputs(self) -> ForwardInputs:
        return self.step.frame.inputs

    @property
    def config(self) -> DeepseekV4Config:
        return self.step.frame.config

    @property
    def layer_type(self) -> LayerType:
        return self.config.layer_types[self.layer]

    @property
    def rotation(self) -> Tensor:
        """Of this step's tokens: [T, rope_dim // 2] complex64."""
        return self.step.rotation[self.layer_type]

    def rows(self, pool: str) -> Tensor:
        """This layer's view [num_pages, rows_per_page, *row_shape] of a pool that is not packed."""
        return self.step.frame.pools[pool].layer(self.layer)

    def store(self, pool: str, slots: Tensor, values: Tensor) -> None:
        """Write vectors [n, dim] to this layer's rows of a pool, packed if the role has them so."""
        pool_rows.store(self.step.frame.pools[pool], self.layer, slots, values)

    def source(self, pool: str, slots: Tensor, dtype: torch.dtype) -> Source:
        """This layer's rows of a pool for kernels to read at `slots` [n, k], once written."""
        return pool_rows.source(self.step.frame.pools[pool], self.layer, slots, self.inputs, dtype)

    def matched(self, queries: Tensor, pool: str) -> Tensor:
        """Queries [..., dim] in the numbers of the pool that they are compared with."""
        return pool_rows.matched(queries, self.step.frame.pools[pool])


Planner = Callable[[StepFrame], AttentionStep]


def plan_hybrid(frame: StepFrame) -> AttentionStep:
    """The step over the hybrid pools: each new compressed row is made once, and stored."""
    csa, hca = None, None
    if C4_KV in frame.pools:
        csa = plan_csa(frame, placement.finished_blocks(frame.inputs, frame.config.csa_ratio))
    if C128_KV in frame.pools:
        hca = plan_hca(frame, _accumulating_compressor(frame))
    return plan_step(frame, csa, hca)


def plan_step(frame: StepFrame, csa: CsaStep | None, hca: HcaStep | None) -> AttentionStep:
    """The whole step, given its compressed parts: the window and the rotations join them."""
    inputs, config, window = frame.inputs, frame.config, frame.pools[SWA_KV].spec
    sliding = rotations(inputs.positions, frame.frequencies.sliding)
    compressed = rotations(inputs.positions, frame.frequencies.compressed)
    return AttentionStep(
        frame=frame,
        rotation={
            LayerType.SLIDING: sliding,
            LayerType.CSA: compressed,
            LayerType.HCA: compressed,
        },
        window=WindowStep(
            write=placement.token_slots(inputs, window),
            read=placement.window_slots(inputs, window, config.sliding_window),
        ),
        csa=csa,
        hca=hca,
    )


def plan_csa(frame: StepFrame, blocks: Blocks) -> CsaStep:
    """What CSA layers do when the rows of `blocks` are to be made."""
    inputs = frame.inputs
    return CsaStep(
        compressor=raw_compressor(frame, blocks, C4_STATE, C4_KV, overlap=1),
        indexer=raw_compressor(frame, blocks, C4_INDEX_STATE, C4_INDEX_K, overlap=1),
        index_read=placement.request_row_slots(inputs, frame.pools[C4_INDEX_K].spec),
        num_visible=placement.num_visible_rows(inputs, blocks.ratio),
    )


def plan_hca(frame: StepFrame, compressor: CompressorStep) -> HcaStep:
    """What HCA layers do, given how they compress."""
    return HcaStep(compressor, placement.visible_row_slots(frame.inputs, frame.pools[C128_KV].spec))


def raw_compressor(
    frame: StepFrame, blocks: Blocks, state: str, rows: str, *, overlap: int
) -> CompressorStep:
    """Make the rows of `blocks` from the raw tokens of each, and of `overlap` blocks before it.

    state, rows: names of the pools.
    """
    tokens = frame.pools[state].spec
    read = placement.block_token_slots(frame.inputs, tokens, blocks, overlap)
    write = placement.token_slots(frame.inputs, tokens)
    return CompressorStep(
        state=RawState(state, write=write, read=read, overlap=overlap > 0),
        ape_row=frame.inputs.positions % blocks.ratio,
        rows=rows,
        row_write=placement.block_slots(frame.inputs, frame.pools[rows].spec, blocks),
        row_rotation=rotations(blocks.first_token, frame.frequencies.compressed),
    )


def _accumulating_compressor(frame: StepFrame) -> CompressorStep:
    inputs, state, rows = frame.inputs, frame.pools[C128_STATE].spec, frame.pools[C128_KV].spec
    blocks, block_of_token = placement.touched_blocks(inputs, rows.tokens_per_row)
    return CompressorStep(
        state=AccumulatedState(
            C128_STATE,
            read=placement.earlier_block_slots(inputs, state, blocks),
            write=placement.unfinished_block_slots(inputs, state, blocks),
            block_of_token=block_of_token,
        ),
        ape_row=inputs.positions % blocks.ratio,
        rows=C128_KV,
        row_write=placement.finished_block_slots(inputs, rows, blocks),
        row_rotation=rotations(blocks.first_token, frame.frequencies.compressed),
    )
