"""Every Triton kernel equals its reference in the interpreter, and compiles for its devices."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.kernels.aot import ARCHES, all_cases, compile_case
from sluice.kernels.launch import INTERPRETED

TESTS = [str(folder) for folder in Path(__file__).parents[1].glob("*/interpreted")]
CASES = {case.kernel: case for case in reversed(list(all_cases()))}  # each kernel's first


def test_every_kernel_equals_its_reference_in_the_interpreter():
    """In a process of its own, since triton reads the variable when it is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not gpu", *TESTS],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_a_kernel_compiles_to_machine_code(case, arch):
    used = compile_case(case, arch)
    assert used.cubin_bytes
    assert case.may_spill or used.spill_bytes == 0


def test_every_kernel_has_a_compile_case():
    """A kernel is what is launched: `_name[grid](...)`."""
    compiled = {kernel.__name__ for kernel in CASES}
    launched = {
        name
        for path in (Path(__file__).parents[2] / "kernels").glob("*.py")
        for name in re.findall(r"^ +(_\w+)\[.*\]\($", path.read_text(encoding="utf-8"), re.M)
    }
    assert launched and launched <= compiled
