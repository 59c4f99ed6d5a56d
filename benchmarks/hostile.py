"""An innocent client beside a hostile one: nobody takes answers or the service from another.

    python -m sluice.benchmarks.hostile [--inputs NAME,NAME,...] [--seconds 20] [--config FILE]

A deployment of the config (2p2d.yaml) is started under a namespace and a port of its own. An
innocent client sends ten short requests a second at temperature 0 and asks /health as often: for
10 s alone, then for --seconds beside an input of hostile_inputs.py that is sent again and again,
then for 5 s alone.

A line for each input: how long answers, first tokens and /health took before, during and after;
what was wrong or failed; by how much the router and the nodes grew, at any moment; how many of
these processes ended; what the hostile client was answered; and how long it took after all that
until everything was idle and right again. If that takes more than 60 s, the next input gets another
deployment. Good requests that want much (`is_work`) have a right to their share of the machine:
what others wait is not judged.

Exit code 1 if the slowest hundredth of answers or of /health becomes more than 50 ms slower, an
answer is wrong or missing, a process grows by more than 256 MB or ends, or does not come to rest.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from sluice.benchmarks.hostile_attack import attacker
from sluice.benchmarks.hostile_inputs import INPUTS
from sluice.benchmarks.innocent import Waits, ask, problems, references, stretches
from sluice.benchmarks.memory import Growth
from sluice.benchmarks.provenance import RESULTS, print_provenance, provenance, write_csv
from sluice.deploy.commands import locate
from sluice.deploy.common import state
from sluice.deploy.common.state import Deployment

CONFIG = Path(__file__).parents[1] / "deploy/configs/2p2d.yaml"
NAMESPACE = "hostile"
WARM_S, BEFORE_S, AFTER_S = 5.0, 10.0, 5.0
MEMORY_EVERY_S = 0.25
REST_LIMIT_S = 60.0
DOWN_LIMIT_S = 30.0
TABLE_WIDTH = 160  # also where the output is no terminal
MAX_ADDED_MS = 50.0
MAX_GROWTH_MB = 256.0
SHOWN = {
    "input": "input",
    "before_answer_p99_ms": "answer p99, ms",
    "during_answer_p99_ms": "during",
    "added_answer_p99_ms": "added",
    "added_health_p99_ms": "/health added",
    "num_wrong": "wrong",
    "num_failed": "failed",
    "router_grown_mb": "router, MB",
    "node_grown_mb": "node, MB",
    "num_ended": "ended",
    "rest_s": "rest, s",
    "broken": "broken",
}

Row = dict[str, Any]  # a line of hostile.csv


async def measure(deployment: Deployment, name: str, seconds: float) -> Row:
    """One input: before, during, after, and until everything rests."""
    url, model, growth = deployment.url, deployment.model, Growth(deployment)
    expected = await references(url, model)
    with attacker(name, url, model) as hostile:
        enough = asyncio.Event()
        asking = asyncio.create_task(ask(url, model, expected, enough))
        await asyncio.sleep(BEFORE_S)
        growth.begin()
        watching = asyncio.create_task(growth.watch(MEMORY_EVERY_S))
        attack_begin_s = time.monotonic()
        outcomes = await hostile.attack(seconds)
        attack_end_s = time.monotonic()
        await asyncio.sleep(AFTER_S)
        enough.set()
        asked = await asking
    rest_s = await rest(url, model, expected)
    watching.cancel()
    row = {
        "input": name,
        "num_connections": INPUTS[name].num_connections,
        "seconds": seconds,
        "outcomes": counted(outcomes),
        **compared(*stretches(asked, attack_begin_s, attack_end_s)),
        "problems": counted(problems(asked)),
        "router_grown_mb": growth.grown_mb("router"),
        "node_grown_mb": growth.grown_mb("prefill", "decode"),
        "num_ended": growth.num_ended(),
        "rest_s": rest_s,
    }
    return {**row, "broken": ", ".join(broken(row, is_work=INPUTS[name].is_work))}


async def warm(deployment: Deployment) -> None:
    """The innocent client alone: a first step of each size is slow."""
    expected, enough = await references(deployment.url, deployment.model), asyncio.Event()
    asking = asyncio.create_task(ask(deployment.url, deployment.model, expected, enough))
    await asyncio.sleep(WARM_S)
    enough.set()
    await asking


def compared(before: Waits, during: Waits, after: Waits) -> Row:
    """Figures of the three stretches, and what the attack added."""
    stretches = {"before": before, "during": during, "after": after}
    row = {
        f"{when}_{field}": value
        for when, stretch in stretches.items()
        for field, value in asdict(stretch).items()
    }
    for what in ("answer", "first_token", "health"):
        added = row[f"during_{what}_p99_ms"] - row[f"before_{what}_p99_ms"]
        row[f"added_{what}_p99_ms"] = round(added, 1)
    row["num_wrong"] = sum(stretch.num_wrong for stretch in stretches.values())
    row["num_failed"] = sum(stretch.num_failed for stretch in stretches.values())
    return row


def broken(row: Mapping[str, Any], *, is_work: bool) -> list[str]:
    """Which limits a row breaks. NaN, where nothing was answered, breaks them too."""
    kept = {
        "wrong": row["num_wrong"] == 0,
        "failed": row["num_failed"] == 0,
        "answers": is_work or row["added_answer_p99_ms"] <= MAX_ADDED_MS,
        "health": is_work or row["added_health_p99_ms"] <= MAX_ADDED_MS,
        "router's memory": row["router_grown_mb"] <= MAX_GROWTH_MB,
        "a node's memory": row["node_grown_mb"] <= MAX_GROWTH_MB,
        "ended": row["num_ended"] == 0,
        "rest": row["rest_s"] <= REST_LIMIT_S,
    }
    return [limit for limit, is_kept in kept.items() if not is_kept]


def counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{what} x {count}" for what, count in sorted(counts.items()))


async def rest(url: str, model: str, expected: Mapping[str, str]) -> float:
    """After how many seconds all nodes are there and idle and answers are right; or infinity."""
    begin = time.monotonic()
    while (rest_s := time.monotonic() - begin) <= REST_LIMIT_S:
        with contextlib.suppress(OSError, httpx.HTTPError):  # a timeout is an OSError, too
            if await _is_idle(url) and await references(url, model) == expected:
                return round(rest_s, 1)
        await asyncio.sleep(0.2)
    return float("inf")


async def _is_idle(url: str) -> bool:
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=10) as http:
        status = (await http.get("/admin/status")).raise_for_status().json()
    ready = [node for node in status["nodes"] if node["state"] == "ready"]
    busy = [
        node
        for node in ready
        if node["running"] or node["waiting"] or any(p["used"] for p in node["pools"].values())
    ]
    return len(ready) == sum(status["targets"].values()) and not busy


def measure_all(
    config: Path, names: Sequence[str], seconds: float, done: Callable[[Row], None]
) -> None:
    """Each input, and another deployment after one from which a deployment did not recover."""
    waiting = deque(names)
    while waiting:
        with deployed(config) as deployment:
            asyncio.run(warm(deployment))
            rests = True
            while waiting and rests:
                row = asyncio.run(measure(deployment, waiting.popleft(), seconds))
                done(row)
                rests = row["rest_s"] <= REST_LIMIT_S


@contextlib.contextmanager
def deployed(config: Path) -> Iterator[Deployment]:
    """A deployment of our own for the block, which ends with it in whatever state it is."""
    up = _sluice("up", str(config), "--detach", "--port", "0", "--namespace", NAMESPACE)
    if up.returncode:
        raise SystemExit(f"{config}: {up.stderr or up.stdout}")
    deployment = locate.deployment(NAMESPACE)
    try:
        yield deployment
    finally:
        _sluice("down", "--namespace", NAMESPACE, "--timeout", str(DOWN_LIMIT_S))
        if state.is_held(NAMESPACE):
            os.kill(deployment.pid, signal.SIGKILL)  # Ray's processes end with the one they serve


def _sluice(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sluice.deploy.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def table(rows: Sequence[Row]) -> Table:
    shown = Table(*SHOWN.values())
    for row in rows:
        shown.add_row(*(str(row[key]) for key in SHOWN), style="red" if row["broken"] else "")
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--inputs", default=",".join(INPUTS), help="names, with commas; all of them"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of each attack")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--csv", type=Path, default=RESULTS / "hostile.csv")
    given = parser.parse_args(arguments)
    names = given.inputs.split(",")
    if unknown := [name for name in names if name not in INPUTS]:
        parser.error(f"--inputs {', '.join(unknown)}: expected some of {', '.join(INPUTS)}")
    chosen = f" --inputs {given.inputs}" if names != list(INPUTS) else ""
    console = Console()
    origin = provenance(
        f"python -m sluice.benchmarks.hostile --config {given.config.name} "
        f"--seconds {given.seconds:g}{chosen}"
    )
    print_provenance(console, origin)
    rows: list[Row] = []
    with tqdm(total=len(names), unit="input") as bar:

        def done(row: Row) -> None:
            rows.append(row)
            write_csv(given.csv, origin, rows)
            bar.write(f"{row['input']}: {row['outcomes']}; broken: {row['broken'] or 'nothing'}")
            bar.update()

        measure_all(given.config, names, given.seconds, done)
    Console(width=max(console.width, TABLE_WIDTH)).print(table(rows))
    return 1 if any(row["broken"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
