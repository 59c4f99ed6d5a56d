"""Ahead-of-time compilation: what a kernel needs of a device that is not at hand.

A kernel's file lists the shapes to compile it for beside the kernel:

    AOT = (
        Case(_kernel, "decode", {"rows": "*bf16:16", "n": "i32"}, {"BLOCK": 64}, num_warps=8),
    )

and `compile_case(case, arch)` takes it down to machine code. Tests compile each kernel's first
case.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import sluice.kernels

ARCHES = (90, 100)  # Hopper, Blackwell
WARP_THREADS = 32


@dataclass(frozen=True)
class Case:
    """One compilation of a kernel.

    kernel: the function under `@triton.jit`.
    label: what the case stands for, such as "V4-Flash decode".
    signature: Triton's type of each runtime argument; ":16" says that the pointer or number is
        divisible by 16, as Triton finds at a launch. Arguments in neither mapping are None.
    constants: value of each `tl.constexpr`.
    may_spill: false where registers in memory would cost latency in every step of decode.
    """

    kernel: Any
    label: str
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    may_spill: bool = False

    @property
    def name(self) -> str:
        return f"{self.kernel.__name__.lstrip('_')}[{self.label}]"


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes: registers of a thread, bytes of its stack, shared bytes.

    Triton's kernels keep nothing on the stack but registers that were spilled.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    cubin_bytes: int


def all_cases() -> Iterator[Case]:
    """The cases of every file of this folder, in the order of names."""
    for module in sorted(pkgutil.iter_modules(sluice.kernels.__path__), key=lambda m: m.name):
        yield from getattr(importlib.import_module(f"sluice.kernels.{module.name}"), "AOT", ())


def compile_case(case: Case, arch: int) -> Resources:
    """Compile for compute capability `arch` (90 = 9.0). Raises what Triton or ptxas raise."""
    compiled = triton.compile(
        _source(case),
        target=GPUTarget("cuda", arch, WARP_THREADS),
        options={
            "num_warps": case.num_warps,
            "num_stages": case.num_stages,
            "enable_fp_fusion": True,
        },
    )
    cubin = compiled.asm["cubin"]
    registers, stack_bytes = _usage(cubin)
    return Resources(registers, stack_bytes, compiled.metadata.shared, len(cubin))


def _source(case: Case) -> ASTSource:
    names = case.kernel.arg_names
    unknown = {*case.signature, *case.constants} - set(names)
    assert not unknown, f"{case.name}: the kernel has no arguments {sorted(unknown)}"
    typed = {name: case.signature.get(name, "constexpr").split(":") for name in names}
    constants = {name: case.constants.get(name) for name in names if name not in case.signature}
    hints = {
        (place,): [["tt.divisibility", 16]]
        for place, kind in enumerate(typed.values())
        if kind[1:] == ["16"]
    }
    signature = {name: kind[0] for name, kind in typed.items()}
    return ASTSource(case.kernel, signature, constants, hints)


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread, by the cuobjdump that Triton brings."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found, f"cuobjdump names no registers: {said}"
    return int(found[1]), int(found[2])
