"""Any role layout to any other: page sizes, dtypes, packed formats; both transports and modes."""

import itertools
import random
import uuid

import pytest
import torch

from sluice.model.make_checkpoint import TINY
from sluice.model.v4.pool_rows import convert_rows
from sluice.model.v4.pools import declare
from sluice.protocol.messages import IncompatiblePeers, Role
from sluice.transfer.local_transport import LocalTransport
from sluice.transfer.plan import rows_to_receive
from sluice.transfer.staging import PACK_BELOW_BYTES, Staging, needs_packing

SPECS = declare(TINY)
MAX_TOKENS = 260
STAGING_BYTES = 1 << 20


def random_layout(rng):
    """The tiny model's pools with page sizes, dtypes and an order of their own."""
    specs = [
        spec_with(
            spec,
            rng.choice([spec.rows_per_page, *range(1, 2 * spec.rows_per_page + 1)]),
            rng.choice([spec.dtype, *(getattr(c, "name", c) for c in spec.choices)]),
        )
        for spec in SPECS
    ]
    rng.shuffle(specs)
    return tuple(specs)


def spec_with(spec, rows_per_page, dtype):
    tokens_per_page = rows_per_page * spec.tokens_per_row
    fields = vars(spec) | {"tokens_per_page": tokens_per_page, "dtype": dtype}
    return type(spec)(**fields)


def over_nixl(name):
    transport = pytest.importorskip("sluice.transfer.nixl_transport")
    return transport.NixlTransport(f"{name}.{uuid.uuid4().hex[:8]}", "UCX", {})


def make_pair(toy, source_specs, target_specs, kind=LocalTransport, **options):
    """A sender with finite numbers in its pools, connected to a receiver."""
    options = {"staging_bytes": STAGING_BYTES, "convert": convert_rows} | options
    source = toy.local(
        Role.PREFILL, source_specs, seed=1, kind=kind, max_tokens=MAX_TOKENS, **options
    )
    target = toy.local(Role.DECODE, target_specs, seed=2, kind=kind, max_tokens=MAX_TOKENS)
    generator = torch.Generator().manual_seed(3)
    for pool in source.pools.values():
        vectors = torch.randn(*pool.tensor.shape[:3], *pool.spec.row_shape, generator=generator)
        plain = spec_with(pool.spec, pool.spec.rows_per_page, "float32")
        pool.tensor.copy_(convert_rows(vectors, plain, pool.spec))
    source.end.connect(source.info, target.info)
    return source, target


def deliver(toy, source, target, rng, num_tokens):
    """Send a request in random chunks; returns the source's pages and the grant."""
    skip = rng.choice([0, rng.randrange(num_tokens)])
    grant = target.grant(num_tokens, grant_id=f"g{num_tokens}", skip_tokens=skip)
    target.end.expect(grant)
    ends = sorted({rng.randint(1, num_tokens) for _ in range(rng.randint(0, 3))} | {num_tokens})
    runs = toy.deliver(source, grant, ends)
    polled = toy.wait_for(
        lambda p: arrived_in(p) and not source.end.in_flight(grant.grant_id),
        source,
        target,
    )
    assert [item.error for item in polled if item.error] == []
    return runs, grant


def arrived_in(polled):
    return any(getattr(item, "first_token", None) or item.error for item in polled)


def check_rows(source, runs, target, grant):
    for spec in target.specs:
        rows = rows_to_receive(spec, grant.num_tokens, grant.skip_tokens)
        sent, arrived = (
            read(source, spec.name, runs, rows),
            read(target, spec.name, grant.pages, rows),
        )
        pool = source.pools[spec.name]
        if pool.spec.dtype != spec.dtype:
            sent = convert_rows(sent, pool.spec, spec)
        assert torch.equal(arrived, sent), spec.name


