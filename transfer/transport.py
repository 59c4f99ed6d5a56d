"""Transport: how byte runs and notifications get from one node's pools into another's.

The life of a transport: `register` the pools once, hand out `address`, `connect` to peers, then
`post` and `poll`; `notifications` on the other side; `close`.

A transport belongs to one thread, the node's loop: no method but the constructor, `register` and
`address` may be called from another, and those only before the loop starts.

What a peer may do: memory is registered as a whole, and its keys are in the address that every peer
gets and keeps, whether it stays or leaves. So a node that was introduced, or anybody who has an
address and reaches the node's port, can read and write all pools; grants, leases and epochs guard
against faults and late messages, not against a peer that means harm. Peers are trusted like
ourselves, and the network between nodes must be closed to everybody else.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from sluice.cache.pools import Pool
from sluice.protocol.messages import ConfigError, IncompatiblePeers, TransferFailed
from sluice.transfer.plan import Copy

if TYPE_CHECKING:
    import torch

Handle = int  # names a posted transfer at the transport that returned it


class NothingLeft(TransferFailed):
    """The connection is lost or gives no sign; of the post nothing has left: it may be repeated.

    silent: it was not refused, there was no answer.
    """

    def __init__(self, message: str, *, silent: bool = False) -> None:
        super().__init__(message)
        self.silent = silent


class Posts(Protocol):
    """How rows get to a peer: a transport writes them, Offers has them read."""

    def post(self, peer: str, writes: Sequence[Copy], notification: bytes) -> Handle:
        """Start writing; the notification arrives after all bytes have.

        Does not wait. Source memory must stay as it is until `poll` says so. Raises
        TransferFailed at once if it cannot start; then nothing is in flight.
        """
        ...

    def poll(self, handle: Handle) -> bool:
        """Whether the transfer has completed. Raises TransferFailed if it never will.

        Parts of it may be on their way still, unless that is NothingLeft. True or an exception ends
        the handle's life.
        """
        ...

    def abandon(self, handle: Handle) -> None:
        """Give up a transfer whatever its state; its peer must be forgotten next."""
        ...


class Transport(Posts, Protocol):
    """One agent: registered pools here, known peers, transfers in flight."""

    name: str

    def register(self, pools: Mapping[str, Pool]) -> None:
        """Make the pools readable and writable, here and by peers. Once, before `address`."""
        ...

    def address(self) -> bytes:
        """What a peer needs to connect: opaque, also in another process or on another host.

        Staged memory is in it from `stage` on.
        """
        ...

    def connect(self, address: bytes, *, expected: str | None = None) -> str:
        """Reach a peer's pools; returns the peer's id, its name.

        Raises IncompatiblePeers for what is no address, or not that of the expected peer, and
        TransferFailed for a peer that cannot be reached now. A newer address of a connected peer
        adds what it has staged since, but mends no broken connection: disconnect first.
        """
        ...

    def disconnect(self, peer: str) -> None:
        """Forget a peer; unknown ids are ignored. Abandon what is in flight to it first."""
        ...

    def stage(self, name: str, memory: torch.Tensor) -> None:
        """Make more memory (uint8) readable, under a name that no pool has."""
        ...

    def read(self, peer: str, reads: Sequence[Copy], notification: bytes) -> Handle:
        """Start reading from the peer's memory into our pools; then the peer gets the notification.

        Otherwise like `post`.
        """
        ...

    def watch(self, on: bool) -> None:
        """Whether peers may write to us or read from us: then that moves on without any call.

        What we have posted ourselves moves on anyway.
        """
        ...

    def move_until(self, deadline: float) -> None:
        """From this moment of the lease clock on nothing moves on without a call.

        A node that was frozen may find its leases over when it wakes up: what it had queued is for
        its loop to abandon, not to be written first.
        """
        ...

    def notifications(self) -> list[tuple[str, bytes]]:
        """Notifications that came since the last call: (sender's name, bytes)."""
        ...

    def close(self) -> None:
        """Give up all transfers, peers and registrations. Closing twice is allowed."""
        ...


class TransportChoice(Protocol):
    """What of the config chooses a transport: a NIXL backend or "local", and its parameters."""

    @property
    def backend(self) -> str: ...

    @property
    def backend_params(self) -> dict[str, str]: ...

    @property
    def lease_s(self) -> float: ...


def check_name(name: str, expected: str | None) -> None:
    """Raise IncompatiblePeers unless an address is the expected peer's, if one is expected."""
    if expected not in (None, name):
        raise IncompatiblePeers(
            f"{expected!r:.80} brings the address of {name!r:.80}, expected its own"
        )


def make_transport(choice: TransportChoice, node_id: str) -> Transport:
    """A transport under a name that no earlier life of the node has used.

    Raises ConfigError if the backend is unknown or cannot start here.
    """
    name = f"{node_id}.{uuid.uuid4().hex[:12]}"
    if choice.backend == "local":
        from sluice.transfer.local_transport import LocalTransport

        return LocalTransport(name)
    try:  # imported only when used: NIXL runs on Linux only
        from sluice.transfer.nixl_transport import NixlTransport
    except ImportError as error:
        raise ConfigError(
            f"transfer.backend: {choice.backend} needs NIXL, which cannot be imported here "
            f"({error}); install nixl, or set backend: local for nodes within one process"
        ) from error
    return NixlTransport(name, choice.backend, choice.backend_params, max_silence_s=choice.lease_s)
