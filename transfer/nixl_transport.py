"""NixlTransport: writes between the pools of different processes and hosts, through NIXL.

Facts this file is built on, measured with NIXL 1.5.1 and UCX:

- Cost follows the number of descriptors, so one chunk is one transfer with all pools' runs, and
  descriptors are handed over as numpy arrays, which NIXL reads three times as fast as tuples: a
  list of 1,000 takes 0.4 ms. Lists prepared once and selected by index take 0.1 ms, too small a
  part of the 20 ms that their 64 MB take to move, so there are none.
- NIXL's progress thread spins on a core of its own, and does not send notifications. It is off; a
  pump (pump.py) does both. `backend_params: {progress_thread: "on"}` turns it on where cores are
  plenty. What still waits for the loop's next turn, over TCP as over RDMA: that what has arrived is
  looked at, and that what is posted next is posted, since pools and grants are the loop's own.
- Over TCP, what the kernel has taken over is sent again until it is acknowledged, for a quarter of
  an hour: a write abandoned long ago would land when a cable is plugged in again. UCX can limit it.
- UCX connects over TCP in the caller's thread: to a host that does not answer for as long as that
  limit, with every other request waiting. It can also do so on the side, and a failure then shows
  at the first transfer.
- `add_remote_agent` of a known name changes nothing, also if its connection is broken; after
  `remove_remote_agent` it connects anew. Transfers still in flight then fail at their next check,
  with an exception. So a connection is mended by abandoning what is on it, removing and adding.
- A broken connection raises at the next post, and the exception is the same if parts of that post
  have started. So where a peer has not been heard of for a while, a byte to its mailbox goes first,
  and what is posted is held until it has arrived; without it nothing has left, and the caller may
  connect again and repeat. It need not wait long: an attempt to connect that was lost is repeated
  by the kernel after 1, 3, 7, 15 s.
- A notification is delivered after all bytes of its transfer, and needs no metadata of the sender,
  whose name is what it says itself: any bytes.
- Errors are exceptions that share no base class, and C++ logs their reason to stderr.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from nixl import _bindings
from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

from sluice.cache.clock import lease_clock
from sluice.cache.pools import Pool
from sluice.protocol.messages import ConfigError, IncompatiblePeers, TransferFailed
from sluice.transfer.nixl_memory import Address, Batch, Region, batches
from sluice.transfer.plan import ByteRuns, Copy
from sluice.transfer.pump import PUMP_S, Pump
from sluice.transfer.transport import Handle, NothingLeft, check_name

log = logging.getLogger(__name__)
logging.getLogger("nixl").setLevel(logging.WARNING)  # it prints its INFO lines to stdout

NixlError: tuple[type[Exception], ...] = tuple(
    value
    for value in vars(_bindings).values()
    if isinstance(value, type) and issubclass(value, Exception)
)
# The latter for a peer whose name is no text.
UNREADABLE: tuple[type[Exception], ...] = (*NixlError, UnicodeDecodeError)

UCX_SETTINGS = "engine_config"  # NIXL's parameter that passes them on: "KEY=VALUE,KEY=VALUE"
MAILBOX = ""  # the region of one byte that a notification is written with if no pool's run can be
SIGN_S = 1.0  # how long such a byte may take
QUIET_S = 2.0  # a connection on which nothing has completed for so long may have broken unnoticed


@dataclass
class _Peer:
    regions: Mapping[str, Region]
    heard_at: float = -QUIET_S  # monotonic second of the last transfer that completed


@dataclass
class _Posted:
    """Transfers of one post, and the notification that still waits until they are over.

    held: what has not started; until the peer has given a sign, for which `xfers` has asked.
    """

    peer: str
    held: list[Any] = field(default_factory=list)
    xfers: list[Any] = field(default_factory=list)
    notification: bytes | None = None
    error: str | None = None  # why it will fail once what has started is over
    failure: TransferFailed | None = None  # the same, if nothing has left
    posted_at: float = field(default_factory=time.monotonic)

    @property
    def over(self) -> bool:
        return not self.xfers and not self.held


class NixlTransport:
    """See Transport. One NIXL agent with one backend; used by one thread and by its pump.

    A lock is held for each call of the agent or for some; the agent belongs to whoever holds it.
    """

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
            limit_ms = round(1000 * max_silence_s)
            ours = f"LOG_LEVEL=info,TCP_CONN_NB=y,TCP_USER_TIMEOUT={limit_ms}ms"
            own = options.get(UCX_SETTINGS)
            options[UCX_SETTINGS] = ours if own is None else f"{ours},{own}"  # the last one wins
        config = nixl_agent_config(
            enable_prog_thread=progress,
            backends=[],
            sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,  # several threads, one at a time
        )
        self._agent = nixl_agent(name, config)
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
        self._peers: dict[str, _Peer] = {}
        self._posted: dict[Handle, _Posted] = {}
        self._handles = itertools.count(1)
        self._address = b""
        self._lock = threading.RLock()
        self._arrived: list[tuple[str, bytes]] = []
        self._watched = False
        self._moves_until = math.inf
        self._moved_at = 0.0  # monotonic second at which the agent was last polled
        self._cuda: int | None = None
        self._pump = Pump(name, self._pump_turn)
        self._pump.start()

    def register(self, pools: Mapping[str, Pool]) -> None:
        self._pools = dict(pools)
        devices = [pool.tensor.get_device() for pool in pools.values() if pool.tensor.is_cuda]
        self._cuda = devices[0] if devices else None
        self._regions = {name: Region.of(pool.tensor) for name, pool in pools.items()}
        self._regions[MAILBOX] = Region.of(self._mailbox)
        for name, region in self._regions.items():
            self._register(name, region)
        self._address = self._own_address()

    def stage(self, name: str, memory: torch.Tensor) -> None:
        assert name not in self._regions, f"memory {name!r} is registered already"
        with self._lock:
            self._staged.append(memory)
            self._regions[name] = region = Region.of(memory)
            self._register(name, region)
            self._address = self._own_address()

    def address(self) -> bytes:
        assert self._address, "pools are registered before the address is handed out"
        return self._address

    def connect(self, address: bytes, *, expected: str | None = None) -> str:
        peer = Address.decode(address)
        check_name(peer.name, expected)
        if peer.backend != self._backend:
            raise IncompatiblePeers(
                f"transfer.backend: the peer uses {peer.backend}, we use {self._backend}; "
                "set the same transfer.backend on both nodes"
            )
        if MAILBOX not in peer.regions:
            raise IncompatiblePeers(f"peer {peer.name}: its address has no mailbox")
        with self._lock:
            name = self._add(peer)
            check_name(name, peer.name)
            if name in self._peers:
                self._peers[name].regions = peer.regions
            else:
                self._peers[name] = _Peer(peer.regions)
        return name

    def _add(self, peer: Address) -> str:
        try:
            name: str = self._agent.add_remote_agent(peer.metadata).decode(errors="replace")
        except _bindings.nixlBackendError as error:
            raise TransferFailed(f"peer {peer.name} cannot be reached ({error})") from error
        except NixlError as error:
            raise IncompatiblePeers(
                f"peer {peer.name}: NIXL refuses its metadata ({error}); "
                "run the same nixl version on both nodes"
            ) from error
        return name

    def disconnect(self, peer: str) -> None:
        with self._lock:
            if self._peers.pop(peer, None) is None:
                return
            try:
                self._agent.remove_remote_agent(peer)
            except NixlError as error:
                log.warning("event=peer_not_removed peer=%s error=%s", peer, error)

    def post(self, peer: str, writes: Sequence[Copy], notification: bytes) -> Handle:
        known = self._known(peer)
        lists = batches(writes, self._regions, known.regions)
        return self._post(peer, "WRITE", lists, notification)

    def read(self, peer: str, reads: Sequence[Copy], notification: bytes) -> Handle:
        known = self._known(peer)
        lists = batches(reads, known.regions, self._regions)
        return self._post(peer, "READ", lists, notification)

    def _known(self, peer: str) -> _Peer:
        if peer not in self._peers:
            raise TransferFailed(f"peer {peer} is not connected; connect it again")
        return self._peers[peer]

    def _post(
        self, peer: str, operation: str, lists: Sequence[Batch], notification: bytes
    ) -> Handle:
        # One list of descriptors, the usual case: NIXL itself notifies after the last byte.
        attached = notification if len(lists) == 1 else b""
        posted = _Posted(peer, notification=notification if len(lists) > 1 else None)
        with self._lock:
            try:
                for batch in lists:
                    posted.held.append(self._prepare(peer, operation, batch, attached))
                if not lists:
                    posted.held.append(self._mailbox_write(peer, notification))
                if time.monotonic() - self._known(peer).heard_at < QUIET_S:
                    self._let_go(posted)
                else:
                    posted.xfers.append(self._mailbox_write(peer, b""))
                    self._agent.transfer(posted.xfers[0])
            except NixlError as error:
                self._release(posted)
                reason = f"NIXL cannot post the {operation} ({error})"
                raise NothingLeft(f"peer {peer}: {reason}") from error
            handle = next(self._handles)
            self._posted[handle] = posted
            self._advance(posted)
        self._pump.wake()
        return handle

    def poll(self, handle: Handle) -> bool:
        with self._lock:
            posted = self._posted[handle]
            self._moved_at = time.monotonic()
            self._advance(posted)
            if not posted.over:
                return False
            del self._posted[handle]
        if posted.failure is not None:
            raise posted.failure
        if posted.error is not None:
            raise TransferFailed(f"peer {posted.peer}: the transfer failed ({posted.error})")
        return True

    def abandon(self, handle: Handle) -> None:
        with self._lock:
            self._release(self._posted.pop(handle))

    def watch(self, on: bool) -> None:
        self._watched = on
        if on:
            self._pump.wake()

    def move_until(self, deadline: float) -> None:
        self._moves_until = deadline

    def notifications(self) -> list[tuple[str, bytes]]:
        with self._lock:
            self._moved_at = time.monotonic()
            self._take_notifications()
            arrived, self._arrived = self._arrived, []
        return arrived

    def _take_notifications(self) -> None:
        try:
            arrived: dict[str, list[bytes]] = self._agent.get_new_notifs()
        except UNREADABLE as error:
            log.warning("event=notifications_dropped agent=%s error=%s", self.name, error)
            return
        self._arrived += [
            (sender, message) for sender, messages in arrived.items() for message in messages
        ]

    def _pump_turn(self) -> bool:
        """Move on what is in flight unless the loop does so itself; whether there is anything."""
        if time.monotonic() - self._moved_at < PUMP_S or lease_clock() >= self._moves_until:
            return True
        if self._cuda is not None:
            torch.cuda.set_device(self._cuda)  # of this thread: UCX copies in the current context
        with self._lock:
            in_flight = [posted for posted in self._posted.values() if not posted.over]
            for posted in in_flight:
                self._advance(posted)
            if self._watched:
                self._take_notifications()
        return bool(in_flight) or self._watched

    def close(self) -> None:
        self._pump.stop()
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

    def _mailbox_write(self, peer: str, notification: bytes) -> Any:
        here, there = self._regions[MAILBOX], self._peers[peer].regions[MAILBOX]
        byte = ByteRuns(*np.array([[0], [0], [1]]))
        write = Copy(MAILBOX, MAILBOX, byte)
        [batch] = batches([write], {MAILBOX: here}, {MAILBOX: there})
        return self._prepare(peer, "WRITE", batch, notification)

    def _let_go(self, posted: _Posted) -> None:
        """Start what was held, as far as it goes.

        If one cannot start, parts of it may be on their way, and those before it are: the post then
        fails at `poll`, when they are over.
        """
        while posted.held:
            xfer = posted.held.pop(0)
            try:
                self._agent.transfer(xfer)
                posted.xfers.append(xfer)
            except NixlError as error:
                posted.error = str(error)
                self._free(posted.peer, [xfer, *posted.held])
                posted.held.clear()

    def _advance(self, posted: _Posted) -> None:
        """Take transfers that are over off the list; after the last, start the one that notifies.

        NIXL's bare notifications are sent without a handle, so that nobody would know when they
        have left; a transfer of the mailbox's byte is one that can be polled.
        """
        while posted.xfers:
            if (state := self._check(posted)) == "PROC":
                if posted.held and time.monotonic() - posted.posted_at >= SIGN_S:
                    self._give_up(posted, "gives no sign", silent=True)
                return
            if state == "DONE" and posted.peer in self._peers:
                self._peers[posted.peer].heard_at = time.monotonic()
            self._free(posted.peer, [posted.xfers.pop()])
            if posted.held and posted.error is not None:
                self._give_up(posted, f"is not connected any more ({posted.error})")
            self._let_go(posted)
        if posted.notification is not None and posted.error is None:
            notification, posted.notification = posted.notification, None
            xfer = self._mailbox_write(posted.peer, notification)
            posted.held.append(xfer)
            self._let_go(posted)

    def _give_up(self, posted: _Posted, why: str, *, silent: bool = False) -> None:
        """End a post while all of it is held."""
        posted.failure = NothingLeft(f"peer {posted.peer} {why}", silent=silent)
        posted.notification = None
        self._release(posted)

    def _check(self, posted: _Posted) -> str:
        """The state of the post's last transfer: PROC, DONE or ERR, which is noted."""
        try:
            state: str = self._agent.check_xfer_state(posted.xfers[-1])
            reason = "NIXL reports an error"
        except NixlError as error:
            state, reason = "ERR", str(error)
        if state == "ERR":
            posted.error = posted.error or reason
        return state

    def _release(self, posted: _Posted) -> None:
        """Give up all of a post, whatever its state."""
        self._free(posted.peer, [*posted.xfers, *posted.held])
        posted.xfers.clear()
        posted.held.clear()

    def _free(self, peer: str, xfers: Sequence[Any]) -> None:
        """Give up transfers; those that are over, or have not begun, just leave."""
        for xfer in xfers:
            try:
                self._agent.release_xfer_handle(xfer)
            except NixlError as error:
                log.warning("event=transfer_not_cancelled peer=%s error=%s", peer, error)
