"""What NIXL must know of memory: regions, descriptors, and the address that peers exchange."""

from __future__ import annotations

import base64
import binascii
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sluice.protocol.messages import IncompatiblePeers, TransferFailed
from sluice.transfer.envelope import Malformed, name, number
from sluice.transfer.plan import Copy, Integers, named

KINDS = ("DRAM", "VRAM")
MAX_BYTES = 1 << 62
Descriptors = npt.NDArray[np.uint64]  # [num_runs, 3]: address, bytes, device


@dataclass(frozen=True)
class Region:
    """Registered memory: address of its first byte, bytes, NIXL's kind (DRAM, VRAM), device."""

    base: int
    num_bytes: int
    kind: str
    device: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Region:
        kind, device = ("VRAM", tensor.get_device()) if tensor.is_cuda else ("DRAM", 0)
        return cls(tensor.data_ptr(), tensor.numel() * tensor.element_size(), kind, device)

    def descriptors(self, offsets: Integers, num_bytes: Integers) -> Descriptors:
        """[num_runs, 3] for runs at byte offsets of the region. Raises TransferFailed outside."""
        start, end = int(offsets.min()), int((offsets + num_bytes).max())
        if start < 0 or end > self.num_bytes:
            raise TransferFailed(
                f"runs from byte {start} to {end} leave a memory of {self.num_bytes} bytes; "
                "the grant lists pages that do not exist"
            )
        rows = np.empty((len(offsets), 3), dtype=np.uint64)
        rows[:, 0] = offsets + self.base
        rows[:, 1] = num_bytes
        rows[:, 2] = self.device
        return rows


@dataclass(frozen=True)
class Batch:
    """Runs from one kind of memory into one: a NIXL list has a single kind."""

    source_kind: str
    source: Descriptors
    target_kind: str
    target: Descriptors


def batches(
    copies: Sequence[Copy], source: Mapping[str, Region], target: Mapping[str, Region]
) -> list[Batch]:
    """All runs as few lists of descriptors as their memory kinds allow: mostly one.

    Raises TransferFailed if a run leaves its pool.
    """
    pairs = defaultdict(list)
    for copy in copies:
        runs = copy.runs
        if len(runs):
            here, there = named(source, copy.source), named(target, copy.target)
            size = runs.num_bytes
            pair = (
                here.descriptors(runs.source_offset, size),
                there.descriptors(runs.target_offset, size),
            )
            pairs[here.kind, there.kind].append(pair)
    return [
        Batch(
            here, np.concatenate([s for s, _ in both]), there, np.concatenate([t for _, t in both])
        )
        for (here, there), both in pairs.items()
    ]


UNREADABLE = (
    Malformed,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RecursionError,
    binascii.Error,
)


@dataclass(frozen=True)
class Address:
    """How to reach an agent: its backend, NIXL's metadata, and where its regions lie."""

    name: str
    backend: str
    metadata: bytes
    regions: Mapping[str, Region]

    def encode(self) -> bytes:
        fields = {
            "name": self.name,
            "backend": self.backend,
            "metadata": base64.b64encode(self.metadata).decode(),
            "regions": {name: astuple(region) for name, region in self.regions.items()},
        }
        return json.dumps(fields).encode()

    @classmethod
    def decode(cls, address: bytes) -> Address:
        """Raises IncompatiblePeers for what is no address of a NIXL transport."""
        try:
            fields = json.loads(address)
            return cls(
                name=name(fields["name"]),
                backend=name(fields["backend"]),
                metadata=base64.b64decode(fields["metadata"]),
                regions={key: _region(*values) for key, values in fields["regions"].items()},
            )
        except UNREADABLE as error:
            raise IncompatiblePeers(
                f"transfer.backend: the peer's address {address[:64]!r} is not that of a NIXL "
                "transport; set the same transfer.backend on both nodes"
            ) from error


def _region(base: Any, num_bytes: Any, kind: Any, device: Any) -> Region:
    """Of numbers whose sums fit an address. Raises Malformed."""
    if kind not in KINDS:
        raise Malformed(f"memory of kind {kind!r:.80}, expected one of {', '.join(KINDS)}")
    return Region(number(base, MAX_BYTES), number(num_bytes, MAX_BYTES), kind, number(device, 256))
