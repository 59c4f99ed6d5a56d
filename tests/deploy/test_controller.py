"""The controller meets its targets, introduces nodes, and never cuts what runs."""

import asyncio

import pytest

from sluice.deploy.controller import controller as controller_module
from sluice.deploy.controller import router_keeper, unplaced
from sluice.deploy.controller.controller import Controller
from sluice.protocol.messages import (
    ConfigError,
    IncompatiblePeers,
    InvalidRequest,
    NodeError,
    Role,
)


@pytest.fixture
async def start(config, launcher):
    """Starts a controller over scripted processes; it is stopped after the test."""
    started = []

    async def begin(ready=True, **replicas):
        controller = Controller(config(**replicas), launcher)
        started.append(controller)
        await controller.start()
        if ready:
            await asyncio.wait_for(controller.until_ready(), 5)
        return controller, launcher.routers[0]

    yield begin
    for controller in started:
        await controller.stop()


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


async def let_the_loop_turn():
    """Let everything happen that waits for nothing but its turn."""
    for _ in range(100):
        await asyncio.sleep(0)


async def states(controller):
    return {node.node_id: str(node.state) for node in (await controller.state()).nodes}


async def test_every_pair_is_introduced_before_the_router_is_told(start, launcher):
    _, router = await start(prefill=2, decode=2)
    await router.until(lambda r: len(r.prefill) == len(r.decode) == 2)
    assert launcher.nodes["prefill-0"].peers == {"decode-0", "decode-1"}
    assert launcher.nodes["prefill-1"].peers == {"decode-0", "decode-1"}


async def test_a_dead_node_is_shown_and_replaced_under_a_new_id(start, launcher):
    controller, router = await start()
    launcher.nodes["decode-0"].died.set()
    await router.until(lambda r: r.decode == {"decode-1"})
    assert await states(controller) == {
        "prefill-0": "ready",
        "decode-0": "dead",
        "decode-1": "ready",
    }
    assert launcher.nodes["prefill-0"].peers == {"decode-1"}
    assert launcher.nodes["decode-0"].stopped


async def test_scaling_up_adds_nodes_and_scaling_down_takes_the_newest(start, launcher):
    controller, router = await start()
    await controller.scale(Role.PREFILL, 3)
    await router.until(lambda r: len(r.prefill) == 3)
    await controller.scale(Role.PREFILL, 1)
    await router.until(lambda r: r.prefill == {"prefill-0"})
    await controller.scale(Role.PREFILL, 2)
    await router.until(lambda r: r.prefill == {"prefill-0", "prefill-3"})


@pytest.mark.parametrize("replicas", [-1, 0, 5])
async def test_scaling_beyond_the_limits_is_refused_with_the_limits(start, replicas):
    controller, _ = await start(min_replicas=1)
    with pytest.raises(InvalidRequest, match="expected 1 to 4"):
        await controller.scale(Role.DECODE, replicas)


async def test_a_draining_node_stays_until_no_request_holds_it(start, launcher):
    controller, router = await start(decode=2)
    idle = router.make_busy("decode-1")
    await controller.drain("decode-1")
    await router.until(lambda r: r.draining == {"decode-1"})
    await let_the_loop_turn()
    assert (await states(controller))["decode-1"] == "draining"
    assert not launcher.nodes["decode-1"].stopped
    idle.set()
    await router.until(lambda r: r.decode == {"decode-0"})
    assert (await controller.state()).targets[Role.DECODE] == 1


async def test_draining_at_the_lower_limit_brings_another_node(start):
    controller, router = await start(min_replicas=1)
    await controller.drain("decode-0")
    await router.until(lambda r: r.decode == {"decode-1"})
    assert (await controller.state()).targets[Role.DECODE] == 1


async def test_draining_an_unknown_node_names_the_known_ones(start):
    controller, _ = await start()
    with pytest.raises(InvalidRequest, match="'decode-7', expected one of: prefill-0, decode-0"):
        await controller.drain("decode-7")


async def test_a_node_that_fits_no_peer_is_refused_and_good_pairs_go_on(start, launcher):
    controller, router = await start()
    launcher.unmet["decode-1"] = IncompatiblePeers("pool toy: dtype of decode-1 differs")
    await controller.scale(Role.DECODE, 2)
    await router.until(lambda r: r.decode == {"decode-0", "decode-2"})
    refused = next(n for n in (await controller.state()).nodes if n.node_id == "decode-1")
    assert "dtype of decode-1 differs" in refused.detail
    assert router.prefill == {"prefill-0"}


