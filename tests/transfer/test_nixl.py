"""The same over NIXL: two agents in one process, and nodes in processes of their own."""

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from multiprocessing.connection import Listener
from pathlib import Path

import numpy as np
import pytest
import torch

from sluice.cache.clock import lease_clock
from sluice.cache.spec import tables_of
from sluice.protocol.messages import (
    ConfigError,
    IncompatiblePeers,
    PageGrant,
    PageRun,
    Role,
    TransferFailed,
)
from sluice.transfer.nixl_memory import Batch, Region, batches
from sluice.transfer.plan import ByteRuns, Copy, rows_to_receive

nixl_transport = pytest.importorskip("sluice.transfer.nixl_transport")
NUM_PAGES = 40
RELAID = {"history": 48, "index": 16, "window": 3, "state": 4, "sums": 32}


def over_nixl(name):
    return nixl_transport.NixlTransport(f"{name}.{uuid.uuid4().hex[:8]}", "UCX", {})


@pytest.fixture(params=["write", "read"])
def mode(request):
    """For the tests that ask for it; the others write."""
    return request.param


@pytest.fixture
def source(toy, request):
    mode = request.getfixturevalue("mode") if "mode" in request.fixturenames else "write"
    side = toy.local(Role.PREFILL, seed=1, kind=over_nixl, mode=mode)
    yield side
    side.end.close()


class Host:
    """A decode node in a process of its own."""

    def __init__(self, specs):
        key = uuid.uuid4().bytes
        with Listener(family="AF_UNIX", authkey=key) as listener:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("decode_host.py"))],
                stdin=subprocess.PIPE,
                text=True,
            )
            self.process.stdin.write(f"{(listener.address, key)!r}\n")
            self.process.stdin.flush()
            self.connection = listener.accept()
        self.connection.send((f"decode.{uuid.uuid4().hex[:8]}", specs, NUM_PAGES))
        self.info = self.connection.recv()

    def grant(self, num_tokens, grant_id="grant", lease_s=30.0):
        """A grant with pages at the far end of the pools, expected by the node."""
        pages = {}
        for table in tables_of(self.info.specs):
            held = table.pages(num_tokens, num_tokens)
            last = NUM_PAGES - len(held)
            pages[table] = PageRun(held.start, tuple(range(NUM_PAGES, last, -1)))
        grant = PageGrant(
            grant_id, 1, "decode", self.info.incarnation, "request", num_tokens, pages, lease_s
        )
        self.connection.send(grant)
        assert self.connection.recv() == "expected"
        return grant

    def stop(self):
        self.process.kill()
        self.process.communicate()
        self.connection.close()


@pytest.fixture
def start_host(toy):
    hosts = []

    def start(specs=toy.SPECS):
        hosts.append(Host(specs))
        return hosts[-1]

    yield start
    for host in hosts:
        host.stop()


def wait_until(condition, source, timeout_s=20.0):
    """Poll the source until the condition holds for all it has polled; returns that."""
    polled, deadline = [], time.monotonic() + timeout_s
    while not condition(polled):
        assert time.monotonic() < deadline, f"waited {timeout_s} s; polled {polled}"
        polled += source.end.poll()
    return polled