def read(side, name, runs, rows):
    """Rows of all layers, [n, num_layers, *row], read without the code under test."""
    pool = side.pools[name]
    run, size = runs[pool.spec.table], pool.spec.rows_per_page
    pages = [run.pages[row // size - run.first] for row in rows]
    return pool.tensor[pages, :, [row % size for row in rows]]


KINDS = pytest.mark.parametrize("kind", [LocalTransport, over_nixl], ids=["local", "nixl"])


@KINDS
@pytest.mark.parametrize("group", range(10))
def test_rows_arrive_as_the_target_stores_them(toy, group, kind):
    """20 pairs of layouts a group: 200 for each transport."""
    check_layouts(toy, group, kind, mode="write")


@KINDS
@pytest.mark.parametrize("group", range(2))
def test_rows_are_read_as_the_target_stores_them(toy, group, kind):
    check_layouts(toy, group, kind, mode="read")


def check_layouts(toy, group, kind, mode):
    for number in range(20):
        rng = random.Random(100 * group + number)
        layouts = random_layout(rng), random_layout(rng)
        checksum = rng.choice(["off", "sample", "full"])
        source, target = make_pair(toy, *layouts, kind, checksum=checksum, mode=mode)
        for num_tokens in rng.sample(range(1, MAX_TOKENS), 2):
            runs, grant = deliver(toy, source, target, rng, num_tokens)
            check_rows(source, runs, target, grant)
        source.end.close()
        target.end.close()


@pytest.mark.parametrize("mode", ["write", "read"])
def test_what_has_no_room_in_staging_memory_waits_for_a_bay(toy, mode):
    target_specs = tuple(spec_with(s, 1, s.dtype) for s in SPECS)
    largest = max(spec.page_bytes for spec in target_specs)
    options = {"staging_bytes": Staging.bytes_for(largest), "checksum": "full", "mode": mode}
    source, target = make_pair(toy, SPECS, target_specs, **options)
    runs, grant = deliver(toy, source, target, random.Random(1), 250)
    check_rows(source, runs, target, grant)


class SlowTransport(LocalTransport):
    """Nothing completes before it is told so."""

    done = False

    def poll(self, handle):
        return self.done


def test_a_cancelled_grant_posts_no_more_of_what_waits(toy):
    target_specs = tuple(spec_with(s, 1, s.dtype) for s in SPECS)
    largest = max(spec.page_bytes for spec in target_specs)
    source, target = make_pair(
        toy, SPECS, target_specs, SlowTransport, staging_bytes=Staging.bytes_for(largest)
    )
    grant = target.grant(250)
    target.end.expect(grant)
    toy.deliver(source, grant, [250])
    source.end.poll()
    num_posted = len(target.transport.notifications())
    source.end.cancel(grant.grant_id)
    source.transport.done = True
    source.end.poll()
    assert not source.end.in_flight(grant.grant_id)
    assert num_posted > 0 and target.transport.notifications() == []


def test_a_layout_too_large_for_staging_memory_is_refused_with_the_way_out(toy):
    target_specs = tuple(s.stored_as("bfloat16") if s.choices else s for s in SPECS)
    with pytest.raises(IncompatiblePeers, match=r"pool \w+: .*set transfer.staging_bytes to \d+"):
        make_pair(toy, SPECS, target_specs, staging_bytes=4096)


def test_rows_are_packed_where_runs_would_be_short_or_cannot_be():
    [spec] = [spec for spec in SPECS if spec.name == "c4_kv"]
    halved = spec_with(spec, spec.rows_per_page // 2, spec.dtype)
    long_run = spec_with(spec, 4 * PACK_BELOW_BYTES // spec.row_bytes, spec.dtype)
    longer = spec_with(spec, 2 * long_run.rows_per_page, spec.dtype)
    room = 1 << 30
    assert not needs_packing(spec, spec, room)
    assert needs_packing(spec, halved, room)
    assert not needs_packing(spec, halved, bay_bytes=halved.page_bytes - 1), "runs do as well"
    assert not needs_packing(long_run, longer, room)
    assert needs_packing(spec, spec.stored_as("bfloat16"), bay_bytes=0)


def test_every_pair_of_dtypes_is_accepted_and_an_undeclared_one_is_not(toy):
    for first, second in itertools.product(["float32", "bfloat16"], repeat=2):
        make_pair(
            toy,
            tuple(s.stored_as(first) if s.choices else s for s in SPECS),
            tuple(s.stored_as(second) if s.choices else s for s in SPECS),
        )
    state = tuple(spec_with(s, s.rows_per_page, "bfloat16") if not s.choices else s for s in SPECS)
    with pytest.raises(IncompatiblePeers, match="state: dtype is float32 at the source and bfloat"):
        make_pair(toy, SPECS, state)
