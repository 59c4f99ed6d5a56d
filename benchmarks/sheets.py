"""Sheets: the results in benchmarks/results/ as docs/benchmarks.md shows them."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from sluice.benchmarks.provenance import RESULTS

WIDTH = 80  # of a table, as it stands in the file
TEXT_WIDTH = 100
Row = Mapping[str, str]


@dataclass(frozen=True)
class Sheet:
    """A result file as the page shows it.

    columns: those that are shown, with their headings. only: rows that have these values. summed:
    columns added up over rows that agree in the other ones. plot: a picture, from docs/.
    """

    file: str
    question: str
    columns: Mapping[str, str]
    only: Mapping[str, str] = field(default_factory=dict)
    summed: tuple[str, ...] = ()
    plot: str = ""


HIT_RATES = {"trace": "trace", "memory": "memory", "policy": "policy"}
MODEL = {"model": "model", "what": "what", "num_requests": "batch", "ours_ms": "ours, ms"}
SPEED = {"theirs_ms": "theirs, ms", "speed_up": "times as fast", "times_floor": "of floor"}
SHEETS = (
    Sheet(
        "payload.csv",
        "What a request moves to decode at V4-Flash's shapes, pages scattered",
        {
            "index_storage": "index rows",
            "num_tokens": "tokens",
            "bytes": "bytes",
            "descriptors": "descriptors",
            "descriptors_by_layer_and_page": "one for each layer and page",
        },
        only={"placement": "scattered"},
        summed=("bytes", "descriptors", "descriptors_by_layer_and_page"),
    ),
    Sheet(
        "transfer.csv",
        "How fast pages move: V4-Flash's shapes, two processes, UCX over shared memory, against "
        "one raw write of as many bytes",
        {
            "num_tokens": "tokens",
            "layout": "layout",
            "descriptors": "descriptors",
            "preparation_ms": "prepared, ms",
            "gigabytes_per_s": "GB/s",
            "of_raw": "of raw",
        },
    ),
    Sheet(
        "layer_overlap.csv",
        "What sending a chunk's layers before the chunk is done could gain: so it is not there",
        {
            "wire": "wire",
            "num_tokens": "tokens",
            "compute_ms": "computing, ms",
            "transfer_ms": "transfer, ms",
            "share": "share of both",
        },
    ),
    Sheet(
        "trace_replay.csv",
        "Prefix hits on two hours of real traffic, by memory; `ideal` has no limit. (Our share of "
        "memory for resume points was chosen on these traces.)",
        {**HIT_RATES, "block_hit_rate": "blocks hit", "ideal_block_hit_rate": "ideal"},
        plot="trace_replay.png",
    ),
    Sheet(
        "live_replay.csv",
        "The same traces, scaled down, through a running deployment, and what the books predict",
        {
            "trace": "trace",
            "num_requests": "requests",
            "live_block_hit_rate": "live",
            "modelless_block_hit_rate": "predicted",
            "ideal_block_hit_rate": "ideal",
        },
    ),
    Sheet(
        "policy_replay.csv",
        "Four prefill nodes with a quarter of the memory each, requests arriving as they did",
        {
            "trace": "trace",
            "policy": "policy",
            "share_of_one_node": "hits of one node's",
            "imbalance": "imbalance",
            "wait_p99_s": "wait p99, s",
        },
    ),
    Sheet(
        "conversations.csv",
        "Transfer saved by what decode holds already: 48 conversations of 8 turns",
        {
            "pool": "pool",
            "bytes_without_reuse": "bytes without reuse",
            "bytes_with_reuse": "with reuse",
            "saved": "saved",
        },
    ),
    Sheet(
        "preemption.csv",
        "16 answers of 4,000 tokens on a decode pool for all of them, and on one for 5",
        {
            "decode_pages": "decode pages",
            "preemptions": "preemptions",
            "equal_outputs": "equal outputs",
            "seconds": "seconds",
        },
    ),
    Sheet(
        "scheduling.csv",
        "What a step costs besides the model",
        {
            "what": "what",
            "num_requests": "requests",
            "num_tokens": "tokens each",
            "median_ms": "median, ms",
            "p99_ms": "p99, ms",
        },
    ),
    *(
        Sheet(f"vs_transformers_{size}.csv", question, {**MODEL, **SPEED})
        for size, question in (
            (
                "mid",
                "50 million parameters beside transformers, and beside reading the weights once",
            ),
            ("tiny", "The same for the tiny model"),
            ("smollm2", "The same for SmolLM2"),
            ("long", "The same for long contexts"),
        )
    ),
    Sheet(
        "pd_vs_colocated.csv",
        "One prefill and one decode node against two nodes that do both, on two cores, 4 clients",
        {
            "setup": "setup",
            "prompt_tokens": "prompt",
            "ttft_ms": "TTFT, ms",
            "tpot_ms": "TPOT, ms",
            "itl_p99_ms": "gap p99, ms",
            "output_tokens_per_s": "tokens/s",
        },
        plot="pd_vs_colocated.png",
    ),
    Sheet(
        "router_overhead.csv",
        "What routers add to an answer of 16 tokens, on two cores; `straight` has none",
        {
            "server": "server",
            "streamed": "streamed",
            "num_connections": "connections",
            "requests_per_s": "answers/s",
            "added_p50_ms": "added, ms",
        },
    ),
    Sheet(
        "router_scale.csv",
        "What nodes cost the router: 400 requests at once, then 25 a second, to nodes that compute "
        "100 a second together",
        {
            "nodes": "nodes of each role",
            "look_ms": "a look, ms",
            "start_ms": "a start, ms",
            "burst_drained_s": "drained, s",
            "burst_cpu": "of a core",
        },
    ),
    Sheet(
        "hostile.csv",
        "An innocent client, ten requests a second, beside hostile inputs of 20 s each. From "
        "`leaving` on the inputs are work of their own, with a right to their share of the machine",
        {
            "input": "input",
            "added_answer_p99_ms": "p99 added, ms",
            "added_health_p99_ms": "/health, ms",
            "num_wrong": "wrong",
            "num_failed": "failed",
            "router_grown_mb": "router, MB",
        },
    ),
    Sheet(
        "keep_alive.csv",
        "Clients with httpx's defaults that come back as their idle connections expire",
        {
            "keep_alive_s": "connections kept, s",
            "num_requests": "requests",
            "answered": "answered",
            "resets": "resets",
        },
    ),
    Sheet(
        "load.csv",
        "500 streams for five minutes; then 20 alone, while 1,100 that stall come, and beside them",
        {
            "phase": "phase",
            "num_streams": "streams",
            "num_answers": "answers",
            "num_wrong": "wrong",
            "num_failed": "failed",
            "answer_p50_s": "p50, s",
            "answer_p99_s": "p99, s",
        },
    ),
    Sheet(
        "clients.csv",
        "Clients that people use, unchanged: what each is asked to do",
        {name: name for name in ("client", "version", "chat", "stream", "tools", "json", "error")},
    ),
)


def benchmarks_page() -> str:
    """Every sheet: its question, where the figures come from, and the table."""
    return "\n\n".join("\n".join(_sheet(sheet)) for sheet in SHEETS)


def _sheet(sheet: Sheet) -> Iterator[str]:
    with (RESULTS / sheet.file).open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if sheet.only.items() <= row.items()]
    origin = rows[0]
    yield f"### {sheet.file.removesuffix('.csv')}"
    yield ""
    yield textwrap.fill(f"{sheet.question}.", TEXT_WIDTH)
    yield ""
    yield "```"
    yield from textwrap.wrap(f"{origin['command']}", WIDTH, subsequent_indent="    ")
    yield from textwrap.wrap(f"commit {origin['commit']}, {origin['date']}, {origin['machine']}")
    yield ""
    yield from _table([*sheet.columns.values()], _shown(sheet, rows))
    yield "```"
    if sheet.plot:
        yield f"\n![{sheet.question}]({sheet.plot})"


def _shown(sheet: Sheet, rows: Sequence[Row]) -> list[list[str]]:
    if not sheet.summed:
        return [[_cell(row[name]) for name in sheet.columns] for row in rows]
    sums: dict[tuple[str, ...], list[int]] = {}
    for row in rows:
        key = tuple(row[name] for name in sheet.columns if name not in sheet.summed)
        total = sums.setdefault(key, [0] * len(sheet.summed))
        sums[key] = [a + int(row[name]) for a, name in zip(total, sheet.summed, strict=True)]
    return [[_cell(cell) for cell in (*key, *map(str, total))] for key, total in sums.items()]


def _cell(value: str) -> str:
    """A figure as people read it: three digits that count, thousands apart."""
    try:
        number = float(value)
    except ValueError:
        return value.removesuffix("_trace")
    if value.isdecimal():
        return f"{int(value):,}"
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of at most WIDTH characters; the first column is to the left, figures to the right."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for index, heading in enumerate(headings):
        justify: JustifyMethod = "right" if index else "left"
        table.add_column(heading, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(width=WIDTH, file=io.StringIO())
    with console.capture() as capture:
        console.print(table)
    yield from (line.rstrip() for line in capture.get().splitlines())
