"""The two processes of benchmarks/transfer.py, and each way in which a request's pages can move."""

from __future__ import annotations

import dataclasses
import itertools
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
import torch
from nixl._api import nixl_agent, nixl_agent_config

from sluice.cache.pools import Pool, allocate_pools
from sluice.cache.spec import PoolSpec, TableSpec, tables_of
from sluice.model.presets import preset_pools
from sluice.protocol.messages import NodeInfo, PageGrant, PageRun, Role
from sluice.transfer.nixl_transport import NixlTransport
from sluice.transfer.plan import Copy
from sluice.transfer.receiver import Receiver
from sluice.transfer.sender import Sender, TransferMode

EQUAL, RAW, BY_LAYER = "equal pages", "raw", "by layer"
SCALES = {EQUAL: 1.0, "halved": 0.5, "doubled": 2.0}
MODES: tuple[TransferMode, ...] = ("write", "read")
LEASE_S = 600.0

Descriptor = tuple[int, int, int]  # address, bytes, device, as NIXL takes them


@dataclass(frozen=True)
class Timing:
    """Seconds of one transfer, and of its preparation."""

    total: float
    preparation: float


class TimedTransport(NixlTransport):
    """Notes when NIXL is first told to move something."""

    posted_at: float | None = None

    def post(self, peer: str, writes: Sequence[Copy], notification: bytes) -> int:
        self.posted_at = self.posted_at or time.perf_counter()
        return super().post(peer, writes, notification)


class PlainAgent:
    """NIXL without any of our code: what the raw write and the list by layer go through."""

    def __init__(self, memory: Mapping[str, torch.Tensor]) -> None:
        config = nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent = nixl_agent(f"plain.{uuid.uuid4().hex}", config)
        self._agent.create_backend("UCX", {})
        self._memory = dict(memory)  # keeps it alive
        self.base = {name: tensor.data_ptr() for name, tensor in memory.items()}
        for name, tensor in memory.items():
            region = (tensor.data_ptr(), tensor.numel() * tensor.element_size(), 0, name)
            self._agent.register_memory([region], "DRAM")

    def address(self) -> tuple[bytes, dict[str, int]]:
        return self._agent.get_agent_metadata(), self.base

    def connect(self, address: tuple[bytes, dict[str, int]]) -> None:
        metadata, self.peer_base = address
        self._peer = self._agent.add_remote_agent(metadata).decode()

    def write(self, here: Sequence[Descriptor], there: Sequence[Descriptor]) -> None:
        """Returns with the last byte's completion."""
        xfer = self._agent.initialize_xfer(
            "WRITE",
            self._agent.get_xfer_descs(here, "DRAM"),
            self._agent.get_xfer_descs(there, "DRAM"),
            self._peer,
            b"",
        )
        self._agent.transfer(xfer)
        while self._agent.check_xfer_state(xfer) != "DONE":
            pass
        self._agent.release_xfer_handle(xfer)

    def progress(self) -> None:
        """Polling is what moves UCX forward."""
        self._agent.get_new_notifs()


def specs_of(layout: str) -> tuple[PoolSpec, ...]:
    """V4-Flash's pools; Full ones with pages of the layout's size."""
    return tuple(
        dataclasses.replace(spec, tokens_per_page=int(spec.tokens_per_page * SCALES[layout]))
        if spec.table.keeps_all
        else spec
        for spec in preset_pools("v4-flash", index_storage="fp4")
    )


def pools_for(layout: str, num_tokens: int) -> dict[str, Pool]:
    """Room for a request of which no two pages are neighbours."""
    specs = specs_of(layout)
    counts = {t: 2 * len(t.pages(num_tokens, num_tokens)) for t in tables_of(specs)}
    return allocate_pools(specs, counts)


def scattered(layout: str, num_tokens: int, seed: int) -> dict[TableSpec, PageRun]:
    """Pages of a request of which no two are neighbours."""
    rng = np.random.default_rng(seed)
    runs = {}
    for table in tables_of(specs_of(layout)):
        held = table.pages(num_tokens, num_tokens)
        physical = 1 + 2 * rng.permutation(len(held))
        runs[table] = PageRun(held.start, tuple(physical.tolist()))
    return runs


def node(name: str, layout: str, role: Role, agent: bytes) -> NodeInfo:
    return NodeInfo(
        node_id=name,
        incarnation=name,
        role=role,
        host="",
        fingerprint="v4-flash",
        specs=specs_of(layout),
        max_model_len=1 << 20,
        max_running_requests=1,
        max_batch_tokens=1,
        num_pages={},
        agent=agent,
    )


def plain_memory(pools: Mapping[str, Pool], num_bytes: int) -> dict[str, torch.Tensor]:
    raw = torch.ones(num_bytes, dtype=torch.uint8)
    return {RAW: raw, **{name: pool.tensor for name, pool in pools.items()}}


