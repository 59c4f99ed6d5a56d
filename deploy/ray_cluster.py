"""The Ray a deployment runs on: one of its own on this machine, or a running cluster.

An embedded Ray takes free ports and keeps its files in a folder of its own, so that several run
side by side; it ends with this process. Ray authenticates with a token: an embedded Ray makes one
by itself, a cluster wants the one it was started with (see ray_environment.py).
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from ray.exceptions import RayError

from sluice.deploy import state
from sluice.deploy.placement import check_gpus, embedded_cpus, unplaced_roles
from sluice.deploy.ray_environment import TOKEN_HELP
from sluice.engine.config import SluiceConfig
from sluice.engine.protocol import ConfigError

OBJECT_STORE_BYTES = 100 << 20  # messages are small; pages never pass through Ray's store
LONGEST_PARENT = 20  # characters; Ray's socket paths below it must fit into 107

SHUTDOWN_LIMIT_S = 30.0  # it takes a second or two

Say = Callable[[str], None]


@contextmanager
def ray_cluster(config: SluiceConfig, say: Say) -> Iterator[str]:
    """Be a Ray driver for the block; yields the cluster's address. `say` gets one-line notes.

    Raises ConfigError if the cluster cannot be joined or offers too little.
    """
    files = None if config.ray.address is not None else _fresh_files(config.ray.namespace)
    try:
        if files is not None:
            _start(config, files)
        else:
            _join(config, say)
        yield str(ray.get_runtime_context().gcs_address)
    finally:
        with _ended_within(SHUTDOWN_LIMIT_S):
            ray.shutdown()
        if files is not None:
            shutil.rmtree(files, ignore_errors=True)


@contextmanager
def _ended_within(limit_s: float) -> Iterator[None]:
    """End this process if the block takes longer: Ray ends what a driver that died has started."""
    timer = threading.Timer(limit_s, os._exit, args=(1,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _start(config: SluiceConfig, files: Path) -> None:
    """Start a Ray for this deployment alone."""
    ray.init(
        address="local",
        namespace=config.ray.namespace,
        num_cpus=embedded_cpus(config, os.cpu_count() or 1),
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=str(files),
        _system_config={
            "worker_niceness": 0
        },  # the nodes are the work, Ray would yield to all else
    )
    check_gpus(config, ray.cluster_resources())


def _join(config: SluiceConfig, say: Say) -> None:
    """Become a driver of a running cluster."""
    address = config.ray.address
    try:
        ray.init(
            address=address,
            namespace=config.ray.namespace,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"ray.address {address!r}: {_first_line(error)}; is a cluster running there? "
            f"{TOKEN_HELP}. Without ray.address Ray is started on this machine."
        ) from error
    if unplaced := unplaced_roles(ray.cluster_resources()):
        say(
            f"no host offers the resource {', '.join(unplaced)}: "
            "these are placed wherever CPUs and GPUs are free"
        )


def _fresh_files(namespace: str) -> Path:
    """An empty folder for Ray's files; what a killed predecessor left there goes.

    The namespace is ours alone while its lock is held, so its folder can have a fixed name.
    """
    usual = tempfile.gettempdir()
    parent = usual if len(usual) <= LONGEST_PARENT else "/tmp"
    owner = hashlib.sha256(str(state.folder(namespace).absolute()).encode()).hexdigest()
    files = Path(parent) / f"sluice-{owner[:10]}"
    if files.exists():
        shutil.rmtree(files)
    files.mkdir(mode=0o700)
    return files


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
