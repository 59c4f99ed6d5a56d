"""Supervisor: the foreground process of `sluice up`, from the checks to the last goodbye.

1. Checks, then the namespace's lock.
2. Ray, the controller, the router, the nodes; the state file says where they are.
3. Waits for SIGINT or SIGTERM, or for the controller to die.
4. Running streams finish, processes end, Ray ends, the state file goes.

A second signal while it stops ends everything at once. What does not answer is waited for within a
limit only: a controller that is silent for too long ends the deployment, as its death does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import signal
from pathlib import Path
from typing import Any, Protocol

from sluice.deploy.cluster import environment as ray_environment
from sluice.deploy.common import state
from sluice.deploy.common.race import first_of
from sluice.deploy.common.waiting import within
from sluice.protocol.config import SluiceConfig
from sluice.protocol.messages import ClusterState, ConfigError, NodeLost, NodeState, SluiceError

REFRESH_S = 0.2
PATIENCE_S = 60.0  # with a silent controller: the nodes and routers serve without it
STOP_LIMIT_S = 100.0  # routers, then nodes, each within limits of its own; then all is killed
LOST_STOP_LIMIT_S = 5.0
CONTROLLER = "the controller"


class Display(Protocol):
    """Where the supervisor shows what happens; cli.py draws it."""

    def note(self, text: str) -> None: ...

    def progress(self, cluster: ClusterState) -> None: ...

    def waits_for(self, what: str) -> None: ...

    def ready(self, deployment: state.Deployment) -> None: ...

    def stopping(self) -> None: ...


def supervise(config: SluiceConfig, config_path: Path, display: Display) -> None:
    """Run a deployment until a signal. Raises ConfigError or NodeError if it cannot run."""
    namespace = config.ray.namespace
    with state.hold(namespace):
        deployment = state.Deployment(
            namespace=namespace,
            pid=os.getpid(),
            config=str(config_path.resolve()),
            model=config.model.served_name,
        )
        state.write(deployment)
        display.note("starting Ray")
        ray_environment.prepare(joining=config.ray.address is not None)
        from sluice.deploy.cluster.cluster import ray_cluster  # only now, and it takes a second

        with ray_cluster(config, display.note) as ray_address:
            starting = dataclasses.replace(deployment, ray_address=ray_address)
            asyncio.run(_run(config, starting, display))


async def _run(config: SluiceConfig, deployment: state.Deployment, display: Display) -> None:
    signalled = _on_signals()
    controller = _start_controller(config)
    stop_limit_s = STOP_LIMIT_S
    try:
        await first_of(_serve(controller, deployment, display), signalled.wait())
    except NodeLost:
        stop_limit_s = LOST_STOP_LIMIT_S  # it is gone, or has been silent for long enough
        raise
    finally:
        display.stopping()
        signalled.clear()
        await first_of(_stop(controller, display, stop_limit_s), signalled.wait())


def _on_signals() -> asyncio.Event:
    """An event that SIGINT and SIGTERM set."""
    signalled = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, signalled.set)
    return signalled


def _start_controller(config: SluiceConfig) -> Any:
    """Start the controller's process. Raises ConfigError if the cluster has one by that name.

    It runs on this host, which it cannot outlive anyway: on another, that host's loss or a cut
    cable to it would end or blind the whole deployment.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from sluice.deploy.actors.controller_actor import CONTROLLER, ControllerActor

    here = ray.get_runtime_context().get_node_id()
    options = {
        "name": CONTROLLER,
        "num_cpus": 0,
        "max_concurrency": 1000,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False),
    }
    try:
        return ray.remote(ControllerActor).options(**options).remote(config)
    except ValueError as error:
        raise ConfigError(
            f"ray.namespace {config.ray.namespace!r} is taken on this cluster: {error}; "
            "start under another --namespace"
        ) from error


async def _serve(controller: Any, deployment: state.Deployment, display: Display) -> None:
    """Start everything, announce it, and watch it; never return. Raises what ends it."""
    record = state.Record(deployment)
    await first_of(_start(controller, record), _show(controller, record, display))
    display.progress(await _ask(controller.state.remote()))
    record.update(ready=True, waits_for="")
    display.ready(record.deployment)
    await _show(controller, record, display)


async def _start(controller: Any, record: state.Record) -> None:
    """Return when every role has its target of ready nodes, however long that takes."""
    record.update(url=await _ask(controller.start.remote(), math.inf))
    await _ask(controller.until_ready.remote(), math.inf)


async def _show(controller: Any, record: state.Record, display: Display) -> None:
    """Show the nodes' states, and what processes wait for, again and again; never return.

    Raises NodeLost if the controller dies or is silent for too long.
    """
    while True:
        cluster = await _ask(controller.state.remote())
        display.progress(cluster)
        routers = await _ask(controller.routers_wait_for.remote())
        for what in routers:
            display.waits_for(what)
        nodes = [n for n in cluster.nodes if n.state is NodeState.STARTING and n.detail]
        record.update(waits_for="\n".join([*routers, *(f"{n.node_id}: {n.detail}" for n in nodes)]))
        await asyncio.sleep(REFRESH_S)


async def _stop(controller: Any, display: Display, limit_s: float) -> None:
    try:
        await _ask(controller.stop.remote(), limit_s)
    except SluiceError as error:  # the controller's death may be what ended the deployment
        display.note(f"{error}; what is left of its processes is killed")


async def _ask(answer: Any, limit_s: float = PATIENCE_S) -> Any:
    from sluice.deploy.cluster.errors import call

    return await within(limit_s, CONTROLLER, call(CONTROLLER, answer))