def deliver_to_host(toy, source, host, grant):
    """Send a grant in two chunks; returns the arrival and checks every wanted row's bytes."""
    runs = toy.deliver(source, grant, [grant.num_tokens // 2, grant.num_tokens])
    wait_until(lambda _: host.connection.poll(), source)
    arrival, raw = host.connection.recv()
    for spec in host.info.specs:
        tensor = torch.from_numpy(raw[spec.name]).view(getattr(torch, spec.dtype))
        for row in rows_to_receive(spec, grant.num_tokens):
            run = grant.pages[spec.table]
            page = run.pages[row // spec.rows_per_page - run.first]
            arrived = tensor[page, :, row % spec.rows_per_page]
            assert torch.equal(arrived, source.row(spec.name, runs, row)), (spec.name, row)
    wait_until(lambda _: not source.end.in_flight(grant.grant_id), source)
    source.end.close_grant(grant.grant_id)
    return arrival


@pytest.mark.parametrize("layout", [{}, RELAID])
def test_two_agents_in_one_process_move_bytes(toy, mode, source, layout):
    target = toy.local(Role.DECODE, toy.relaid(toy.SPECS, **layout), seed=2, kind=over_nixl)
    source.end.connect(source.info, target.info)
    grant = target.grant(77)
    target.end.expect(grant)
    runs = toy.deliver(source, grant, [30, 77])
    polled = toy.wait_for(lambda p: any(getattr(i, "first_token", None) for i in p), source, target)
    assert polled[-1].first_token == 42
    for spec in toy.SPECS:
        for row in rows_to_receive(spec, 77):
            arrived = target.row(spec.name, grant.pages, row)
            assert torch.equal(arrived, source.row(spec.name, runs, row))
    target.end.close()


def test_two_processes_move_bytes_and_a_restarted_peer_goes_on(toy, mode, source, start_host):
    host = start_host(toy.relaid(toy.SPECS, **RELAID))
    source.end.connect(source.info, host.info)
    for number, num_tokens in enumerate([5, 32, 77]):
        grant = host.grant(num_tokens, grant_id=f"g{number}")
        assert deliver_to_host(toy, source, host, grant).first_token == 42
    grant = host.grant(40, grant_id="lost")
    host.stop()
    started = time.monotonic()
    with pytest.raises(TransferFailed):  # at once, or as soon as NIXL notices
        toy.deliver(source, grant, [40])
        [failed] = wait_until(bool, source, timeout_s=1.0)
        raise failed.error
    assert time.monotonic() - started < 1.0
    host = start_host()
    source.end.connect(source.info, host.info)
    assert deliver_to_host(toy, source, host, host.grant(50)).first_token == 42


def test_a_frozen_peer_fails_the_request_at_its_lease_and_is_loaded_again(
    toy, mode, source, start_host
):
    host = start_host()
    source.end.connect(source.info, host.info)
    deliver_to_host(toy, source, host, host.grant(40, grant_id="warm"))
    grant = host.grant(40, lease_s=0.2)
    os.kill(host.process.pid, signal.SIGSTOP)
    os.waitpid(host.process.pid, os.WUNTRACED)  # until it has stopped
    toy.deliver(source, grant, [40])
    [failed] = wait_until(bool, source)
    assert "lease" in str(failed.error)
    assert source.end.in_flight(grant.grant_id)
    os.kill(host.process.pid, signal.SIGCONT)
    wait_until(lambda _: not source.end.in_flight(grant.grant_id), source)
    after = host.grant(40, grant_id="after")
    assert deliver_to_host(toy, source, host, after).first_token == 42


def test_an_address_that_is_none_is_refused(source):
    for address in (
        b"",
        b"local:x",
        b"{}",
        b'{"name":"n","backend":"UCX","metadata":"","regions":{}}',
    ):
        with pytest.raises(IncompatiblePeers):
            source.transport.connect(address)
    elsewhere = source.transport.address().replace(b'"UCX"', b'"LIBFABRIC"')
    with pytest.raises(IncompatiblePeers, match="the peer uses LIBFABRIC, we use UCX"):
        source.transport.connect(elsewhere)


def over_tcp(name):
    name = f"{name}.{uuid.uuid4().hex[:8]}"
    settings = {"engine_config": "TLS=tcp"}
    return nixl_transport.NixlTransport(name, "UCX", settings, max_silence_s=1.5)


@pytest.fixture
def tcp_pair(toy, mode):
    source = toy.local(Role.PREFILL, seed=1, kind=over_tcp, mode=mode)
    target = toy.local(Role.DECODE, seed=2, kind=over_tcp)
    source.end.connect(source.info, target.info)
    yield source, target
    source.end.close()
    target.end.close()


def test_rows_arrive_while_the_senders_loop_is_in_a_step(toy, tcp_pair):
    source, target = tcp_pair
    grant = target.grant(77)
    target.end.expect(grant)
    toy.deliver(source, grant, [30, 77])
    polled = toy.wait_for(lambda items: any(item.first_token for item in items), target)
    assert not any(item.error for item in polled)
    toy.wait_for(lambda _: not source.end.in_flight(grant.grant_id), source, target)


def test_what_is_written_arrives_while_the_receivers_loop_is_in_a_step(toy, tcp_pair, mode):
    source, target = tcp_pair
    grant = target.grant(77)
    target.end.expect(grant)
    toy.deliver(source, grant, [30, 77])
    if mode == "read":  # it is the receiver's loop that reads
        toy.wait_for(lambda _: target.end._reads._posted, target)
    toy.wait_for(lambda items: items, source)


def test_nothing_moves_on_by_itself_once_a_lease_is_over(toy, tcp_pair, mode):
    source, target = tcp_pair
    grant = target.grant(77)
    target.end.expect(grant)
    source.transport.move_until(lease_clock())
    source.transport.post(target.transport.name, [], b"late")  # connecting takes several polls
    for _ in range(300):
        assert target.transport.notifications() == []
        time.sleep(0.001)
    source.transport.move_until(math.inf)
    toy.wait_for(lambda _: target.transport.notifications())


def test_nothing_is_polled_where_nothing_is_in_flight_or_expected(toy, tcp_pair):
    source, target = tcp_pair
    grant = target.grant(20)
    target.end.expect(grant)
    toy.deliver(source, grant, [20])
    toy.wait_for(lambda _: not source.end.in_flight(grant.grant_id), source, target)
    target.end.forget(grant.grant_id)
    for side in (source, target):
        side.transport._moved_at = 0.0
        assert not side.transport._pump_turn()


def test_a_peer_whose_name_is_no_text_is_dropped(toy, source):
    def undecodable():
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    source.transport._agent.get_new_notifs = undecodable
    assert source.transport.notifications() == []


def test_tcp_gives_up_bytes_that_stay_unacknowledged(toy):
    source, target = (toy.local(role, kind=over_tcp) for role in (Role.PREFILL, Role.DECODE))
    source.end.connect(source.info, target.info)
    grant = target.grant(20)
    target.end.expect(grant)
    toy.deliver(source, grant, [20])
    toy.wait_for(lambda polled: any(hasattr(p, "first_token") for p in polled), source, target)
    limits_ms = list(tcp_user_timeouts_ms())
    source.end.close()
    target.end.close()
    assert {1499, 1500} & set(limits_ms)  # UCX rounds down


def test_the_transports_that_ucx_chooses_are_printed_at_start(capfd):
    name = f"node.{uuid.uuid4().hex[:8]}"
    nixl_transport.NixlTransport(name, "UCX", {"engine_config": "TLS=tcp"}, max_silence_s=5).close()
    printed = capfd.readouterr()
    assert any(f"{name} self cfg" in line and "tcp/" in line for line in printed.out.splitlines())


def tcp_user_timeouts_ms():
    """Of this process's connections."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with (
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(int(descriptor.name))) as own,
        ):
            own.getpeername()
            yield own.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


def test_an_unknown_backend_is_refused_by_name():
    with pytest.raises(ConfigError, match="transfer.backend: NIXL cannot start 'NOPE'.*UCX"):
        nixl_transport.NixlTransport("unknown", "NOPE", {})


def test_runs_outside_a_peers_pools_are_refused_before_anything_moves(toy, source):
    target = toy.local(Role.DECODE, seed=2, kind=over_nixl)
    source.end.connect(source.info, target.info)
    grant = target.grant(20)
    far = {t: PageRun(r.first, tuple(10_000 for _ in r.pages)) for t, r in grant.pages.items()}
    with pytest.raises(TransferFailed, match="pages that do not exist"):
        toy.deliver(source, PageGrant(**{**vars(grant), "pages": far}), [20])
    target.end.close()


def test_a_post_without_runs_still_notifies(toy, source):
    target = toy.local(Role.DECODE, seed=2, kind=over_nixl)
    source.end.connect(source.info, target.info)
    handle = source.transport.post(target.transport.name, [], b"hello")
    arrived, deadline, over = [], time.monotonic() + 10, False
    while not (over and arrived) and time.monotonic() < deadline:
        over = over or source.transport.poll(handle)
        arrived += target.transport.notifications()
    assert arrived == [(source.transport.name, b"hello")]
    target.end.close()


def test_pools_in_several_kinds_of_memory_notify_once_after_the_last(
    toy, mode, source, monkeypatch
):
    whole = nixl_transport.batches

    def one_by_one(*arguments):
        """As if every run were between memories of its own kinds."""
        return [
            Batch("DRAM", here[None], "DRAM", there[None])
            for batch in whole(*arguments)
            for here, there in zip(batch.source, batch.target, strict=True)
        ]

    monkeypatch.setattr(nixl_transport, "batches", one_by_one)
    target = toy.local(Role.DECODE, seed=2, kind=over_nixl)
    source.end.connect(source.info, target.info)
    grant = target.grant(20)
    target.end.expect(grant)
    runs = toy.deliver(source, grant, [20])
    toy.wait_for(lambda p: any(getattr(i, "first_token", None) for i in p), target, source)
    for spec in toy.SPECS:
        for row in rows_to_receive(spec, 20):
            arrived = target.row(spec.name, grant.pages, row)
            assert torch.equal(arrived, source.row(spec.name, runs, row))
    target.end.close()


def test_a_descriptor_list_has_one_kind_of_memory():
    runs = ByteRuns(*(np.array(column) for column in ([0, 8], [8, 0], [4, 4])))
    here = {name: Region(100, 16, kind, 0) for name, kind in (("a", "VRAM"), ("b", "DRAM"))}
    there = {name: Region(500, 16, "DRAM", 0) for name in here}
    found = batches([Copy(name, name, runs) for name in here], here, there)
    assert [(batch.source_kind, batch.target_kind) for batch in found] == [
        ("VRAM", "DRAM"),
        ("DRAM", "DRAM"),
    ]
    assert found[0].source.tolist() == [[100, 4, 0], [108, 4, 0]]
    assert found[0].target.tolist() == [[508, 4, 0], [500, 4, 0]]
