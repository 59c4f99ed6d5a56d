"""What runs on this machine: one folder per namespace with a lock, a record and a log.

$XDG_STATE_HOME/sluice/<namespace>/     (default: ~/.local/state/sluice/<namespace>/)
    lock              held by the supervisor as long as it lives, so that a record left behind
                      by a killed one is recognised, whatever process has its number now
    deployment.json   the record: where it is and who supervises it
    up.log            what a detached supervisor printed
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from sluice.protocol.messages import ConfigError

LOCK_TRIES = 5
LOCK_RETRY_S = 0.02


@dataclass(frozen=True)
class Deployment:
    """The record of a deployment. `url` is empty until the router serves."""

    namespace: str
    pid: int
    config: str
    model: str  # its name in the API
    url: str = ""
    ray_address: str = ""
    ready: bool = False  # every node that the config asks for has been up
    waits_for: str = ""  # what keeps processes from being started, a line each


def folder(namespace: str) -> Path:
    """Raises ConfigError where a user has no home."""
    try:
        root = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    except RuntimeError as error:
        raise ConfigError(
            f"no home folder ({error}); set XDG_STATE_HOME to a folder that you may write to"
        ) from error
    return Path(root) / "sluice" / namespace


def own_folder(namespace: str) -> Path:
    """The namespace's folder, made if need be, which nobody else may enter. Raises ConfigError."""
    where = folder(namespace)
    try:
        where.mkdir(parents=True, exist_ok=True)
        where.chmod(0o700)
    except OSError as error:
        raise _unusable(where, error) from error
    return where


def _unusable(where: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{where}: {error.strerror or error}; what runs is noted there, set XDG_STATE_HOME to a "
        "folder that you may write to"
    )


def log_file(namespace: str) -> Path:
    return folder(namespace) / "up.log"


@contextmanager
def hold(namespace: str) -> Iterator[None]:
    """Be the supervisor of the namespace for the block; the record goes with it.

    Raises ConfigError if another process is.
    """
    with _lock_file(own_folder(namespace)) as lock:
        _lock(lock, namespace)
        try:
            yield
        finally:
            _record(namespace).unlink(missing_ok=True)


def write(deployment: Deployment) -> None:
    """Replace the record; call it inside `hold`."""
    record = _record(deployment.namespace)
    draft = record.with_suffix(".new")
    try:
        draft.write_text(json.dumps(asdict(deployment), indent=2) + "\n")
        draft.replace(record)  # readers see the old or the new one, never half of it
    except OSError as error:  # a full disk
        raise _unusable(record.parent, error) from error


class Record:
    """A supervisor's deployment, kept in its file; use it inside `hold`."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment

    def update(self, **changes: Any) -> None:
        changed = replace(self.deployment, **changes)
        if changed != self.deployment:
            self.deployment = changed
            write(changed)


def find(namespace: str) -> Deployment | None:
    """The deployment that runs under this name, or None; a stale record counts as none.

    Raises ConfigError if another version of this project wrote the record.
    """
    if not is_held(namespace):
        return None
    record = _record(namespace)
    try:
        return Deployment(**json.loads(record.read_text()))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(record, error) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{record}: {error}; another version of sluice has written it, use that one, or end "
            "the process whose pid it names"
        ) from error


def running() -> list[str]:
    """Namespaces that a supervisor holds."""
    root = folder("x").parent
    try:
        names = sorted(path.name for path in root.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unusable(root, error) from error
    return [name for name in names if is_held(name)]


def is_held(namespace: str) -> bool:
    """Whether a supervisor of this namespace lives. Raises ConfigError if nobody can tell."""
    where = folder(namespace)
    try:
        with (where / "lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError as error:
        raise _unusable(where, error) from error


def check_free(namespace: str) -> None:
    """Raise ConfigError if a supervisor of this namespace lives."""
    if is_held(namespace):
        raise ConfigError(_already(namespace))


def _lock(lock: IO[str], namespace: str) -> None:
    """Take the lock. Tried more than once: `is_held` takes it for an instant to look."""
    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(LOCK_RETRY_S)
    raise ConfigError(_already(namespace))


def _lock_file(where: Path) -> IO[str]:
    try:
        return (where / "lock").open("w")
    except OSError as error:
        raise _unusable(where, error) from error


def _record(namespace: str) -> Path:
    return folder(namespace) / "deployment.json"


def _already(namespace: str) -> str:
    found = find(namespace)
    where = f" (pid {found.pid}, {found.url or 'starting'})" if found else ""
    return (
        f"deployment {namespace!r} is already running{where}; end it with "
        f"`sluice down --namespace {namespace}` or start this one under another --namespace"
    )
