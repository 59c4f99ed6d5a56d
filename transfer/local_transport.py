"""LocalTransport: the transport between nodes that share a process.

A post copies at once, in the caller's thread, so nothing is ever left in flight. Agents find each
other by name in a registry of the process.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Mapping, Sequence

import torch

from sluice.cache.pools import Pool
from sluice.protocol.messages import IncompatiblePeers, TransferFailed
from sluice.transfer.plan import Copy, named
from sluice.transfer.transport import Handle, check_name

_PREFIX = b"local:"
Memories = dict[str, torch.Tensor]  # by name, each uint8 [num_bytes]
_agents: dict[str, LocalTransport] = {}
_agents_lock = threading.Lock()


class LocalTransport:
    """See Transport. The inbox is thread-safe: peers deliver from their own threads."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._memory: Memories = {}
        self._peers: set[str] = set()
        self._inbox: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self._handles = itertools.count(1)
        with _agents_lock:
            assert name not in _agents, f"transport {name} exists already in this process"
            _agents[name] = self

    def register(self, pools: Mapping[str, Pool]) -> None:
        self._memory = {
            name: pool.tensor.view(-1).view(torch.uint8) for name, pool in pools.items()
        }

    def stage(self, name: str, memory: torch.Tensor) -> None:
        assert name not in self._memory, f"memory {name!r} is registered already"
        self._memory[name] = memory

    def address(self) -> bytes:
        return _PREFIX + self.name.encode()

    def connect(self, address: bytes, *, expected: str | None = None) -> str:
        name = address.removeprefix(_PREFIX).decode(errors="replace")
        if not address.startswith(_PREFIX) or _find(name) is None:
            raise IncompatiblePeers(
                f"transfer.backend: the peer's address {address[:64]!r} is not that of a local "
                "transport in this process; set the same transfer.backend on both nodes"
            )
        check_name(name, expected)
        self._peers.add(name)
        return name

    def disconnect(self, peer: str) -> None:
        self._peers.discard(peer)

    def post(self, peer: str, writes: Sequence[Copy], notification: bytes) -> Handle:
        target = self._connected(peer)
        for write in writes:
            _copy(write, self._memory, target._memory)
        target._inbox.put((self.name, notification))
        return next(self._handles)

    def read(self, peer: str, reads: Sequence[Copy], notification: bytes) -> Handle:
        source = self._connected(peer)
        for read in reads:
            _copy(read, source._memory, self._memory)
        source._inbox.put((self.name, notification))
        return next(self._handles)

    def poll(self, handle: Handle) -> bool:
        return True

    def watch(self, on: bool) -> None:
        """Nothing to move on: posts are over at once."""

    def move_until(self, deadline: float) -> None:
        """Nothing to move on: posts are over at once."""

    def abandon(self, handle: Handle) -> None:
        """Nothing to give up: a post is over when it returns."""

    def notifications(self) -> list[tuple[str, bytes]]:
        arrived = []
        while not self._inbox.empty():
            arrived.append(self._inbox.get())
        return arrived

    def close(self) -> None:
        with _agents_lock:
            _agents.pop(self.name, None)
        self._peers.clear()

    def _connected(self, peer: str) -> LocalTransport:
        found = _find(peer) if peer in self._peers else None
        if found is None:
            raise TransferFailed(f"peer {peer} is not connected or gone; connect it again")
        return found


def _find(name: str) -> LocalTransport | None:
    with _agents_lock:
        return _agents.get(name)


def _copy(copy: Copy, sources: Memories, targets: Memories) -> None:
    """Copy runs from one agent's memory into another's."""
    source, target, runs = named(sources, copy.source), named(targets, copy.target), copy.runs
    offsets = (runs.source_offset.tolist(), runs.target_offset.tolist(), runs.num_bytes.tolist())
    for here, there, size in zip(*offsets, strict=True):
        if min(here, there) < 0 or here + size > len(source) or there + size > len(target):
            raise TransferFailed(
                f"pool {copy.target}: a run of {size} bytes from {here} to {there} leaves "
                f"memories of {len(source)} and {len(target)} bytes; the grant lists pages that do "
                "not exist"
            )
        target[there : there + size] = source[here : here + size]
