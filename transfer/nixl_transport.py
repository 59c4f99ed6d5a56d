"""NixlTransport: writes between the pools of different processes and hosts, through NIXL.

Facts this file is built on, measured with NIXL 1.5.1 and UCX:

- Cost follows the number of descriptors, so one chunk is one transfer with all pools' runs, and
  descriptors are handed over as numpy arrays, which NIXL reads three times as fast as tuples: a
  list of 1,000 takes 0.4 ms. Lists prepared once and selected by index take 0.1 ms, too small a
  part of the 20 ms that their 64 MB take to move, so there are none.
- NIXL's progress thread spins on a core of its own. It is off: the loops on both sides poll every
  few milliseconds anyway. `backend_params: {progress_thread: "on"}` turns it on where cores are
  plenty and steps are long.
- Over TCP, what the kernel has taken over is sent again until it is acknowledged, for a quarter of
  an hour: a write abandoned long ago would land when a cable is plugged in again. UCX can limit it.
- A notification is delivered after all bytes of its transfer, and needs no metadata of the sender.
- Errors are exceptions that share no base class, and C++ logs their reason to stderr.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from nixl import _bindings
from nixl._api import nixl_agent, nixl_agent_config

from sluice.cache.pools import Pool
from sluice.engine.protocol import ConfigError, IncompatiblePeers, TransferFailed
from sluice.transfer.nixl_memory import Address, Batch, Region, batches
from sluice.transfer.plan import ByteRuns, Copy
from sluice.transfer.transport import Handle

log = logging.getLogger(__name__)
logging.getLogger("nixl").setLevel(logging.WARNING)  # it prints its INFO lines to stdout

NixlError: tuple[type[Exception], ...] = tuple(
    value
    for value in vars(_bindings).values()
    if isinstance(value, type) and issubclass(value, Exception)
)


UCX_SETTINGS = "engine_config"  # NIXL's parameter that passes them on: "KEY=VALUE,KEY=VALUE"
MAILBOX = ""  # the region of one byte that a notification is written with if no pool's run can be


@dataclass
class _Posted:
    """Transfers of one post, and the notification that still waits until they are over."""

    peer: str
    xfers: list[Any] = field(default_factory=list)
    notification: bytes | None = None
    error: str | None = None  # why it will fail once what has started is over


class NixlTransport:
    """See Transport. One NIXL agent with one backend; used by one thread."""

    def __init__(
        self,
        name: str,
        backend: str,
        params: Mapping[str, str],
        *,
        max_silence_s: float | None = None,
    ) -> None:
        """Raises ConfigError if the backend cannot be started.

        max_silence_s: bytes that stay unacknowledged for so long are never delivered.
        """
        self.name = name
        self._backend = backend
        options = dict(params)
        progress = options.pop("progress_thread", "off") == "on"
        if backend == "UCX" and max_silence_s is not None:
            # At this level UCX prints the transports that it chooses, at start and for each peer.
            ours = f"LOG_LEVEL=info,TCP_USER_TIMEOUT={round(1000 * max_silence_s)}ms"
            own = options.get(UCX_SETTINGS)
            options[UCX_SETTINGS] = ours if own is None else f"{ours},{own}"  # the last one wins
        self._agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=progress, backends=[]))
        try:
            self._agent.create_backend(backend, options)
        except NixlError as error:
            known = ", ".join(sorted(self._agent.get_plugin_list()))
            raise ConfigError(
                f"transfer.backend: NIXL cannot start {backend!r} with {options} ({error}); "
                f"expected one of {known}, local"
            ) from error
        self._pools: dict[str, Pool] = {}  # these keep the registered memory alive
        self._staged: list[torch.Tensor] = []
        self._mailbox = torch.zeros(1, dtype=torch.uint8)
        self._regions: dict[str, Region] = {}
        self._registered: list[Any] = []
        self._peers: dict[str, Mapping[str, Region]] = {}
        self._posted: dict[Handle, _Posted] = {}
        self._handles = itertools.count(1)
        self._address = b""

    def register(self, pools: Mapping[str, Pool]) -> None:
        self._pools = dict(pools)
        self._regions = {name: Region.of(pool.tensor) for name, pool in pools.items()}
        self._regions[MAILBOX] = Region.of(self._mailbox)
        for name, region in self._regions.items():
            self._register(name, region)
        self._address = self._own_address()

    def stage(self, name: str, memory: torch.Tensor) -> None:
        assert name not in self._regions, f"memory {name!r} is registered already"
        self._staged.append(memory)
        self._regions[name] = region = Region.of(memory)
        self._register(name, region)
        self._address = self._own_address()

    def address(self) -> bytes:
        assert self._address, "pools are registered before the address is handed out"
        return self._address

    def connect(self, address: bytes) -> str:
        peer = Address.decode(address)
        if peer.backend != self._backend:
            raise IncompatiblePeers(
                f"transfer.backend: the peer uses {peer.backend}, we use {self._backend}; "
                "set the same transfer.backend on both nodes"
            )
        try:
            name = self._agent.add_remote_agent(peer.metadata).decode()
        except NixlError as error:
            raise IncompatiblePeers(
                f"peer {peer.name}: NIXL refuses its metadata ({error}); "
                "run the same nixl version on both nodes"
            ) from error
        self._peers[name] = peer.regions
        return name

    def disconnect(self, peer: str) -> None:
        if self._peers.pop(peer, None) is None:
            return
        try:
            self._agent.remove_remote_agent(peer)
        except NixlError as error:
            log.warning("event=peer_not_removed peer=%s error=%s", peer, error)

    def post(self, peer: str, writes: Sequence[Copy], notification: bytes) -> Handle:
        lists = batches(writes, self._regions, self._regions_of(peer))
        return self._post(peer, "WRITE", lists, notification)

    def read(self, peer: str, reads: Sequence[Copy], notification: bytes) -> Handle:
        lists = batches(reads, self._regions_of(peer), self._regions)
        return self._post(peer, "READ", lists, notification)

    def _regions_of(self, peer: str) -> Mapping[str, Region]:
        if peer not in self._peers:
            raise TransferFailed(f"peer {peer} is not connected; connect it again")
        return self._peers[peer]

    def _post(
        self, peer: str, operation: str, lists: Sequence[Batch], notification: bytes
    ) -> Handle:
        handle = next(self._handles)
        posted = self._posted[handle] = _Posted(peer)
        # One list of descriptors, the usual case: NIXL itself notifies after the last byte.
        attached = notification if len(lists) == 1 else b""
        posted.notification = None if attached else notification
        try:
            posted.xfers += [self._prepare(peer, operation, batch, attached) for batch in lists]
            self._start(posted)
            self._advance(posted)
        except NixlError as error:
            self.abandon(handle)
            reason = f"NIXL cannot post the {operation} ({error})"
            raise TransferFailed(f"peer {peer}: {reason}") from error
        return handle

    def poll(self, handle: Handle) -> bool:
        posted = self._posted[handle]
        try:
            self._advance(posted)
        except NixlError as error:
            self.abandon(handle)
            raise TransferFailed(f"peer {posted.peer}: the transfer failed ({error})") from error
        if posted.xfers:
            return False
        del self._posted[handle]
        if posted.error is not None:
            raise TransferFailed(f"peer {posted.peer}: the transfer failed ({posted.error})")
        return True

    def abandon(self, handle: Handle) -> None:
        posted = self._posted.pop(handle)
        for xfer in posted.xfers:
            try:
                self._agent.release_xfer_handle(xfer)
            except NixlError as error:
                log.warning("event=transfer_not_cancelled peer=%s error=%s", posted.peer, error)

    def notifications(self) -> list[tuple[str, bytes]]:
        arrived: dict[str, list[bytes]] = self._agent.get_new_notifs()
        return [(sender, message) for sender, messages in arrived.items() for message in messages]

    def close(self) -> None:
        for handle in list(self._posted):
            self.abandon(handle)
        for peer in list(self._peers):
            self.disconnect(peer)
        while self._registered:
            try:
                self._agent.deregister_memory(self._registered.pop())
            except NixlError as error:
                log.warning("event=memory_not_deregistered agent=%s error=%s", self.name, error)
        self._pools.clear()
        self._staged.clear()

    def _own_address(self) -> bytes:
        metadata = self._agent.get_agent_metadata()
        return Address(self.name, self._backend, metadata, self._regions).encode()

    def _register(self, name: str, region: Region) -> None:
        memory = [(region.base, region.num_bytes, region.device, name)]
        try:
            self._registered.append(self._agent.register_memory(memory, region.kind))
        except NixlError as error:
            raise ConfigError(
                f"pool {name}: {self._backend} cannot register {region.num_bytes} bytes of "
                f"{region.kind} ({error}); choose another device for the pool"
            ) from error

    def _prepare(self, peer: str, operation: str, batch: Batch, notification: bytes) -> Any:
        source = self._agent.get_xfer_descs(batch.source, batch.source_kind)
        target = self._agent.get_xfer_descs(batch.target, batch.target_kind)
        here, there = (source, target) if operation == "WRITE" else (target, source)
        return self._agent.initialize_xfer(operation, here, there, peer, notification)

    def _start(self, posted: _Posted) -> None:
        """Start the prepared transfers.

        If one cannot start, those before it are still in flight: the post then fails at `poll`,
        when they are over. With none before it the error is raised at once.
        """
        for started, xfer in enumerate(posted.xfers):
            try:
                self._agent.transfer(xfer)
            except NixlError as error:
                if not started:
                    raise
                posted.error = str(error)
                del posted.xfers[started:]
                return

    def _advance(self, posted: _Posted) -> None:
        """Take transfers that are over off the list; after the last, start the one that notifies.

        NIXL's bare notifications are sent without a handle, so that nobody would know when they
        have left; a transfer of the mailbox's byte is one that can be polled.
        """
        while posted.xfers:
            state = self._agent.check_xfer_state(posted.xfers[-1])
            if state == "PROC":
                return
            if state == "ERR":
                posted.error = "NIXL reports an error"
            self._agent.release_xfer_handle(posted.xfers.pop())
        if posted.notification is not None and posted.error is None:
            notification, posted.notification = posted.notification, None
            here, there = self._regions[MAILBOX], self._peers[posted.peer][MAILBOX]
            byte = ByteRuns(*np.array([[0], [0], [1]]))
            write = Copy(MAILBOX, MAILBOX, byte)
            [batch] = batches([write], {MAILBOX: here}, {MAILBOX: there})
            posted.xfers.append(self._prepare(posted.peer, "WRITE", batch, notification))
            self._start(posted)
