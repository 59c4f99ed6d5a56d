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

from sluice.deploy.state import Deployment

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
            pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1])
            resident_mb = round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)
            samples.append(Sample(round(time.monotonic() - begin, 1), name, resident_mb))
        await asyncio.sleep(SAMPLE_EVERY_S)


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
