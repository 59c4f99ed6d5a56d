"""How fast a request's pages move, beside one raw NIXL write of as many bytes.

    sluice bench transfer [--tokens 2048 --tokens 8192 ...] [--repeats 7]

Two processes on this machine, the pools of DeepSeek-V4-Flash at their real row sizes (packed fp8
rows, fp4 index keys) at scattered pages, no weights. In turn, in one run:

    raw             one write of the same number of bytes, one descriptor
    equal pages     a request between nodes of equal layout
    halved, doubled decode's Full pools have half, or twice, the tokens a page
    by layer        a descriptor for each page and layer, from Python tuples, as other systems do it

A time runs from handing over the request to the last byte's completion at the sender; preparation
is what passes of it before the bytes begin to move, packing included. Exit code 1 if at 32,768
tokens equal layouts reach less than 0.9 of the raw rate or unequal ones less than 0.6, if equal
ones take 5 ms to prepare, or if the list by layer is not 5 times slower.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import multiprocessing as mp
import statistics
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from sluice.benchmarks.provenance import RESULTS, print_provenance, provenance, write_csv
from sluice.cache.pools import Pool, allocate_pools
from sluice.cache.spec import Full, PoolSpec, TableSpec, tables_of
from sluice.engine.protocol import NodeInfo, PageGrant, PageRun, Role
from sluice.model.presets import preset_pools
from sluice.transfer.nixl_transport import NixlTransport
from sluice.transfer.plan import ByteRuns, Copy, rows_to_receive
from sluice.transfer.receiver import Receiver
from sluice.transfer.sender import Sender

LENGTHS_TOKENS = (2_048, 8_192, 32_768, 131_072)
JUDGED_TOKENS = 32_768
MIN_EQUAL, MIN_UNEQUAL, MAX_PREPARATION_MS, MIN_SPEEDUP = 0.9, 0.6, 5.0, 5.0
SCALES = {"equal pages": 1.0, "halved": 0.5, "doubled": 2.0}
RAW, BY_LAYER = "raw", "by layer"
LEASE_S = 600.0


@dataclass(frozen=True)
class Measured:
    """A line of the CSV: medians of `repeats` transfers. `of_raw`: the part of the raw rate."""

    num_tokens: int
    layout: str
    num_bytes: int
    descriptors: int
    repeats: int
    milliseconds: float
    preparation_ms: float
    gigabytes_per_s: float
    of_raw: float


@dataclass(frozen=True)
class Timing:
    """Seconds of one transfer."""

    total: float
    preparation: float


class TimedTransport(NixlTransport):
    """Notes when bytes first begin to move."""

    started_at: float | None = None

    def _start(self, posted: object) -> None:
        self.started_at = self.started_at or time.perf_counter()
        super()._start(posted)  # type: ignore[arg-type]


def specs_of(layout: str) -> tuple[PoolSpec, ...]:
    """V4-Flash's pools; Full ones with pages of the layout's size."""
    scale = SCALES.get(layout, 1.0)
    return tuple(
        dataclasses.replace(spec, tokens_per_page=int(spec.tokens_per_page * scale))
        if spec.table.keeps_all
        else spec
        for spec in preset_pools("v4-flash", index_storage="fp4")
    )


def raw_pool(num_bytes: int) -> dict[str, Pool]:
    spec = PoolSpec(RAW, (0,), (num_bytes,), "uint8", 1, 1, Full())
    return {RAW: Pool(spec, torch.ones(1, *spec.page_shape, dtype=torch.uint8))}


def pages_for(specs: Sequence[PoolSpec], num_tokens: int) -> dict[TableSpec, int]:
    return {t: 2 * len(t.pages(num_tokens, num_tokens)) for t in tables_of(specs)}


def scattered(specs: Sequence[PoolSpec], num_tokens: int, seed: int) -> dict[TableSpec, PageRun]:
    """Pages of a request of which no two are neighbours."""
    rng = np.random.default_rng(seed)
    runs = {}
    for table in tables_of(specs):
        held = table.pages(num_tokens, num_tokens)
        physical = 1 + 2 * rng.permutation(len(held))
        runs[table] = PageRun(held.start, tuple(physical.tolist()))
    return runs


def node(layout: str, specs: Sequence[PoolSpec], role: Role, agent: bytes) -> NodeInfo:
    return NodeInfo(
        node_id=layout,
        incarnation=layout,
        role=role,
        host="",
        fingerprint="v4-flash",
        specs=tuple(specs),
        max_model_len=1 << 20,
        max_running_requests=1,
        max_batch_tokens=1,
        num_pages={},
        agent=agent,
    )


def receive(connection: Connection, num_tokens: int, num_bytes: int) -> None:
    """The other process: receivers in every layout, and memory for the raw write."""
    torch.set_num_threads(1)
    transports = {}
    receivers = {}
    for layout in SCALES:
        specs = specs_of(layout)
        transports[layout] = NixlTransport(f"{layout}.{uuid.uuid4().hex}", "UCX", {})
        pools = allocate_pools(specs, pages_for(specs, num_tokens))
        receivers[layout] = Receiver(transports[layout], pools)
    raw = transports[RAW] = NixlTransport(f"raw.{uuid.uuid4().hex}", "UCX", {})
    raw.register(raw_pool(num_bytes))
    connection.send({layout: transport.address() for layout, transport in transports.items()})
    while True:
        # Polling is what moves UCX forward on this side.
        for layout, receiver in receivers.items():
            for arrival in receiver.poll():
                if arrival.error is not None:
                    raise SystemExit(f"{layout}: {arrival.error}")
        raw.notifications()
        if connection.poll(0):
            grant = connection.recv()
            if grant is None:
                return
            receivers[grant.node_id].expect(grant)
            connection.send("expected")


class Source:
    """This process: one request's pages, and every way to send them."""

    def __init__(self, connection: Connection, num_tokens: int, num_bytes: int) -> None:
        self._connection, self._num_tokens, self._num_bytes = connection, num_tokens, num_bytes
        specs = specs_of("equal pages")
        self._transport = TimedTransport(f"prefill.{uuid.uuid4().hex}", "UCX", {})
        self._pools = allocate_pools(specs, pages_for(specs, num_tokens))
        for pool in self._pools.values():
            pool.tensor.fill_(1)  # memory that was never written may not exist yet
        self._sender = Sender(self._transport, self._pools)
        self._pages = scattered(specs, num_tokens, seed=1)
        self._raw = TimedTransport(f"raw.{uuid.uuid4().hex}", "UCX", {})
        self._raw.register(raw_pool(num_bytes))
        addresses: Mapping[str, bytes] = connection.recv()
        own = node("prefill", specs, Role.PREFILL, self._transport.address())
        for layout in SCALES:
            self._sender.connect(
                own, node(layout, specs_of(layout), Role.DECODE, addresses[layout])
            )
        self._raw_peer = self._raw.connect(addresses[RAW])
        self._by_layer_peer = self._sender._peers._peers["equal pages"].transport_id
        self._grants = itertools.count(1)
        self.descriptors: dict[str, int] = {RAW: 1}

    def ways(self) -> dict[str, Callable[[], Timing]]:
        ours = {layout: lambda layout=layout: self._send(layout) for layout in SCALES}
        return {RAW: self._write_raw, **ours, BY_LAYER: self._write_by_layer}

    def _send(self, layout: str) -> Timing:
        number = next(self._grants)
        specs = specs_of(layout)
        grant = PageGrant(
            grant_id=f"g{number}",
            epoch=number,
            node_id=layout,
            incarnation=layout,
            request_id="request",
            num_tokens=self._num_tokens,
            pages=scattered(specs, self._num_tokens, seed=2),
            lease_s=LEASE_S,
        )
        self._connection.send(grant)
        assert self._connection.recv() == "expected"
        self._transport.started_at = None
        started = time.perf_counter()
        self._sender.open(grant)
        self._sender.send(grant, self._pages, 0, self._num_tokens, first_token=1)
        transfers = []
        while self._sender.in_flight(grant.grant_id):
            transfers += self._sender.poll()
        seconds = time.perf_counter() - started
        assert not any(transfer.error for transfer in transfers)
        self._sender.close_grant(grant.grant_id)
        self.descriptors[layout] = sum(
            pool.descriptors for transfer in transfers for pool in transfer.pools.values()
        )
        return self._timing(self._transport, started, seconds)

    def _write_raw(self) -> Timing:
        self._raw.started_at = None
        started = time.perf_counter()
        run = ByteRuns(*np.array([[0], [0], [self._num_bytes]]))
        handle = self._raw.post(self._raw_peer, [Copy(RAW, RAW, run)], b"raw")
        while not self._raw.poll(handle):
            pass
        return self._timing(self._raw, started, time.perf_counter() - started)

    def _write_by_layer(self) -> Timing:
        """A descriptor a page and layer, in Python; partial pages whole, as they are addressed."""
        agent, started = self._transport._agent, time.perf_counter()
        here, there = [], []
        target_pages = scattered(specs_of("equal pages"), self._num_tokens, seed=2)
        regions = self._transport._peers[self._by_layer_peer]
        for name, pool in self._pools.items():
            spec = pool.spec
            layer_bytes = spec.rows_per_page * spec.row_bytes
            ours, theirs = pool.tensor.data_ptr(), regions[name].base
            pairs = zip(self._pages[spec.table].pages, target_pages[spec.table].pages, strict=True)
            for source, target in pairs:
                for layer in range(len(spec.layers)):
                    offset = layer * layer_bytes
                    here.append((ours + source * spec.page_bytes + offset, layer_bytes, 0))
                    there.append((theirs + target * spec.page_bytes + offset, layer_bytes, 0))
        self.descriptors[BY_LAYER] = len(here)
        xfer = agent.initialize_xfer(
            "WRITE",
            agent.get_xfer_descs(here, "DRAM"),
            agent.get_xfer_descs(there, "DRAM"),
            self._by_layer_peer,
            b"",
        )
        prepared = time.perf_counter() - started
        agent.transfer(xfer)
        while agent.check_xfer_state(xfer) != "DONE":
            pass
        agent.release_xfer_handle(xfer)
        return Timing(time.perf_counter() - started, prepared)

    @staticmethod
    def _timing(transport: TimedTransport, started: float, seconds: float) -> Timing:
        assert transport.started_at is not None, "something was moved"
        return Timing(seconds, transport.started_at - started)


