"""Packed rows against a slow search over the values that the codes can take, in float64."""

import math

import numpy as np
import pytest
import torch
from row_formats import FORMATS, FP4_INDEX, FP8_INDEX, FP8_V4, MAGNITUDES, awkward_rows

from sluice.kernels.formats import gather_packed, pack, simulate, unpack, write_packed

SMALLEST_AMAX = {"e4m3": 1e-4, "e2m1": 6 * 2.0**-126}


def nearest(value, magnitudes):
    """The nearest magnitude's code; of two equally near the even code."""
    distance = np.abs(magnitudes - abs(value))
    best = np.flatnonzero(distance == distance.min())
    return int(best[best % 2 == 0][0]) if len(best) == 2 else int(best[0])


def simulated(row, form):
    """One row, [dim] fp32, quantised and dequantised value by value."""
    magnitudes, result = MAGNITUDES[form.code], np.empty(form.dim)
    for first in range(0, form.num_coded, form.tile):
        tile = row[first : min(first + form.tile, form.num_coded)].astype(np.float64)
        if np.isnan(tile).any():
            result[first : first + len(tile)] = np.nan
            continue
        largest = max(np.abs(tile).max(), SMALLEST_AMAX[form.code])
        largest = min(largest, float(np.finfo(np.float32).max))
        scale = 2.0 ** math.ceil(math.log2(largest / magnitudes[-1]))
        for i, value in enumerate(tile, first):
            magnitude = magnitudes[nearest(min(abs(value / scale), magnitudes[-1]), magnitudes)]
            result[i] = math.copysign(magnitude * scale, value)
    result[form.num_coded :] = torch.tensor(row[form.num_coded :]).bfloat16().double().numpy()
    with np.errstate(over="ignore"):
        return result.astype(np.float32)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_a_packed_row_gives_back_exactly_what_the_definition_says(form):
    rows = awkward_rows(form)
    expected = np.stack([simulated(row, form) for row in rows.numpy()])
    found = simulate(rows, form)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.signbit()[:8], rows.signbit()[:8]), "-0 stays -0"


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_what_came_back_once_comes_back_unchanged(form):
    once = simulate(torch.randn(50, form.dim) * 30, form)
    assert torch.equal(simulate(once, form), once)


@pytest.mark.parametrize("form", [FP8_V4, FP8_INDEX, FP4_INDEX], ids=str)
def test_parts_lie_where_the_published_layouts_have_them(form):
    x = torch.zeros(form.dim)
    x[0], x[1] = 1.0, -2.0
    x[-1] = 3.0
    row = pack(x, form).tolist()
    if form is FP8_V4:
        assert (len(row), row[:2], row[448 + 126 : 576]) == (584, [0x70, 0xF8], [0x40, 0x40])
        assert row[576:] == [127 - 7, *[127 - 22] * 6, 0], "2^-7, and 2^-22 where all is zero"
    elif form is FP8_INDEX:
        assert (len(row), row[:2], row[127]) == (132, [0x70, 0xF8], 0x7C)
        assert torch.tensor(row[128:], dtype=torch.uint8).view(torch.float32) == 2.0**-7
    else:
        assert (len(row), row[0], row[63]) == (68, 0xE4, 0x70), "even channels are low"
        assert row[64:] == [127 - 1, 1, 1, 127 - 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_go_to_their_slots_and_come_back(dtype):
    pool = torch.full((5, 3, 4, FP8_V4.row_bytes), 255, dtype=torch.uint8)
    values, slots = torch.randn(3, 512, dtype=dtype), torch.tensor([6, -1, 19])
    write_packed(pool[:, 1], slots, values, FP8_V4)
    found = gather_packed(pool[:, 1], slots, FP8_V4, dtype)
    expected = simulate(values, FP8_V4)
    expected[1] = 0
    assert torch.equal(found, expected)
    assert (pool[:, [0, 2]] == 255).all(), "other layers stay"
    assert gather_packed(pool[:, 0], torch.tensor([5]), FP8_V4, dtype).isnan().all()


def test_no_rows_are_fine():
    assert pack(torch.zeros(0, 512), FP8_V4).shape == (0, 584)
    assert unpack(torch.zeros(3, 0, 68, dtype=torch.uint8), FP4_INDEX, torch.float32).shape[1] == 0
