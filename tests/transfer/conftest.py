"""A prefill side and a decode side with toy pools of every retention, over any transport."""

import dataclasses
import itertools
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sluice.cache.pools import allocate_pools
from sluice.cache.spec import Block, Full, PoolSpec, Window, tables_of
from sluice.protocol.messages import NodeInfo, PageGrant, PageRun, Role
from sluice.transfer.local_transport import LocalTransport
from sluice.transfer.receiver import Receiver
from sluice.transfer.sender import Sender

NUM_PAGES = 40
names = itertools.count()

SPECS = (
    PoolSpec("history", (0, 2, 5), (3,), "float32", 4, 16, Full()),
    PoolSpec("index", (2,), (5,), "uint8", 4, 16, Full()),
    PoolSpec("window", (0, 1, 2), (2, 2), "bfloat16", 1, 4, Window(7)),
    PoolSpec("state", (2, 5), (4,), "float32", 1, 8, Block(4, overlap=1)),
    PoolSpec("sums", (5,), (3, 2), "float32", 16, 16, Block(16)),
)


class Side:
    """One node's pools, filled with random bytes, and its transport."""

    def __init__(self, role, specs, transport, seed, node_id=None, max_tokens=None, **options):
        """max_tokens: just enough pages for one request of so many; else NUM_PAGES of each."""
        self.num_pages = {
            table: NUM_PAGES if max_tokens is None else 1 + table.page_end(max_tokens)
            for table in tables_of(specs)
        }
        self.specs, self.transport = specs, transport
        self.rng = np.random.default_rng(seed)
        self.pools = allocate_pools(specs, self.num_pages)
        for pool in self.pools.values():
            flat = pool.tensor.view(-1).view(torch.uint8)
            flat.copy_(torch.from_numpy(self.rng.integers(0, 120, len(flat), dtype=np.uint8)))
        # Made here because it registers the pools, which the address needs.
        end = Sender if role is Role.PREFILL else Receiver
        self.end = end(transport, self.pools, **options)
        self.info = NodeInfo(
            node_id=node_id or f"{role}-{next(names)}",
            incarnation=transport.name,
            role=role,
            host="here",
            fingerprint="toy",
            specs=specs,
            max_model_len=1000,
            max_running_requests=4,
            max_batch_tokens=64,
            num_pages=self.num_pages,
            agent=transport.address(),
        )

    def page_runs(self, num_tokens, start=0):
        """Scattered physical pages for tokens [start, num_tokens) in every table."""
        runs = {}
        for table in tables_of(self.specs):
            held = table.pages(start, num_tokens)
            physical = 1 + self.rng.choice(self.num_pages[table], len(held), replace=False)
            runs[table] = PageRun(held.start, tuple(physical.tolist()))
        return runs

    def grant(self, num_tokens, grant_id="grant", epoch=1, lease_s=30.0, skip_tokens=0):
        return PageGrant(
            grant_id=grant_id,
            epoch=epoch,
            node_id=self.info.node_id,
            incarnation=self.info.incarnation,
            request_id="request",
            num_tokens=num_tokens,
            pages=self.page_runs(num_tokens, start=num_tokens),
            lease_s=lease_s,
            skip_tokens=skip_tokens,
        )

    def bytes(self):
        return {name: pool.tensor.clone() for name, pool in self.pools.items()}

    def row(self, name, runs, row):
        """One row of all layers, [num_layers, *row_shape], read without the code under test."""
        pool = self.pools[name]
        run = runs[pool.spec.table]
        page = run.pages[row // pool.spec.rows_per_page - run.first]
        return pool.tensor[page, :, row % pool.spec.rows_per_page]


def relaid(specs, **tokens_per_page):
    """The specs with other page sizes, in reverse order."""
    return tuple(
        dataclasses.replace(spec, tokens_per_page=tokens_per_page.get(spec.name, s))
        for spec in reversed(specs)
        for s in [spec.tokens_per_page]
    )


def wait_for(condition, *sides, timeout_s=10.0):
    """Poll every side's end until `condition(everything polled so far)`; returns it all."""
    polled, deadline = [], time.monotonic() + timeout_s
    while not condition(polled):
        assert time.monotonic() < deadline, f"waited {timeout_s} s, polled {polled}"
        for side in sides:
            polled += side.end.poll()
    return polled


def deliver(source, grant, ends, token=42):
    """Open the grant and send chunks that end at `ends`; returns the source's page runs."""
    runs = source.page_runs(grant.num_tokens)
    source.end.open(grant)
    for start, end in itertools.pairwise([0, *ends]):
        first_token = token if end == grant.num_tokens else None
        source.end.send(grant, runs, start, end, first_token=first_token)
    return runs


@pytest.fixture
def toy():
    """What tests in this folder share."""

    def local(role, specs=SPECS, *, seed=0, kind=LocalTransport, node_id=None, **options):
        return Side(role, specs, kind(f"{role}.{next(names)}"), seed, node_id, **options)

    def pair(target_specs=SPECS, *, kind=LocalTransport, **options):
        source = local(Role.PREFILL, seed=1, kind=kind, **options)
        target = local(Role.DECODE, target_specs, seed=2)
        source.end.connect(source.info, target.info)
        return source, target

    return SimpleNamespace(
        SPECS=SPECS,
        Side=Side,
        deliver=deliver,
        local=local,
        pair=pair,
        relaid=relaid,
        wait_for=wait_for,
    )
