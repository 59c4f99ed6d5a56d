"""What the controller needs of whatever starts processes: handles to nodes and to the router.

Over Ray the handles are in ray_launcher.py; tests hand the controller nodes of their own process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sluice.engine.protocol import DecodeClient, NodeInfo, PrefillClient, Role, RouterStatus


class NodeHandle(Protocol):
    """A node being started, run and stopped. Calls raise NodeLost once its process is gone."""

    async def start(self) -> NodeInfo:
        """Load and start the node. Raises ConfigError if it can never run."""
        ...

    def client(self) -> PrefillClient | DecodeClient:
        """What the router calls; only after `start`."""
        ...

    async def connect(self, peer: NodeInfo) -> None:
        """Introduce a decode node to this prefill node. Raises IncompatiblePeers."""
        ...

    async def disconnect(self, node_id: str) -> None:
        """Let a prefill node forget a decode node."""
        ...

    async def watch(self) -> None:
        """Raise NodeLost as soon as the process is gone or stopped answering; never return."""
        ...

    async def stop(self) -> None:
        """End the node and its process, whatever state it is in."""
        ...


class RouterHandle(Protocol):
    """A router's process."""

    async def start(self) -> str:
        """Serve; returns the URL. Raises ConfigError, for example if the port is taken."""
        ...

    async def set_nodes(
        self,
        prefill: Sequence[PrefillClient],
        decode: Sequence[DecodeClient],
        draining: frozenset[str],
    ) -> None:
        """Tell the router which nodes there are, and which of them take nothing new."""
        ...

    async def wait_idle(self, node_id: str) -> None:
        """Return when no request holds the node."""
        ...

    async def status(self) -> RouterStatus:
        """What the process says of itself."""
        ...

    async def watch(self) -> None:
        """Raise NodeLost as soon as the process is gone; never return."""
        ...

    async def stop(self) -> None:
        """Refuse new requests, let running streams finish up to the router's limit, end."""
        ...


class Launcher(Protocol):
    def node(self, role: Role, node_id: str) -> NodeHandle: ...

    def router(self) -> RouterHandle: ...
