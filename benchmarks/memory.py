"""What a deployment's router and nodes hold in memory over time, as Linux counts it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sluice.deploy.common.state import Deployment

SAMPLE_EVERY_S = 2.0


@dataclass(frozen=True)
class Sample:
    """A line of load_memory.csv: what a process held so long after the beginning."""

    at_s: float
    process: str
    resident_mb: float


def actors(deployment: Deployment) -> dict[str, int]:
    """Process ids of the deployment's router and nodes, which are its supervisor's descendants."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # a process that has just ended
            parent = int(stat.read_text(encoding="utf-8").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found, waiting = {}, [deployment.pid]
    while waiting:
        pid = waiting.pop()
        waiting += children.get(pid, [])
        with contextlib.suppress(OSError):
            title = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")
            kind = title.removeprefix("ray::").partition("Actor")[0].lower()
            if kind in ("router", "prefill", "decode"):
                found[f"{kind} {pid}"] = pid
    return found


async def sample(deployment: Deployment, samples: list[Sample]) -> None:
    """Note what each process holds, until cancelled."""
    begin, processes = time.monotonic(), actors(deployment)
    while True:
        for name, pid in processes.items():
            at_s = round(time.monotonic() - begin, 1)
            samples.append(Sample(at_s, name, resident_mb(pid)))
        await asyncio.sleep(SAMPLE_EVERY_S)


def resident_mb(pid: int) -> float:
    """What a process holds. Raises OSError if it has ended."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)


def growth(samples: Sequence[Sample]) -> dict[str, float]:
    """Of each process: median of the last quarter over that of the second, less one."""
    held: dict[str, list[float]] = {}
    for taken in samples:
        held.setdefault(taken.process, []).append(taken.resident_mb)
    return {name: _growth(values) for name, values in held.items()}


def _growth(values: Sequence[float]) -> float:
    quarter = max(1, len(values) // 4)
    second, last = values[quarter : 2 * quarter] or values, values[-quarter:]
    return statistics.median(last) / statistics.median(second) - 1


class Growth:
    """By how much a deployment's processes grow, at any moment, over what they held at `begin`.

    A process that comes later counts from the most that one of its kind held then.
    """

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._before: dict[str, float] = {}
        self._most: dict[str, float] = {}

    async def watch(self, every_s: float) -> None:
        """Look again and again, until cancelled."""
        while True:
            self._look()
            await asyncio.sleep(every_s)

    def begin(self) -> None:
        self._most = {}
        self._look()
        self._before = dict(self._most)

    def grown_mb(self, *kinds: str) -> float:
        """Of the process of these kinds ("router", "prefill", "decode") that grew most."""
        grown = [
            most - self._before.get(name, self._held_before(_kind(name)))
            for name, most in self._most.items()
            if _kind(name) in kinds
        ]
        return round(max(grown, default=0.0), 1)

    def num_ended(self) -> int:
        """How many of the processes that lived at `begin` do no more."""
        return len(self._before.keys() - actors(self._deployment).keys())

    def _held_before(self, kind: str) -> float:
        held = [mb for name, mb in self._before.items() if _kind(name) == kind]
        return max(held, default=0.0)

    def _look(self) -> None:
        for name, pid in actors(self._deployment).items():
            with contextlib.suppress(OSError):  # a process that has just ended
                self._most[name] = max(self._most.get(name, 0.0), resident_mb(pid))


def _kind(process: str) -> str:
    return process.partition(" ")[0]