def receive(connection: Connection, num_tokens: int, num_bytes: int) -> None:
    """The other process: receivers in every layout, and memory for the plain writes."""
    torch.set_num_threads(1)
    pools = {layout: pools_for(layout, num_tokens) for layout in SCALES}
    plain = PlainAgent(plain_memory(pools[EQUAL], num_bytes))
    receivers, addresses = {}, {}
    for layout in SCALES:
        transport = NixlTransport(f"{layout}.{uuid.uuid4().hex}", "UCX", {})
        receivers[layout] = Receiver(transport, pools[layout])
        addresses[layout] = transport.address()
    connection.send((plain.address(), addresses))
    while True:
        plain.progress()
        for layout, receiver in receivers.items():
            for arrival in receiver.poll():
                if arrival.error is not None:
                    raise SystemExit(f"{layout}: {arrival.error}")
        if connection.poll(0):
            grant = connection.recv()
            if grant is None:
                return
            receivers[grant.node_id].expect(grant)
            connection.send("expected")


class Source:
    """This process: one request's pages, and every way to move them."""

    def __init__(self, connection: Connection, num_tokens: int, num_bytes: int) -> None:
        self._connection, self._num_tokens, self._num_bytes = connection, num_tokens, num_bytes
        self._pools = pools_for(EQUAL, num_tokens)
        for pool in self._pools.values():
            pool.tensor.fill_(1)  # memory that was never written may not exist yet
        self._pages = scattered(EQUAL, num_tokens, seed=1)
        self._plain = PlainAgent(plain_memory(self._pools, num_bytes))
        plain, addresses = connection.recv()
        self._plain.connect(plain)
        self._senders = {mode: self._sender(mode, addresses) for mode in MODES}
        self._grants = itertools.count(1)
        self.descriptors: dict[str, int] = {}

    def _sender(
        self, mode: TransferMode, addresses: Mapping[str, bytes]
    ) -> tuple[Sender, TimedTransport]:
        transport = TimedTransport(f"{mode}.{uuid.uuid4().hex}", "UCX", {})
        sender = Sender(transport, self._pools, mode=mode)
        own = node("prefill", EQUAL, Role.PREFILL, transport.address())
        for layout, address in addresses.items():
            sender.connect(own, node(layout, layout, Role.DECODE, address))
        return sender, transport

    def ways(self) -> dict[str, Callable[[], Timing]]:
        """By name, in the order of the table; each notes its number of descriptors."""
        ours = {
            name_of(layout, mode): partial(self._send, layout, mode)
            for mode in MODES
            for layout in SCALES
        }
        return {RAW: self._write_raw, **ours, BY_LAYER: self._write_by_layer}

    def _send(self, layout: str, mode: TransferMode) -> Timing:
        sender, transport = self._senders[mode]
        grant = self._expected(layout)
        transport.posted_at = None
        started = time.perf_counter()
        sender.open(grant)
        sender.send(grant, self._pages, 0, self._num_tokens, first_token=1)
        transfers = []
        while sender.in_flight(grant.grant_id):
            transfers += sender.poll()
        seconds = time.perf_counter() - started
        assert not any(transfer.error for transfer in transfers)
        sender.close_grant(grant.grant_id)
        self.descriptors[name_of(layout, mode)] = sum(
            pool.descriptors for transfer in transfers for pool in transfer.pools.values()
        )
        assert transport.posted_at is not None, "something was moved"
        return Timing(seconds, transport.posted_at - started)

    def _expected(self, layout: str) -> PageGrant:
        """A grant that the other process waits for."""
        number = next(self._grants)
        grant = PageGrant(
            grant_id=f"g{number}",
            epoch=number,
            node_id=layout,
            incarnation=layout,
            request_id="request",
            num_tokens=self._num_tokens,
            pages=scattered(layout, self._num_tokens, seed=2),
            lease_s=LEASE_S,
        )
        self._connection.send(grant)
        assert self._connection.recv() == "expected"
        return grant

    def _write_raw(self) -> Timing:
        self.descriptors[RAW] = 1
        here, there = self._plain.base[RAW], self._plain.peer_base[RAW]
        started = time.perf_counter()
        self._plain.write([(here, self._num_bytes, 0)], [(there, self._num_bytes, 0)])
        return Timing(time.perf_counter() - started, 0.0)

    def _write_by_layer(self) -> Timing:
        """A descriptor a page and layer, in Python; partial pages whole, as they are addressed."""
        started = time.perf_counter()
        pairs = list(self._layers())
        prepared = time.perf_counter() - started
        self._plain.write([here for here, _ in pairs], [there for _, there in pairs])
        self.descriptors[BY_LAYER] = len(pairs)
        return Timing(time.perf_counter() - started, prepared)

    def _layers(self) -> Iterator[tuple[Descriptor, Descriptor]]:
        target_pages = scattered(EQUAL, self._num_tokens, seed=2)
        for name, pool in self._pools.items():
            spec = pool.spec
            layer_bytes = spec.rows_per_page * spec.row_bytes
            ours, theirs = self._plain.base[name], self._plain.peer_base[name]
            pairs = zip(self._pages[spec.table].pages, target_pages[spec.table].pages, strict=True)
            for source, target in pairs:
                for layer in range(len(spec.layers)):
                    offset = layer * layer_bytes
                    yield (
                        (ours + source * spec.page_bytes + offset, layer_bytes, 0),
                        (theirs + target * spec.page_bytes + offset, layer_bytes, 0),
                    )


def name_of(layout: str, mode: TransferMode) -> str:
    return layout if mode == "write" else f"{layout}, {mode}"
