"""Supervisor: the foreground process of `sluice up`, from the checks to the last goodbye.

1. Checks, then the namespace's lock.
2. Ray, the controller, the router, the nodes; the state file says where they are.
3. Waits for SIGINT or SIGTERM, or for the controller to die.
4. Running streams finish, processes end, Ray ends, the state file goes.

A second signal while it stops ends everything at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from pathlib import Path
from typing import Any, Protocol

from sluice.deploy import ray_environment, state
from sluice.deploy.race import first_of
from sluice.engine.config import SluiceConfig
from sluice.engine.protocol import ClusterState, ConfigError, NodeLost

REFRESH_S = 0.2


class Display(Protocol):
    """Where the supervisor shows what happens; cli.py draws it."""

    def note(self, text: str) -> None: ...

    def progress(self, cluster: ClusterState) -> None: ...

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
        from sluice.deploy.ray_cluster import ray_cluster  # only now, and it takes a second

        with ray_cluster(config, display.note) as ray_address:
            starting = dataclasses.replace(deployment, ray_address=ray_address)
            asyncio.run(_run(config, starting, display))


async def _run(config: SluiceConfig, deployment: state.Deployment, display: Display) -> None:
    signalled = _on_signals()
    controller = _start_controller(config)
    try:
        await first_of(_serve(controller, deployment, display), signalled.wait())
    finally:
        display.stopping()
        signalled.clear()
        await first_of(_stop(controller), signalled.wait())


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

    from sluice.deploy.controller_actor import CONTROLLER, ControllerActor

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
    deployment = dataclasses.replace(deployment, url=await _ask(controller.start.remote()))
    state.write(deployment)
    await first_of(_ask(controller.until_ready.remote()), _show(controller, display))
    display.progress(await _ask(controller.state.remote()))
    deployment = dataclasses.replace(deployment, ready=True)
    state.write(deployment)
    display.ready(deployment)
    await _show(controller, display)


async def _show(controller: Any, display: Display) -> None:
    """Show the nodes' states again and again; never return."""
    while True:
        display.progress(await _ask(controller.state.remote()))
        await asyncio.sleep(REFRESH_S)


async def _stop(controller: Any) -> None:
    try:
        await _ask(controller.stop.remote())
    except NodeLost:
        return  # it was the controller's death that ended the deployment


async def _ask(answer: Any) -> Any:
    from sluice.deploy.ray_errors import call

    return await call("the controller", answer)
