"""How fast a request's pages move, beside one raw NIXL write of as many bytes.

    python -m sluice.benchmarks.transfer [--tokens 2048 --tokens 8192 ...] [--repeats 7]

Two processes on this machine, the pools of DeepSeek-V4-Flash at their real row sizes (packed fp8
rows, fp4 index keys) at scattered pages, no weights. In turn, in one run:

    raw             one write of the same number of bytes, one descriptor
    equal pages     a request between nodes of equal layout
    halved, doubled decode's Full pools have half, or twice, the tokens a page
    ..., read       decode reads what prefill offers, instead of prefill writing it
    by layer        a descriptor for each page and layer, from Python tuples, as other systems do it

A time runs from handing over the request to the last byte's completion at the sender; preparation
is what passes of it before NIXL is told what to move, packing included. Exit code 1 if at 32,768
tokens writing reaches less than 0.9 of the raw rate with equal layouts or 0.6 with unequal ones,
if it takes 5 ms to prepare with equal ones, or if the list by layer is not 5 times slower.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from sluice.benchmarks.provenance import RESULTS, print_provenance, provenance, write_csv
from sluice.benchmarks.transfer_ways import (
    BY_LAYER,
    EQUAL,
    RAW,
    SCALES,
    Source,
    Timing,
    receive,
    specs_of,
)
from sluice.transfer.plan import rows_to_receive

LENGTHS_TOKENS = (2_048, 8_192, 32_768, 131_072)
JUDGED_TOKENS = 32_768
MIN_EQUAL, MIN_UNEQUAL, MAX_PREPARATION_MS, MIN_SPEEDUP = 0.9, 0.6, 5.0, 5.0


@dataclass(frozen=True)
class Measured:
    """A line of the CSV: medians of `repeats` transfers. `of_raw`: the part of the raw rate."""

    num_tokens: int
    layout: str
    num_bytes: int
    descriptors: int
    repeats: int
    milliseconds: float
    preparation_ms: float
    gigabytes_per_s: float
    of_raw: float


def payload_bytes(num_tokens: int) -> int:
    return sum(
        len(rows_to_receive(spec, num_tokens)) * len(spec.layers) * spec.row_bytes
        for spec in specs_of(EQUAL)
    )


def measure(num_tokens: int, repeats: int) -> Iterator[Measured]:
    """All ways in turn, `repeats` times over, after one turn that does not count."""
    num_bytes = payload_bytes(num_tokens)
    context = mp.get_context("spawn")
    connection, other = context.Pipe()
    process = context.Process(target=receive, args=(other, num_tokens, num_bytes), daemon=True)
    process.start()
    try:
        source = Source(connection, num_tokens, num_bytes)
        ways = source.ways()
        timings: dict[str, list[Timing]] = {name: [] for name in ways}
        bar = tqdm(range(repeats + 1), desc=f"{num_tokens:,} tokens", disable=None)
        for turn in bar:
            for name, way in ways.items():
                timing = way()
                if turn:
                    timings[name].append(timing)
        connection.send(None)
        process.join(10)
    finally:
        process.kill()
    raw = statistics.median(timing.total for timing in timings[RAW])
    for name, each in timings.items():
        seconds = statistics.median(timing.total for timing in each)
        yield Measured(
            num_tokens=num_tokens,
            layout=name,
            num_bytes=num_bytes,
            descriptors=source.descriptors[name],
            repeats=repeats,
            milliseconds=round(seconds * 1e3, 2),
            preparation_ms=round(1e3 * statistics.median(t.preparation for t in each), 2),
            gigabytes_per_s=round(num_bytes / seconds / 1e9, 2),
            of_raw=round(raw / seconds, 3),
        )


def shortfalls(results: Sequence[Measured]) -> Iterator[str]:
    """What misses its goal at the judged length."""
    at = {line.layout: line for line in results if line.num_tokens == JUDGED_TOKENS}
    for layout in SCALES if at else ():
        goal = MIN_EQUAL if SCALES[layout] == 1 else MIN_UNEQUAL
        if at[layout].of_raw < goal:
            yield f"{layout}: {at[layout].of_raw} of the raw rate, goal {goal}"
    if at and at[EQUAL].preparation_ms >= MAX_PREPARATION_MS:
        yield f"preparation {at[EQUAL].preparation_ms} ms, goal {MAX_PREPARATION_MS}"
    if at and (speedup := at[EQUAL].of_raw / at[BY_LAYER].of_raw) < MIN_SPEEDUP:
        yield f"{speedup:.1f} times as fast as a list by layer and page, goal {MIN_SPEEDUP}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, action="append", help="may be given several times")
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console = Console()
    lengths = given.tokens or LENGTHS_TOKENS
    tokens = "".join(f" --tokens {n}" for n in given.tokens or ())
    command = f"python -m sluice.benchmarks.transfer{tokens} --repeats {given.repeats}"
    origin = provenance(command)
    print_provenance(console, origin)
    results = [line for num_tokens in lengths for line in measure(num_tokens, given.repeats)]
    table = Table(
        "tokens", "layout", "bytes", "descriptors", "repeats", "ms", "of it prep.", "GB/s", "of raw"
    )
    for line in results:
        table.add_row(*(str(value) for value in asdict(line).values()))
    console.print(table)
    write_csv(RESULTS / "transfer.csv", origin, [asdict(line) for line in results])
    missed = list(shortfalls(results))
    for shortfall in missed:
        console.print(shortfall)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
