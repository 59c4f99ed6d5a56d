"""The Ray a deployment runs on: one of its own on this machine, or a running cluster.

An embedded Ray takes free ports of the loopback interface and keeps its files in a folder that only
its user may enter, so that several run side by side; it ends with this process. Ray authenticates
with a token: an embedded Ray has one of its own, a cluster wants the one it was started with (see
ray_environment.py).
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

from sluice.deploy.cluster.environment import LOOPBACK, TOKEN_HELP
from sluice.deploy.cluster.placement import check_gpus, embedded_cpus, unplaced_roles
from sluice.deploy.common import state
from sluice.protocol.config import SluiceConfig
from sluice.protocol.messages import ConfigError

OBJECT_STORE_BYTES = 100 << 20  # messages are small; pages never pass through Ray's store
RAYS_FOLDER = "r"  # in one of ours that nobody else may enter: Ray opens its own to everybody
PRIVATE = 0o077  # umask of all its processes: logs and sockets are their user's alone
MIN_FREE_BYTES = 64 << 20  # logs of some hours; with a full disk Ray ends without a word
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
    """Start a Ray for this deployment alone. Raises ConfigError."""
    os.umask(PRIVATE)
    try:
        _init(config, files)
    except (RayError, OSError, RuntimeError, ValueError, TimeoutError) as error:
        raise ConfigError(
            f"Ray does not start on this machine, with its files in {files}: "
            f"{_first_line(error)}; is there room and memory, and may processes be started?"
        ) from error
    check_gpus(config, ray.cluster_resources())


def _init(config: SluiceConfig, files: Path) -> None:
    ray.init(
        address="local",
        namespace=config.ray.namespace,
        num_cpus=embedded_cpus(config, os.cpu_count() or 1),
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _node_ip_address=LOOPBACK,
        _temp_dir=str(files / RAYS_FOLDER),
        _system_config={
            "worker_niceness": 0
        },  # the nodes are the work, Ray would yield to all else
    )


def _join(config: SluiceConfig, say: Say) -> None:
    """Become a driver of a running cluster."""
    address = config.ray.address
    say(f"joining the Ray cluster at {address}")
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

    The namespace is ours alone while its lock is held, so its folder can have a fixed name. Raises
    ConfigError.
    """
    owner = hashlib.sha256(str(state.folder(namespace).absolute()).encode()).hexdigest()
    try:
        usual = tempfile.gettempdir()
        parent = usual if len(usual) <= LONGEST_PARENT else "/tmp"
        files = Path(parent) / f"sluice-{owner[:10]}"
        if files.exists():
            shutil.rmtree(files)
        files.mkdir(mode=0o700)
        free = shutil.disk_usage(files).free
    except OSError as error:
        raise ConfigError(
            f"a folder for Ray's files cannot be made: {error}; set TMPDIR to one of at most "
            f"{LONGEST_PARENT} characters that you may write to"
        ) from error
    if free < MIN_FREE_BYTES:
        files.rmdir()
        raise ConfigError(
            f"{parent} has {free >> 20} MiB free, expected at least {MIN_FREE_BYTES >> 20} for "
            "Ray's files; make room there, or set TMPDIR to another folder"
        )
    return files


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
