"""Clients that come back just when their idle connections expire: does any of them meet a reset?

    python -m sluice.benchmarks.keep_alive [--clients 256] [--rounds 10]

httpx gives up a connection that was idle for 5 s. A server that does so too will close some of them
just as a request comes, which no client may repeat by itself. Each client sends a completion, waits
for 4.9 to 5.1 s, and sends the next over whatever connection httpx then takes. The router runs over
nodes that answer at once: with idle connections kept for 5 s, as uvicorn does, and as we keep them.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import ssl
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from sluice.benchmarks.instant_nodes import MODEL, run_router
from sluice.benchmarks.provenance import RESULTS, print_provenance, provenance, write_csv
from sluice.benchmarks.router_overhead import server_process
from sluice.protocol.config import RouterConfig

PAUSE_S = (4.9, 5.1)  # around httpx's own expiry
UVICORN_S = 5
CONTEXT = ssl.create_default_context()  # one for all: each would take longer than its requests
BODY = {"model": MODEL.name, "prompt": "Hello", "max_tokens": 4}


@dataclass(frozen=True)
class Line:
    """A line of the CSV. resets: requests that ended without an answer."""

    keep_alive_s: int
    num_clients: int
    num_requests: int
    answered: int
    resets: int
    num_connections: int


async def client(
    url: str, num_rounds: int, pause_s: tuple[float, float], seen: Counter[str]
) -> None:
    """One client with httpx's defaults. seen: what became of its requests, and its connections."""

    async def trace(event: str, _: dict[str, Any]) -> None:
        seen["connections"] += event == "connection.connect_tcp.complete"

    async with httpx.AsyncClient(verify=CONTEXT, base_url=url) as http:
        for number in range(num_rounds):
            if number:
                await asyncio.sleep(random.uniform(*pause_s))
            try:
                answer = await http.post("/v1/completions", json=BODY, extensions={"trace": trace})
                seen[str(answer.status_code)] += 1
            except httpx.TransportError as error:
                seen[type(error).__name__] += 1


async def all_clients(
    url: str, num_clients: int, num_rounds: int, pause_s: tuple[float, float] = PAUSE_S
) -> Counter[str]:
    """What became of all requests: by status, or by the name of the error."""
    seen: Counter[str] = Counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(num_clients):
            group.create_task(client(url, num_rounds, pause_s, seen))
    return seen


def measure(keep_alive_s: int, num_clients: int, num_rounds: int) -> Line:
    with server_process(run_router, 1, 0, MODEL, {"keep_alive_s": keep_alive_s}) as server:
        url = f"http://127.0.0.1:{server.port}"
        seen = asyncio.run(all_clients(url, num_clients, num_rounds))
    num_requests = num_clients * num_rounds
    num_answered = sum(count for name, count in seen.items() if name.isdecimal())
    return Line(
        keep_alive_s,
        num_clients,
        num_requests,
        seen["200"],
        num_requests - num_answered,
        seen["connections"],
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    console = Console()
    origin = provenance("python -m sluice.benchmarks.keep_alive")
    print_provenance(console, origin)
    ours = RouterConfig().keep_alive_s
    settings = tqdm((UVICORN_S, ours), unit="setting")
    lines = [asdict(measure(s, given.clients, given.rounds)) for s in settings]
    table = Table(*lines[0])
    for line in lines:
        table.add_row(*(str(value) for value in line.values()))
    console.print(table)
    write_csv(RESULTS / "keep_alive.csv", origin, lines)
    return int(any(line["resets"] for line in lines if line["keep_alive_s"] == ours))


if __name__ == "__main__":
    sys.exit(main())
