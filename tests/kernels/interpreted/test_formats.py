"""The packing kernels write the same bytes as the reference, and read the same values."""

import pytest
import torch
from row_formats import FORMATS, awkward_rows

from sluice.kernels import formats


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_packed_bytes_are_the_references(form):
    with torch.device("cpu"):
        x = awkward_rows(form)
    x = x.to(torch.get_default_device())
    assert torch.equal(formats.pack(x, form), formats.pack_reference(x, form))


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unpacked_values_are_the_references(form, dtype):
    packed = formats.pack_reference(torch.randn(5, 3, form.dim) * 50, form)
    packed[0, 1] = 255  # NaN in every part
    expected = formats.unpack_reference(packed, form, dtype)
    found = formats.unpack(packed, form, dtype)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("slots", [[], [5, -1, 12, 19]])
def test_rows_are_packed_into_their_slots_alone(slots):
    form = FORMATS[0]
    pool = torch.full((5, 3, 4, form.row_bytes), 255, dtype=torch.uint8)
    expected, slots = pool.clone(), torch.tensor(slots, dtype=torch.int64)
    values = torch.randn(len(slots), form.dim)
    formats.write_packed(pool[:, 1], slots, values, form)
    real = slots >= 0
    index = slots[real]
    expected[index // 4, 1, index % 4] = formats.pack_reference(values[real], form)
    assert torch.equal(pool, expected)
    found = formats.gather_packed(pool[:, 1], slots, form, torch.float32)
    assert torch.equal(found[real], formats.simulate(values[real], form))
    assert not found[~real].any()