def payload_bytes(num_tokens: int) -> int:
    return sum(
        len(rows_to_receive(spec, num_tokens)) * len(spec.layers) * spec.row_bytes
        for spec in specs_of("equal pages")
    )


def measure(num_tokens: int, repeats: int) -> Iterator[Measured]:
    """All ways in turn, `repeats` times over, after one turn that does not count."""
    num_bytes = payload_bytes(num_tokens)
    context = mp.get_context("spawn")
    connection, other = context.Pipe()
    process = context.Process(target=receive, args=(other, num_tokens, num_bytes), daemon=True)
    process.start()
    try:
        source = Source(connection, num_tokens, num_bytes)
        ways = source.ways()
        timings: dict[str, list[Timing]] = {name: [] for name in ways}
        bar = tqdm(range(repeats + 1), desc=f"{num_tokens:,} tokens", disable=None)
        for turn in bar:
            for name, way in ways.items():
                timing = way()
                if turn:
                    timings[name].append(timing)
        connection.send(None)
        process.join(10)
    finally:
        process.kill()
    raw = statistics.median(timing.total for timing in timings[RAW])
    for name, each in timings.items():
        seconds = statistics.median(timing.total for timing in each)
        yield Measured(
            num_tokens=num_tokens,
            layout=name,
            num_bytes=num_bytes,
            descriptors=source.descriptors[name],
            repeats=repeats,
            milliseconds=round(seconds * 1e3, 2),
            preparation_ms=round(1e3 * statistics.median(t.preparation for t in each), 2),
            gigabytes_per_s=round(num_bytes / seconds / 1e9, 2),
            of_raw=round(raw / seconds, 3),
        )


