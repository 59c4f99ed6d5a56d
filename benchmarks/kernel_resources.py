"""What every Triton kernel takes of a device: registers, spills and shared memory, without one.

Each kernel is compiled for Hopper and Blackwell at the shapes listed beside it.
`python -m sluice.benchmarks.kernel_resources` prints the table and writes
benchmarks/results/kernel_resources.csv.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass

import triton
from rich.console import Console
from rich.table import Table

from sluice.benchmarks.provenance import RESULTS, print_provenance, provenance, write_csv
from sluice.kernels.aot import ARCHES, all_cases, compile_case

CSV = RESULTS / "kernel_resources.csv"


@dataclass(frozen=True)
class Measured:
    """One compilation, as a line of the CSV."""

    triton: str
    kernel: str
    target: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    may_spill: bool


def measure() -> list[Measured]:
    """Every case for every target."""
    measured = []
    for case in all_cases():
        for arch in ARCHES:
            used = compile_case(case, arch)
            measured.append(
                Measured(
                    triton=triton.__version__,
                    kernel=case.name,
                    target=f"sm_{arch}",
                    registers=used.registers,
                    spill_bytes=used.spill_bytes,
                    shared_bytes=used.shared_bytes,
                    may_spill=case.may_spill,
                )
            )
    return measured


def _table(measured: list[Measured]) -> Table:
    table = Table(title="Kernels: registers of a thread, bytes", title_justify="left")
    table.add_column("kernel")
    for head in ("target", "registers", "spilled", "shared"):
        table.add_column(head, justify="right")
    for line in measured:
        cells = (line.registers, line.spill_bytes, line.shared_bytes)
        table.add_row(line.kernel.replace("[", r"\["), line.target, *(f"{n:,}" for n in cells))
    return table


def main() -> int:
    """Print the table and write the CSV; 1 if a kernel spills that must not."""
    console = Console()
    origin = provenance("python -m sluice.benchmarks.kernel_resources")
    print_provenance(console, origin)
    measured = measure()
    console.print(_table(measured))
    write_csv(CSV, origin, map(asdict, measured))
    console.print(f"written: {CSV}")
    spilling = [line for line in measured if line.spill_bytes and not line.may_spill]
    for line in spilling:
        console.print(f"{line.kernel} for {line.target} spills {line.spill_bytes} bytes")
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main())
