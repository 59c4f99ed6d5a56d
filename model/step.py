"""AttentionStep: the slots and rotations of one step, found once and shared by all layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from sluice.kernels.rope import rotations
from sluice.model import placement
from sluice.model.config import DeepseekV4Config, LayerType
from sluice.model.inputs import ForwardInputs, PoolView
from sluice.model.pools import (
    C4_INDEX_K,
    C4_INDEX_STATE,
    C4_KV,
    C4_STATE,
    C128_KV,
    C128_STATE,
    SWA_KV,
)

Pools = Mapping[str, PoolView]


@dataclass(frozen=True)
class RopeFrequencies:
    """Angles per position, [rope_dim // 2] fp32: of sliding layers, and of CSA and HCA layers."""

    sliding: Tensor
    compressed: Tensor


@dataclass(frozen=True)
class WindowStep:
    write: Tensor  # [T]
    read: Tensor  # [T, window]


@dataclass(frozen=True)
class OverlapCompressorStep:
    """Slots for one overlapping compressor: its state by token, its rows by finished block."""

    state_write: Tensor  # [T]
    state_read: Tensor  # [n, 2 * ratio]
    row_write: Tensor  # [n]


@dataclass(frozen=True)
class CsaStep:
    compressor: OverlapCompressorStep
    indexer: OverlapCompressorStep
    ape_row: Tensor  # [T], position within the block
    row_rotation: Tensor  # [n, rope_dim // 2], at each block's first token
    index_read: Tensor  # [R, num_rows]
    num_visible: Tensor  # [T]


@dataclass(frozen=True)
class HcaStep:
    block_of_token: Tensor  # [T]
    ape_row: Tensor  # [T]
    state_read: Tensor  # [n]
    state_write: Tensor  # [n]
    row_write: Tensor  # [n]
    row_rotation: Tensor  # [n, rope_dim // 2]
    read: Tensor  # [T, num_rows]


@dataclass(frozen=True)
class AttentionStep:
    """One step's slots and rotations, shared by all layers; rotations are [T, rope_dim // 2]."""

    inputs: ForwardInputs
    rotation: Mapping[LayerType, Tensor]
    window: WindowStep
    csa: CsaStep | None
    hca: HcaStep | None


@dataclass(frozen=True)
class LayerStep:
    """A step as one layer sees it."""

    layer: int
    config: DeepseekV4Config
    step: AttentionStep
    pools: Pools

    @property
    def layer_type(self) -> LayerType:
        return self.config.layer_types[self.layer]

    @property
    def rotation(self) -> Tensor:
        """Of this step's tokens: [T, rope_dim // 2] complex64."""
        return self.step.rotation[self.layer_type]

    def rows(self, pool: str) -> Tensor:
        """This layer's view [num_pages, rows_per_page, *row_shape] of a pool."""
        return self.pools[pool].layer(self.layer)


def plan_step(
    inputs: ForwardInputs, config: DeepseekV4Config, frequencies: RopeFrequencies, pools: Pools
) -> AttentionStep:
    """Find all slots of a step. Reads no pool's content."""
    sliding = rotations(inputs.positions, frequencies.sliding)
    compressed = rotations(inputs.positions, frequencies.compressed)
    window = pools[SWA_KV].spec
    return AttentionStep(
        inputs=inputs,
        rotation={
            LayerType.SLIDING: sliding,
            LayerType.CSA: compressed,
            LayerType.HCA: compressed,
        },
        window=WindowStep(
            write=placement.token_slots(inputs, window),
            read=placement.window_slots(inputs, window, config.sliding_window),
        ),
        csa=_plan_csa(inputs, frequencies, pools) if C4_KV in pools else None,
        hca=_plan_hca(inputs, frequencies, pools) if C128_KV in pools else None,
    )


def _plan_csa(inputs: ForwardInputs, frequencies: RopeFrequencies, pools: Pools) -> CsaStep:
    ratio = pools[C4_KV].spec.tokens_per_row
    blocks = placement.finished_blocks(inputs, ratio)

    def compressor(state: str, rows: str) -> OverlapCompressorStep:
        return OverlapCompressorStep(
            state_write=placement.token_slots(inputs, pools[state].spec),
            state_read=placement.overlap_slots(inputs, pools[state].spec, blocks),
            row_write=placement.block_slots(inputs, pools[rows].spec, blocks),
        )

    return CsaStep(
        compressor=compressor(C4_STATE, C4_KV),
        indexer=compressor(C4_INDEX_STATE, C4_INDEX_K),
        ape_row=inputs.positions % ratio,
        row_rotation=rotations(blocks.first_token, frequencies.compressed),
        index_read=placement.request_row_slots(inputs, pools[C4_INDEX_K].spec),
        num_visible=placement.num_visible_rows(inputs, ratio),
    )


def _plan_hca(inputs: ForwardInputs, frequencies: RopeFrequencies, pools: Pools) -> HcaStep:
    state, rows = pools[C128_STATE].spec, pools[C128_KV].spec
    blocks, block_of_token = placement.touched_blocks(inputs, rows.tokens_per_row)
    return HcaStep(
        block_of_token=block_of_token,
        ape_row=inputs.positions % rows.tokens_per_row,
        state_read=placement.earlier_block_slots(inputs, state, blocks),
        state_write=placement.unfinished_block_slots(inputs, state, blocks),
        row_write=placement.finished_block_slots(inputs, rows, blocks),
        row_rotation=rotations(blocks.first_token, frequencies.compressed),
        read=placement.visible_row_slots(inputs, rows),
    )