def shortfalls(results: Sequence[Measured]) -> Iterator[str]:
    """What misses its goal at the judged length."""
    at = {line.layout: line for line in results if line.num_tokens == JUDGED_TOKENS}
    for layout in SCALES if at else ():
        goal = MIN_EQUAL if SCALES[layout] == 1 else MIN_UNEQUAL
        if at[layout].of_raw < goal:
            yield f"{layout}: {at[layout].of_raw} of the raw rate, goal {goal}"
    if at and at["equal pages"].preparation_ms >= MAX_PREPARATION_MS:
        yield f"preparation {at['equal pages'].preparation_ms} ms, goal {MAX_PREPARATION_MS}"
    if at and (speedup := at["equal pages"].of_raw / at[BY_LAYER].of_raw) < MIN_SPEEDUP:
        yield f"{speedup:.1f} times as fast as a list by layer and page, goal {MIN_SPEEDUP}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, action="append", help="may be given several times")
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console = Console()
    lengths = given.tokens or LENGTHS_TOKENS
    command = " ".join(["sluice bench transfer", *(f"--tokens {n}" for n in given.tokens or ())])
    origin = provenance(f"{command} --repeats {given.repeats}")
    print_provenance(console, origin)
    results = [line for num_tokens in lengths for line in measure(num_tokens, given.repeats)]
    table = Table(
        "tokens", "layout", "bytes", "descriptors", "repeats", "ms", "of it prep.", "GB/s", "of raw"
    )
    for line in results:
        table.add_row(*(str(value) for value in asdict(line).values()))
    console.print(table)
    write_csv(RESULTS / "transfer.csv", origin, [asdict(line) for line in results])
    missed = list(shortfalls(results))
    for shortfall in missed:
        console.print(shortfall)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
