"""The controller meets its targets, introduces nodes, and never cuts what runs."""

import asyncio

import pytest

from sluice.deploy import controller as controller_module
from sluice.deploy.controller import Controller
from sluice.engine.protocol import ConfigError, InvalidRequest, NodeError, Role


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
    launcher.incompatible.add("decode-1")
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
    async with asyncio.timeout(5):
        while not launcher.nodes["decode-1"].stopped:
            await asyncio.sleep(0)
    assert "decode-1" not in await states(controller)


async def test_a_dead_router_is_started_again_and_told_of_the_nodes(start, launcher):
    _, router = await start()
    router.died.set()
    async with asyncio.timeout(5):
        while len(launcher.routers) < 2:
            await asyncio.sleep(0)
    await launcher.routers[1].until(lambda r: r.prefill == {"prefill-0"} and bool(r.decode))


async def test_every_router_is_told_of_the_nodes_and_a_dead_one_replaced(start, launcher):
    controller, router = await start(routers=2)
    await launcher.routers[1].until(lambda r: r.prefill == {"prefill-0"} and bool(r.decode))
    assert [status.router_id for status in await controller.routers()] == ["router-0", "router-1"]
    router.died.set()
    async with asyncio.timeout(5):
        while len(launcher.routers) < 3:
            await asyncio.sleep(0)
    await launcher.routers[2].until(lambda r: r.prefill == {"prefill-0"} and bool(r.decode))
    assert [status.router_id for status in await controller.routers()] == ["router-2", "router-1"]


async def test_a_draining_node_stays_until_no_router_holds_it(start, launcher):
    controller, router = await start(decode=2, routers=2)
    idle = launcher.routers[1].make_busy("decode-1")
    await controller.drain("decode-1")
    await router.until(lambda r: r.draining == {"decode-1"})
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
