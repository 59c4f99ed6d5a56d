"""A comparison as tables for the terminal and as CSV files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from sluice.benchmarks.provenance import print_provenance, write_csv
from sluice.deploy.compare.measures import Measure
from sluice.deploy.compare.result import Comparison, Pair

TEXT_COLUMNS = 110
Value = Callable[[Measure], float]

FIGURES: tuple[tuple[str, Value], ...] = (
    ("TTFT, ms", lambda m: m.ttft_s * 1e3),
    ("TPOT, ms", lambda m: m.tpot_s * 1e3),
    ("cache, kB", lambda m: m.cache_bytes / 1e3),
    ("transfer, kB", lambda m: m.transfer_bytes / 1e3),
    ("descriptors", lambda m: m.transfer_descriptors),
)
LENGTH_FIGURES = FIGURES[:-1]


def print_report(console: Console, comparison: Comparison, origin: Mapping[str, str]) -> None:
    """Where the figures come from, then agreement, totals, lengths and pools."""
    print_provenance(console, origin)
    console.print(_agreement(comparison), highlight=False)
    for table in (_summary(comparison), _lengths(comparison), _pools(comparison)):
        console.print(table)
        console.print()


def write_report(folder: Path, comparison: Comparison, origin: Mapping[str, str]) -> list[Path]:
    """requests.csv, pools.csv and report.txt; returns their paths."""
    paths = [folder / name for name in ("requests.csv", "pools.csv", "report.txt")]
    write_csv(paths[0], origin, _request_rows(comparison))
    write_csv(paths[1], origin, _pool_rows(comparison))
    with paths[2].open("w", encoding="utf-8") as file:
        print_report(Console(file=file, width=TEXT_COLUMNS), comparison, origin)
    return paths


def _agreement(comparison: Comparison) -> str:
    agreements = [pair.agreement for pair in comparison.pairs]
    exact = sum(agreement.exact for agreement in agreements)
    agreed = sum(agreement.num_agreed for agreement in agreements)
    total = sum(agreement.num_tokens for agreement in agreements)
    firsts = [a.first_difference for a in agreements if a.first_difference is not None]
    where = f"; the earliest difference is at token {min(firsts)}" if firsts else ""
    return (
        f"\n{exact} of {len(agreements)} answers are the same; {agreed:,} of {total:,} tokens come "
        f"before a first difference{where}\n"
    )


def _summary(comparison: Comparison) -> Table:
    table = _table("All prompts")
    table.add_column("a request")
    for name in comparison.names:
        _add_figures(table, (f"{name}: median", "p90"))
    _add_figures(table, ("B / A, medians",))
    for label, value in FIGURES:
        sides = [[value(m) for m in side] for side in _sides(comparison.pairs)]
        cells = [_shown(figure) for side in sides for figure in (np.median(side), _p90(side))]
        table.add_row(label, *cells, _ratio(sides))
    return table


def _lengths(comparison: Comparison) -> Table:
    table = _table("By length of the prompt, medians")
    _add_figures(table, ("tokens up to", "same answers"))
    table.add_column("deployment", no_wrap=True)
    _add_figures(table, (label for label, _ in LENGTH_FIGURES))
    for most, pairs in comparison.by_length():
        exact = sum(pair.agreement.exact for pair in pairs)
        heads = [[f"{most:,}", f"{exact} of {len(pairs)}"], ["", ""]]
        for head, name, side in zip(heads, comparison.names, _sides(pairs), strict=True):
            medians = [np.median([value(m) for m in side]) for _, value in LENGTH_FIGURES]
            table.add_row(*head, name, *map(_shown, medians))
        table.add_section()
    return table


def _pools(comparison: Comparison) -> Table:
    longest = max(comparison.pairs, key=lambda pair: pair.a.num_prompt_tokens)
    table = _table(f"Pools, for a prompt of {longest.a.num_prompt_tokens:,} tokens")
    table.add_column("deployment", no_wrap=True)
    table.add_column("pool", no_wrap=True)
    _add_figures(table, ("pages", "cache, bytes", "transfer, bytes", "descriptors"))
    for name, measure in zip(comparison.names, (longest.a, longest.b), strict=True):
        for pool in measure.pools:
            figures = (pool.cache_pages, pool.cache_bytes, pool.transfer_bytes)
            cells = [f"{figure:,}" for figure in (*figures, pool.transfer_descriptors)]
            table.add_row(name, pool.pool, *cells)
        table.add_section()
    return table


def _table(title: str) -> Table:
    """A table without frames, narrow enough for a terminal of 80 columns."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )


def _add_figures(table: Table, headings: Iterable[str]) -> None:
    """Columns of numbers, none too narrow for a word of its heading."""
    for heading in headings:
        longest = max(map(len, heading.split()))
        table.add_column(heading, justify="right", min_width=longest)


def _request_rows(comparison: Comparison) -> Iterable[dict[str, Any]]:
    for number, name, measure, pair in _measures(comparison):
        yield {
            "deployment": name,
            "request": number,
            "num_prompt_tokens": measure.num_prompt_tokens,
            "num_output_tokens": measure.num_output_tokens,
            "same_answer": int(pair.agreement.exact),
            "first_differing_token": pair.agreement.first_difference,
            "ttft_s": f"{measure.ttft_s:.6f}",
            "tpot_s": f"{measure.tpot_s:.6f}",
            "cache_bytes": measure.cache_bytes,
            "transfer_bytes": measure.transfer_bytes,
            "transfer_descriptors": measure.transfer_descriptors,
        }


def _pool_rows(comparison: Comparison) -> Iterable[dict[str, Any]]:
    for number, name, measure, _ in _measures(comparison):
        for pool in measure.pools:
            yield {
                "deployment": name,
                "request": number,
                "num_prompt_tokens": measure.num_prompt_tokens,
                "pool": pool.pool,
                "cache_pages": pool.cache_pages,
                "cache_bytes": pool.cache_bytes,
                "transfer_bytes": pool.transfer_bytes,
                "transfer_descriptors": pool.transfer_descriptors,
            }


def _measures(comparison: Comparison) -> Iterable[tuple[int, str, Measure, Pair]]:
    for index, name in enumerate(comparison.names):
        for number, pair in enumerate(comparison.pairs):
            yield number, name, (pair.a, pair.b)[index], pair


def _sides(pairs: Iterable[Pair]) -> tuple[list[Measure], list[Measure]]:
    listed = list(pairs)
    return [pair.a for pair in listed], [pair.b for pair in listed]


def _p90(values: list[float]) -> float:
    return float(np.percentile(values, 90))


def _ratio(sides: list[list[float]]) -> str:
    a, b = (float(np.median(side)) for side in sides)
    return f"{b / a:.2f}" if a else "-"


def _shown(value: Any) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.1f}"
