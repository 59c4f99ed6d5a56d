"""What the controller needs of whatever starts processes: handles to nodes and to the router.

Over Ray the handles are in ray_launcher.py; tests hand the controller nodes of their own process.
A call may take for ever if its process is frozen: whoever awaits one sets a limit, or runs `watch`
beside it, which ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from sluice.protocol.messages import (
    DecodeClient,
    NodeInfo,
    PrefillClient,
    Role,
    RouterStatus,
    SluiceError,
)


class ProcessHandle(Protocol):
    """A process being started, run and stopped. Calls raise NodeLost once it is gone."""

    async def unplaced(self) -> str:
        """What is missing for the process to exist, where, and the way out; empty if nothing."""
        ...

    async def kill(self) -> None:
        """End the process at once, whatever state it is in."""
        ...


class NodeHandle(ProcessHandle, Protocol):
    """A node's process."""

    async def start(self) -> NodeInfo:
        """Load and start the node. Raises ConfigError if it can never run."""
        ...

    def client(self) -> PrefillClient | DecodeClient:
        """What the router calls; only after `start`."""
        ...

    async def meet(self, version: int, peers: Sequence[NodeInfo]) -> Mapping[str, SluiceError]:
        """Have a prefill node know exactly these decode nodes; returns those that failed, and why.

        A call of a lower version that arrives late is ignored.
        """
        ...

    async def watch(self, on_leaving: Callable[[], None]) -> None:
        """Raise NodeLost as soon as the process is gone or stopped answering; never return.

        on_leaving: called when somebody else has asked the process to end.
        """
        ...

    async def stop(self) -> None:
        """End the node and its process, whatever state it is in, within seconds."""
        ...


class RouterHandle(ProcessHandle, Protocol):
    """A router's process."""

    async def start(self) -> str:
        """Serve; returns the URL. Raises ConfigError, for example if the port is taken."""
        ...

    async def set_nodes(
        self,
        version: int,
        prefill: Sequence[PrefillClient],
        decode: Sequence[DecodeClient],
        draining: frozenset[str],
    ) -> None:
        """Tell the router which nodes there are, and which of them take nothing new.

        A call of a lower version that arrives late is ignored.
        """
        ...

    async def wait_idle(self, node_id: str, limit_s: float) -> bool:
        """Whether no request holds the node; waits until that is so, but not over `limit_s`."""
        ...

    async def status(self) -> RouterStatus:
        """What the process says of itself."""
        ...

    async def watch(self) -> None:
        """Raise NodeLost as soon as the process is gone or stopped answering; never return."""
        ...

    async def stop(self) -> None:
        """Refuse new requests, let running streams finish up to the router's limit, end."""
        ...


class Launcher(Protocol):
    """Handles to processes. Making a handle starts nothing."""

    def node(self, role: Role, node_id: str) -> NodeHandle: ...

    def router(self) -> RouterHandle: ...
