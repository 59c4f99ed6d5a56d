"""Every prefill node knows every decode node before requests use the pair, and ever after."""

import asyncio

import pytest

from sluice.deploy.controller import controller as controller_module
from sluice.deploy.controller import introductions, router_keeper
from sluice.deploy.controller.controller import Controller
from sluice.protocol.messages import NodeError, Role, TransferFailed


@pytest.fixture
def quick(monkeypatch):
    """Nobody waits for long before something is tried again."""
    monkeypatch.setattr(introductions, "RETRY_S", 0.001)
    monkeypatch.setattr(introductions, "BEAT_S", 0.01)
    monkeypatch.setattr(introductions, "ANSWER_LIMIT_S", 0.02)
    monkeypatch.setattr(router_keeper, "RETRY_S", 0.001)
    monkeypatch.setattr(router_keeper, "ANSWER_LIMIT_S", 0.02)


@pytest.fixture
async def start(config, launcher):
    started = []

    async def begin(**replicas):
        controller = Controller(config(**replicas), launcher)
        started.append(controller)
        await controller.start()
        await asyncio.wait_for(controller.until_ready(), 5)
        await launcher.routers[0].until(lambda r: len(r.prefill) == replicas["prefill"])
        return controller, launcher.routers[0]

    yield begin
    for controller in started:
        for router in launcher.routers:
            router.frozen, router.error = False, None
        await controller.stop()


async def until(condition, limit_s=5):
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.001)


async def entry(controller, node_id):
    return next(n for n in (await controller.state()).nodes if n.node_id == node_id)


async def test_a_frozen_prefill_node_keeps_no_other_from_meeting_a_newcomer(start, launcher):
    controller, router = await start(prefill=3, decode=1)
    launcher.nodes["prefill-0"].frozen = True
    await controller.scale(Role.DECODE, 2)
    others = [launcher.nodes["prefill-1"], launcher.nodes["prefill-2"]]
    await until(lambda: all("decode-1" in prefill.peers for prefill in others), limit_s=1)
    assert router.decode == {"decode-0"}, "a pair that has not met would be used"
    launcher.nodes["prefill-0"].died.set()  # its watch has given it up
    await router.until(lambda r: r.decode == {"decode-0", "decode-1"})


async def test_a_prefill_node_that_never_answers_is_given_up_and_the_newcomer_serves(
    start, launcher, quick, monkeypatch
):
    controller, router = await start(prefill=2, decode=1)
    monkeypatch.setattr(introductions, "MEETING_LIMIT_S", 0.05)
    launcher.nodes["prefill-0"].frozen = True
    await controller.scale(Role.DECODE, 2)
    await router.until(lambda r: r.decode == {"decode-0", "decode-1"})
    await router.until(lambda r: "prefill-0" not in r.prefill)
    assert "has not met decode-1" in (await entry(controller, "prefill-0")).detail


async def test_a_peer_that_cannot_be_connected_yet_is_tried_again(start, launcher, quick):
    controller, router = await start(prefill=1, decode=1)
    launcher.unmet["decode-1"] = TransferFailed("no route to decode-1")
    await controller.scale(Role.DECODE, 2)
    told = launcher.nodes["prefill-0"].num_told
    await until(lambda: launcher.nodes["prefill-0"].num_told > told + 3)
    assert (await entry(controller, "decode-1")).state == "starting"
    launcher.unmet.clear()
    await router.until(lambda r: r.decode == {"decode-0", "decode-1"})


async def test_a_peer_that_can_never_be_connected_is_replaced_and_pairs_that_work_go_on(
    start, launcher, quick, monkeypatch
):
    controller, router = await start(prefill=1, decode=1)
    monkeypatch.setattr(introductions, "MEETING_LIMIT_S", 0.05)
    launcher.unmet["decode-1"] = TransferFailed("no route to decode-1")
    await controller.scale(Role.DECODE, 2)
    await router.until(lambda r: r.decode == {"decode-0", "decode-2"})
    assert "no route to decode-1" in (await entry(controller, "decode-1")).detail
    assert router.prefill == {"prefill-0"}


async def test_a_prefill_node_gets_a_peer_back_that_it_has_lost(start, launcher, quick):
    await start(prefill=1, decode=2)
    launcher.nodes["prefill-0"].peers.clear()
    await until(lambda: launcher.nodes["prefill-0"].peers == {"decode-0", "decode-1"})


async def test_whatever_broke_meanwhile_all_know_all_once_it_is_mended(
    start, launcher, quick, rng, monkeypatch
):
    """Nodes and routers freeze, fail and die while roles are scaled and nodes drained."""
    monkeypatch.setattr(controller_module, "STABLE_S", 0.0)  # no long pauses
    monkeypatch.setattr(controller_module, "RELIEF_LIMIT_S", 0.05)
    monkeypatch.setattr("sluice.deploy.common.backoff.FIRST_DELAY_S", 0.005)
    controller, _ = await start(prefill=2, decode=2, routers=2)
    for _ in range(60):
        await one_fault(controller, launcher, rng)
        await asyncio.sleep(rng.choice([0, 0, 0.002, 0.02]))
    for process in alive(launcher):
        process.frozen, process.error = False, None
    await asyncio.wait_for(controller.until_ready(), 10)
    await until(lambda: all_know_all(controller, launcher))


async def one_fault(controller, launcher, rng):
    if not (processes := alive(launcher)):
        return  # all have just died, and others are not there yet
    process = rng.choice(processes)
    match rng.randrange(7):
        case 0:
            process.frozen = not process.frozen
        case 1:
            process.error = rng.choice([None, NodeError("it failed")])
        case 2:
            process.died.set()
        case 3:
            await controller.scale(rng.choice(list(Role)), rng.randint(1, 4))
        case 4:
            nodes = [n for n in (await controller.state()).nodes if n.state != "dead"]
            if nodes:
                await controller.drain(rng.choice(nodes).node_id)
        case 5 if hasattr(process, "told_to_end"):
            process.told_to_end.set()
        case 6 if hasattr(process, "peers"):
            process.peers.clear()


def alive(launcher):
    processes = [*launcher.nodes.values(), *launcher.routers]
    return [p for p in processes if not p.died.is_set() and not getattr(p, "stopped", False)]


def all_know_all(controller, launcher):
    """Whether every process knows exactly the nodes there are, and no other process is left."""
    living = alive(launcher)
    decode = {p.node_id for p in living if getattr(p, "role", None) is Role.DECODE}
    prefill = {p.node_id for p in living if getattr(p, "role", None) is Role.PREFILL}
    routers = [p for p in living if hasattr(p, "router_id")]
    return (
        len(routers) == 2
        and all(r.prefill == prefill and r.decode == decode and not r.draining for r in routers)
        and all(p.peers == decode for p in living if getattr(p, "role", None) is Role.PREFILL)
    )
