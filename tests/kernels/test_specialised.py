"""Kernels compile where numbers are 1: Triton then makes them constants, on a device only."""

import dataclasses

import pytest

from sluice.kernels.aot import all_cases, compile_case
from sluice.kernels.launch import INTERPRETED

KERNELS = {case.kernel: case for case in all_cases()}.values()


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("case", KERNELS, ids=lambda case: case.name)
def test_a_kernel_compiles_where_every_integer_is_one(case):
    """One token, one request, one row a page: what few tests of larger shapes reach."""
    ones = {name for name, kind in case.signature.items() if kind.split(":")[0] in ("i32", "i64")}
    case = dataclasses.replace(
        case,
        signature={name: kind for name, kind in case.signature.items() if name not in ones},
        constants={**case.constants, **dict.fromkeys(ones, 1)},
    )
    assert compile_case(case, 90).cubin_bytes
