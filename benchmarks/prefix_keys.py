"""What the keys of a prompt's prefixes cost: BLAKE2b, as they are made, beside xxh3 in its place.

    python -m sluice.benchmarks.prefix_keys

In turn, in one run: 131,072 random tokens in units of 16 to 256. Each router and each node makes a
prompt's keys once.
"""

from __future__ import annotations

import random
import statistics
import time
from array import array
from collections.abc import Callable, Sequence

import xxhash
from rich.console import Console
from rich.table import Table

from sluice.benchmarks.provenance import RESULTS, print_provenance, provenance, write_csv
from sluice.cache.keys import chained_keys, root_key

NUM_TOKENS = 131_072
UNITS_TOKENS = (16, 64, 128, 256)
REPEATS = 15


def with_xxh3(tokens: Sequence[int], unit_tokens: int) -> None:
    data, key = memoryview(array("q", tokens)), b"\0" * 16
    for end in range(unit_tokens, len(data) + 1, unit_tokens):
        hasher = xxhash.xxh3_128(key)
        hasher.update(data[end - unit_tokens : end])
        key = hasher.digest()


def with_blake2b(tokens: Sequence[int], unit_tokens: int) -> None:
    chained_keys(root_key("model", "salt"), tokens, unit_tokens)


def main() -> None:
    console, origin = Console(), provenance("python -m sluice.benchmarks.prefix_keys")
    print_provenance(console, origin)
    rng = random.Random(0)
    tokens = [rng.randrange(129_280) for _ in range(NUM_TOKENS)]
    rows = []
    for unit_tokens in UNITS_TOKENS:
        ways = {"blake2b": with_blake2b, "xxh3": with_xxh3}
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(REPEATS):
            for name, way in ways.items():
                taken[name].append(_milliseconds(way, tokens, unit_tokens))
        rows.append(
            {"num_tokens": NUM_TOKENS, "unit_tokens": unit_tokens, "repeats": REPEATS}
            | {f"{name}_ms": round(min(each), 2) for name, each in taken.items()}
            | {f"{name}_median_ms": round(statistics.median(e), 2) for name, e in taken.items()}
        )
    _show(console, rows)
    write_csv(RESULTS / "prefix_keys.csv", origin, rows)


def _milliseconds(
    way: Callable[[Sequence[int], int], None], tokens: Sequence[int], unit_tokens: int
) -> float:
    begun = time.perf_counter()
    way(tokens, unit_tokens)
    return 1e3 * (time.perf_counter() - begun)


def _show(console: Console, rows: Sequence[dict[str, float]]) -> None:
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    console.print(table)


if __name__ == "__main__":
    main()
