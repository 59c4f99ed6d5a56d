"""What the router adds to an answer, beside SGLang's router on the same machine.

    python -m sluice.benchmarks.router_overhead [--sglang-python PATH] [--rounds 5]

    straight        a client and a worker that answers at once, written on bare asyncio
    fastapi         the same, with a worker of FastAPI and uvicorn: what a Python server costs
    sluice          our router in one process, over nodes in it that answer at once
    sluice x 2      two of those processes at one port (router.replicas: 2)
    sglang-router   in front of two workers as in `straight`; PATH is a Python that has the package:
                    python -m venv sgl && sgl/bin/pip install sglang-router

Every round measures each of them with one connection and with 64. Added latency is a percentile
less the same percentile of `straight`; `cpu_ms` is the processor time of the server's process for a
request, which hardly depends on what else the machine does. Figures are the medians of the rounds.

They do not do the same work. Ours reads every field, turns the prompt into token ids, reserves
pages, and makes text of the answer's tokens one by one; SGLang's passes bodies on, and pays for one
more HTTP exchange. One of ours has one thread, SGLang's as many as there are cores. In a
deployment our nodes are Ray actors, whose calls come on top.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from sluice.benchmarks.dummy_worker import MODEL_NAME, run_fastapi, run_worker
from sluice.benchmarks.instant_nodes import run_router
from sluice.benchmarks.provenance import RESULTS, print_provenance, provenance, write_csv
from sluice.router.http.server import bind

NUM_TOKENS = 16
PROMPT = "It was the best of times, it was the worst of times, it was the age of wisdom"
CONNECTIONS = (1, 64)
SECONDS = 1.5  # of one measurement
START_LIMIT_S = 60.0
HOW_TO_GET_SGLANG = (
    "without sglang-router: `python -m venv sgl && sgl/bin/pip install sglang-router`, then "
    "--sglang-python sgl/bin/python"
)


@dataclass(frozen=True)
class Server:
    """Processes that answer at a port of this machine."""

    port: int
    pids: tuple[int, ...]

    @property
    def cpu_s(self) -> float:
        """Processor time taken so far, all processes and threads together."""
        ticks = 0
        for pid in self.pids:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2]
            user, system = fields.split()[11:13]
            ticks += int(user) + int(system)
        return ticks / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Measured:
    """One server with so many connections at once, over one round or, as medians, over all."""

    server: str
    streamed: bool
    num_connections: int
    requests_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_ms: float


@dataclass(frozen=True)
class Line:
    """A line of the CSV."""

    server: str
    streamed: bool
    num_connections: int
    requests_per_s: float
    p50_ms: float
    p99_ms: float
    added_p50_ms: float
    added_p99_ms: float
    cpu_ms: float


@contextlib.contextmanager
def server_process(run: Callable[..., None], *arguments: object) -> Iterator[Server]:
    """A process that serves until the block ends."""
    context = multiprocessing.get_context("spawn")
    told, telling = context.Pipe(duplex=False)
    process = context.Process(target=run, args=(telling, *arguments), daemon=True)
    process.start()
    try:
        if not told.poll(START_LIMIT_S):
            raise SystemExit(f"{run.__name__}: not serving within {START_LIMIT_S:g} s")
        assert process.pid is not None, "it has started"
        yield Server(told.recv(), (process.pid,))
    finally:
        process.terminate()
        process.join()


@contextlib.contextmanager
def sglang_router(python: Path, workers: Sequence[Server]) -> Iterator[Server]:
    """SGLang's router in front of the workers, until the block ends."""
    port, metrics_port = _free_port(), _free_port()
    urls = [f"http://127.0.0.1:{worker.port}" for worker in workers]
    command = [str(python), "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(metrics_port)]
    command += ["--policy", "round_robin", "--log-level", "error", "--worker-urls", *urls]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_until_it_answers(port, process)
        yield Server(port, (process.pid,))
    finally:
        process.terminate()
        process.wait()


def _free_port() -> int:
    with contextlib.closing(bind("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _wait_until_it_answers(port: int, process: subprocess.Popen[bytes]) -> None:
    request = {"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": NUM_TOKENS}
    end = time.monotonic() + START_LIMIT_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            url = f"http://127.0.0.1:{port}/v1/completions"
            if httpx.post(url, json=request, trust_env=False).is_success:
                return
        time.sleep(0.1)
    raise SystemExit(f"sglang-router: no answer (exit code {process.poll()})")


def request_bytes(port: int, *, streamed: bool) -> bytes:
    """The one request that all send."""
    asked: dict[str, Any] = {"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": NUM_TOKENS}
    asked |= {"temperature": 0, "ignore_eos": True, "stream": streamed}
    body = json.dumps(asked)
    return (
        f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    ).encode()


async def exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> None:
    """Send a request and read the whole answer, which has to be a good one."""
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b" 200 " not in head[:20]:
        raise SystemExit(f"expected 200: {head!r} {await reader.read(1000)!r}")
    _, found, rest = head.partition(b"content-length:")
    if found:
        await reader.readexactly(int(rest.partition(b"\r\n")[0]))
    else:
        await reader.readuntil(b"\r\n0\r\n\r\n")


async def drive(port: int, num_connections: int, *, streamed: bool) -> tuple[list[float], float]:
    """Latencies of all answers, and the seconds taken; each connection sends one at a time."""
    request, latencies_s = request_bytes(port, streamed=streamed), []
    begin = time.perf_counter()
    end = begin + SECONDS

    async def connection() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while (sent := time.perf_counter()) < end:
            await exchange(reader, writer, request)
            latencies_s.append(time.perf_counter() - sent)
        writer.close()

    await asyncio.gather(*(connection() for _ in range(num_connections)))
    return latencies_s, time.perf_counter() - begin


def measure(name: str, server: Server, num_connections: int, *, streamed: bool) -> Measured:
    cpu_s = server.cpu_s
    latencies_s, seconds = asyncio.run(drive(server.port, num_connections, streamed=streamed))
    cpu_s = server.cpu_s - cpu_s
    latencies_s.sort()
    return Measured(
        name,
        streamed,
        num_connections,
        len(latencies_s) / seconds,
        1e3 * statistics.median(latencies_s),
        1e3 * latencies_s[int(0.99 * (len(latencies_s) - 1))],
        1e3 * cpu_s / len(latencies_s),
    )


def measure_all(servers: Mapping[str, Server], num_rounds: int) -> list[Measured]:
    """All servers in turn, again and again; the first round warms up and is not kept."""
    kinds = [(number, streamed) for number in CONNECTIONS for streamed in (False, True)]
    kept: list[Measured] = []
    for round_number in tqdm(range(num_rounds + 1), unit="round", disable=None):
        for number, streamed in kinds:
            for name, server in servers.items():
                measured = measure(name, server, number, streamed=streamed)
                kept += [measured] if round_number else []
    return kept


def lines(measured: Sequence[Measured]) -> list[Line]:
    """Medians over the rounds, with what is added to the straight way."""
    rounds: dict[tuple[str, bool, int], list[Measured]] = {}
    for m in measured:
        rounds.setdefault((m.server, m.streamed, m.num_connections), []).append(m)
    middle = {key: _medians(of_one) for key, of_one in rounds.items()}
    result = []
    for (server, streamed, number), (rate, p50, p99, cpu) in middle.items():
        _, straight_p50, straight_p99, _ = middle["straight", streamed, number]
        added = (p50 - straight_p50, p99 - straight_p99)
        figures = [round(figure, 3) for figure in (p50, p99, *added, cpu)]
        result.append(Line(server, streamed, number, round(rate, 1), *figures))
    return result


def _medians(rounds: Sequence[Measured]) -> tuple[float, ...]:
    figures = [(m.requests_per_s, m.p50_ms, m.p99_ms, m.cpu_ms) for m in rounds]
    return tuple(statistics.median(column) for column in zip(*figures, strict=True))


def has_sglang(python: Path) -> bool:
    command = [str(python), "-c", "import sglang_router"]
    return not subprocess.run(command, capture_output=True, check=False).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sglang-python", type=Path, default=Path(sys.executable))
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(arguments)
    console = Console()
    origin = provenance(f"python -m sluice.benchmarks.router_overhead --rounds {given.rounds}")
    print_provenance(console, origin)
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(server_process(run_worker, NUM_TOKENS)) for _ in range(2)]
        servers = {
            "straight": workers[0],
            "fastapi": stack.enter_context(server_process(run_fastapi, NUM_TOKENS)),
            "sluice": stack.enter_context(server_process(run_router)),
        }
        first = stack.enter_context(server_process(run_router, 2))
        second = stack.enter_context(server_process(run_router, 2, first.port))
        servers["sluice x 2"] = Server(first.port, first.pids + second.pids)
        if has_sglang(given.sglang_python):
            servers["sglang-router"] = stack.enter_context(
                sglang_router(given.sglang_python, workers)
            )
        else:
            console.print(HOW_TO_GET_SGLANG)
        measured = lines(measure_all(servers, given.rounds))
    table = Table(*asdict(measured[0]))
    for line in measured:
        table.add_row(*(str(value) for value in asdict(line).values()))
    console.print(table)
    write_csv(RESULTS / "router_overhead.csv", origin, [asdict(line) for line in measured])
    return 0


if __name__ == "__main__":
    sys.exit(main())