async def test_a_config_that_can_never_work_ends_the_start_with_its_message(start, launcher):
    launcher.start_error = ConfigError("cache_bytes is 1, expected more")
    controller, _ = await start(ready=False)
    with pytest.raises(ConfigError, match="cache_bytes is 1"):
        await asyncio.wait_for(controller.until_ready(), 5)


async def test_nodes_that_keep_dying_end_the_start_with_their_last_words(start, launcher):
    launcher.start_error = NodeError("no memory")
    controller, _ = await start(ready=False)
    with pytest.raises(NodeError, match="do not start.*no memory"):
        await asyncio.wait_for(controller.until_ready(), 10)


async def test_a_starting_node_can_be_let_go(start, launcher):
    controller, _ = await start()
    launcher.hold_starts = True
    await controller.scale(Role.DECODE, 2)
    await controller.scale(Role.DECODE, 1)
    await until(lambda: launcher.nodes["decode-1"].stopped)
    assert "decode-1" not in await states(controller)


async def test_a_dead_router_is_started_again_and_told_of_the_nodes(start, launcher):
    _, router = await start()
    router.died.set()
    await until(lambda: len(launcher.routers) == 2)
    await launcher.routers[1].until(lambda r: r.prefill == {"prefill-0"} and bool(r.decode))


async def test_every_router_is_told_of_the_nodes_and_a_dead_one_replaced(start, launcher):
    controller, router = await start(routers=2)
    await launcher.routers[1].until(lambda r: r.prefill == {"prefill-0"} and bool(r.decode))
    assert [status.router_id for status in await controller.routers()] == ["router-0", "router-1"]
    router.died.set()
    await until(lambda: len(launcher.routers) == 3)
    await launcher.routers[2].until(lambda r: r.prefill == {"prefill-0"} and bool(r.decode))
    assert [status.router_id for status in await controller.routers()] == ["router-2", "router-1"]


async def test_a_draining_node_stays_until_no_router_holds_it(start, launcher):
    controller, router = await start(decode=2, routers=2)
    idle = launcher.routers[1].make_busy("decode-1")
    await controller.drain("decode-1")
    await router.until(lambda r: r.draining == {"decode-1"})
    await let_the_loop_turn()
    assert (await states(controller))["decode-1"] == "draining"
    idle.set()
    await router.until(lambda r: r.decode == {"decode-0"})


async def test_a_dead_node_is_forgotten_after_a_while(start, launcher, monkeypatch):
    monkeypatch.setattr(controller_module, "DEAD_SHOWN_S", 0.0)
    controller, router = await start()
    launcher.nodes["prefill-0"].died.set()
    await router.until(lambda r: r.prefill == {"prefill-1"})
    async with asyncio.timeout(5):
        while "prefill-0" in await states(controller):
            await asyncio.sleep(0)


async def test_scaling_to_the_upper_limit_is_accepted(start):
    controller, router = await start()
    await controller.scale(Role.DECODE, 4)
    await router.until(lambda r: len(r.decode) == 4)


async def test_an_error_of_one_router_costs_no_node_and_it_is_told_later(start, launcher):
    controller, router = await start(routers=2)
    launcher.routers[1].error = NodeError("the router failed")
    await controller.scale(Role.DECODE, 2)
    await router.until(lambda r: r.decode == {"decode-0", "decode-1"})
    assert set((await states(controller)).values()) == {"ready"}
    assert [status.router_id for status in await controller.routers()] == ["router-0"]
    launcher.routers[1].error = None
    await launcher.routers[1].until(lambda r: r.decode == {"decode-0", "decode-1"})


async def test_a_router_that_does_not_answer_delays_nobody(start, launcher):
    controller, router = await start(decode=2, routers=2)
    frozen = launcher.routers[1]
    frozen.frozen = True
    launcher.nodes["decode-0"].died.set()
    await router.until(lambda r: r.decode == {"decode-1", "decode-2"})
    assert [status.router_id for status in await controller.routers()] == ["router-0"]
    frozen.died.set()  # its watch has given it up
    await until(lambda: len(launcher.routers) == 3)
    await launcher.routers[2].until(lambda r: r.decode == {"decode-1", "decode-2"})
    assert frozen.killed


