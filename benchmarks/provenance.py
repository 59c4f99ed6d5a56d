"""Where a figure comes from: command, commit, machine, date; and CSV files that carry it."""

from __future__ import annotations

import csv
import datetime
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # not needed to run, where only torch is installed
    from rich.console import Console

RESULTS = Path(__file__).parent / "results"


def provenance(command: str) -> dict[str, str]:
    """What to print above every result and to keep beside it."""
    return {
        "command": command,
        "commit": _git("rev-parse", "--short", "HEAD"),
        "machine": f"{_cpu()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
    }


def print_provenance(console: Console, origin: Mapping[str, str]) -> None:
    for key, value in origin.items():
        console.print(f"{key}: {value}", highlight=False)


def write_csv(path: Path, origin: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Rows of equal keys, each with the figures' origin in front."""
    listed = [{**origin, **row} for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(listed[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(listed)


def _cpu() -> str:
    """The processor's name, as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _git(*arguments: str) -> str:
    """What git says about the checkout, or "unknown" outside of one."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
