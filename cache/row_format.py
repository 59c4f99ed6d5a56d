"""RowFormat: how a vector of channels is packed into the bytes of one row.

    | codes of the first channels | the last channels in bf16 | a scale for each tile | zeros |

A tile is a run of coded channels that share a scale, a power of two. Rows are whole numbers of four
bytes, so that the parts of a row stay aligned wherever it lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CODE_BITS = {"e4m3": 8, "e2m1": 4}
SCALE_BYTES = {"ue8m0": 1, "float32": 4}
ROW_ALIGNMENT_BYTES = 4


@dataclass(frozen=True)
class RowFormat:
    """A packed row. `name` is what a role's config calls it.

    rotated: whether the channels are to be turned by a Hadamard matrix before they are packed,
        which spreads what is concentrated in few. What is unpacked is still turned, and its product
        with a vector turned in the same way is what it would have been.
    """

    name: str
    num_coded: int
    num_plain: int
    tile: int
    code: Literal["e4m3", "e2m1"]
    scale: Literal["ue8m0", "float32"]
    rotated: bool = False

    @property
    def dim(self) -> int:
        return self.num_coded + self.num_plain

    @property
    def num_tiles(self) -> int:
        return -(-self.num_coded // self.tile)

    @property
    def plain_offset(self) -> int:
        """The byte at which the bf16 channels begin."""
        return self.num_coded * CODE_BITS[self.code] // 8

    @property
    def scale_offset(self) -> int:
        """The byte at which the scales begin."""
        return self.plain_offset + 2 * self.num_plain

    @property
    def row_bytes(self) -> int:
        used = self.scale_offset + self.num_tiles * SCALE_BYTES[self.scale]
        return -(-used // ROW_ALIGNMENT_BYTES) * ROW_ALIGNMENT_BYTES