async def test_a_drain_ends_when_the_router_that_holds_the_node_is_given_up(start, launcher):
    controller, router = await start(decode=2, routers=2)
    holder = launcher.routers[1]
    holder.make_busy("decode-1")
    await controller.drain("decode-1")
    await router.until(lambda r: r.draining == {"decode-1"})
    await let_the_loop_turn()
    holder.died.set()
    await until(lambda: launcher.nodes["decode-1"].stopped)
    assert "decode-1" not in await states(controller)


async def test_a_drain_outlasts_an_error_of_the_router_that_holds_the_node(
    start, launcher, monkeypatch
):
    monkeypatch.setattr(router_keeper, "RETRY_S", 0.0)
    controller, router = await start(decode=2)
    idle = router.make_busy("decode-1")
    router.error = NodeError("the router failed")
    await controller.drain("decode-1")
    await let_the_loop_turn()
    assert not launcher.nodes["decode-1"].stopped
    router.error = None
    await router.until(lambda r: r.draining == {"decode-1"})
    idle.set()
    await until(lambda: launcher.nodes["decode-1"].stopped)


async def test_a_node_whose_process_is_asked_to_end_serves_until_another_is_ready(start, launcher):
    controller, router = await start()
    launcher.hold_starts = True
    idle = router.make_busy("decode-0")
    launcher.nodes["decode-0"].told_to_end.set()
    await until(lambda: "decode-1" in launcher.nodes)
    await let_the_loop_turn()
    assert (await states(controller))["decode-0"] == "draining"
    assert not router.draining, "there is nobody else yet"
    launcher.nodes["decode-1"].may_start.set()
    await router.until(lambda r: r.decode == {"decode-0", "decode-1"})
    await router.until(lambda r: r.draining == {"decode-0"})
    idle.set()
    await router.until(lambda r: r.decode == {"decode-1"})
    assert (await controller.state()).targets[Role.DECODE] == 1


async def test_a_node_without_a_place_says_what_is_missing(start, launcher, monkeypatch):
    monkeypatch.setattr(unplaced, "LOOK_EVERY_S", 0.0)
    controller, router = await start()
    launcher.hold_starts = True
    await controller.scale(Role.DECODE, 2)
    launcher.nodes["decode-1"].missing = "no host has room"

    async def detail(node_id):
        return next(n.detail for n in (await controller.state()).nodes if n.node_id == node_id)

    async with asyncio.timeout(5):
        while await detail("decode-1") != "no host has room":
            await asyncio.sleep(0)
    launcher.nodes["decode-1"].may_start.set()
    await router.until(lambda r: len(r.decode) == 2)
    assert await detail("decode-1") == ""


async def test_a_router_without_a_place_says_what_is_missing(config, launcher, monkeypatch):
    monkeypatch.setattr(unplaced, "LOOK_EVERY_S", 0.0)
    controller = Controller(config(), launcher)
    starting = asyncio.create_task(controller.start())
    await until(lambda: launcher.routers)
    launcher.routers[0].may_start.clear()
    launcher.routers[0].missing = "no host has room"
    async with asyncio.timeout(5):
        while await controller.routers_wait_for() != ["router 0: no host has room"]:
            await asyncio.sleep(0)
    launcher.routers[0].may_start.set()
    await starting
    assert await controller.routers_wait_for() == []
    await controller.stop()


async def test_stopping_ends_processes_that_do_not_answer(start, launcher, monkeypatch):
    monkeypatch.setattr(router_keeper, "STOP_LIMIT_S", 0.01)
    controller, _ = await start(routers=2)
    launcher.routers[0].frozen = True
    launcher.routers[1].error = NodeError("the router failed")
    await asyncio.wait_for(controller.stop(), 5)
    assert all(router.killed for router in launcher.routers)
    assert all(node.stopped for node in launcher.nodes.values())
    launcher.routers[0].frozen = False


async def test_no_router_is_started_again_while_others_finish_their_streams(start, launcher):
    controller, _ = await start(routers=2)
    finishing = launcher.routers[1]
    finishing.frozen = True
    stopping = asyncio.create_task(controller.stop())
    await until(lambda: launcher.routers[0].killed)
    await asyncio.sleep(1.0)  # longer than the pause before a restart
    assert len(launcher.routers) == 2
    finishing.frozen = False
    finishing.died.set()
    stopping.cancel()
