"""Checks every Triton kernel on one GPU: right against fp64, and how near to the device's floor.

`python benchmarks/gpu_check.py` runs from a bare checkout, where only torch, triton and numpy are
installed; `make gpu-check` is the same. It takes a few minutes on a Hopper GPU, prints a table and
writes benchmarks/results/gpu_check.csv. With `--interpret` it runs the checks, at small sizes and
without times, in Triton's interpreter on a CPU.

A kernel's floor is the time to move the bytes that it must read and write, at the copy bandwidth
measured here, or to do its flops at the matmul rate measured here, whichever is longer.
Exit codes: 0 all is right, 1 something is not, 2 there is no GPU.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sluice.benchmarks.gpu_measure import Device
    from sluice.benchmarks.gpu_work import Work

ROOT = Path(__file__).resolve().parents[1]
HEADS = ("kernel", "work", "error", "right", "time_us", "floor_us", "share", "failure")
CELLS = ("{:<21}", "{:<23}", "{:>9.1e}", "{:>6}", "{:>9.1f}", "{:>9.1f}", "{:>6.0%}", "{}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Every kernel: right, and near its floor?")
    parser.add_argument("--interpret", action="store_true", help="on a CPU, small and untimed")
    interpret = parser.parse_args().interpret
    if interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # triton looks when it is imported
    _make_importable()
    import torch

    if not interpret and not torch.cuda.is_available():
        print(
            f"no GPU: torch {torch.__version__} finds no CUDA device. Run this on a machine with "
            "one and a CUDA build of torch, or add --interpret for the checks on a CPU."
        )
        return 2
    torch.manual_seed(0)
    with torch.inference_mode(), torch.device("cpu" if interpret else "cuda"):
        return _run(interpret)


def _make_importable() -> None:
    """`import sluice.x` without an installation: the package is this checkout."""
    package = types.ModuleType("sluice")
    package.__path__ = [str(ROOT)]
    sys.modules["sluice"] = package


def _run(interpret: bool) -> int:
    import torch

    from sluice.benchmarks.gpu_measure import measure_device
    from sluice.benchmarks.provenance import RESULTS, provenance, write_csv

    begin = time.monotonic()
    origin = provenance(" ".join(["python", "benchmarks/gpu_check.py", *sys.argv[1:]]))
    device = None if interpret else measure_device()
    if device is not None:
        rates = ", ".join(f"{kind} {rate / 1e12:.0f}" for kind, rate in device.flops_per_s.items())
        origin["machine"] = torch.cuda.get_device_name()
        origin["measured"] = f"copy {device.copy_bytes_per_s / 1e12:.2f} TB/s; {rates} TFLOP/s"
    print(_line(dict(zip(HEADS, HEADS, strict=True))))
    lines = []
    for work in _all_work(interpret):
        lines.append(_examine(work, device))
        print(_line(lines[-1]), flush=True)
    origin["took"] = f"{time.monotonic() - begin:.0f} s"
    print("\n".join(f"{key}: {value}" for key, value in origin.items()))
    if device is not None:
        write_csv(RESULTS / "gpu_check.csv", origin, lines)
    return 0 if all(line["right"] == "yes" for line in lines) else 1


def _all_work(interpret: bool) -> Iterator[Work]:
    from sluice.benchmarks.gpu_attention_work import attention_work
    from sluice.benchmarks.gpu_layer_work import layer_work
    from sluice.benchmarks.gpu_work import FLASH, SMALL

    shape = SMALL if interpret else FLASH
    return itertools.chain(attention_work(shape), layer_work(shape))


def _examine(work: Work, device: Device | None) -> dict[str, Any]:
    """One line of the table; without a device, untimed."""
    from sluice.benchmarks.gpu_measure import check, time_s

    line: dict[str, Any] = dict.fromkeys(HEADS, "")
    line |= {"kernel": work.kernel, "work": work.label, "right": "NO"}
    try:
        checked = check(work)
        line |= {"error": checked.error, "right": "yes" if checked.correct else "NO"}
        if device is not None:
            taken_s, floor_s = time_s(work), device.floor_s(work)
            line |= {"time_us": taken_s * 1e6, "floor_us": floor_s * 1e6}
            line["share"] = floor_s / taken_s
    except Exception as error:  # noqa: BLE001 - the other kernels are still to be checked
        line |= {"right": "NO", "failure": f"{type(error).__name__}: {error}"}
    return line


def _line(cells: dict[str, Any]) -> str:
    """Numbers as the columns have them; words and gaps as wide."""
    shown = []
    for form, cell in zip(CELLS, cells.values(), strict=True):
        numeric = isinstance(cell, float)
        width = form.strip("{:}").split(".")[0]
        shown.append(form.format(cell) if numeric else f"{{:{width}}}".format(cell))
    return " ".join(shown).rstrip()


if __name__ == "__main__":
    sys.exit(main())
