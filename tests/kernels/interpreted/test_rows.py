"""The copying kernel: writes, gathers and re-packs rows as the references do, and nothing else."""

import pytest
import torch

from sluice.kernels import rows


def pool(num_pages, rows_per_page, *row_shape, dtype=torch.float32):
    """[num_pages, 3 layers, rows_per_page, *row_shape], NaN in the null page."""
    tensor = torch.randn(num_pages, 3, rows_per_page, *row_shape)
    tensor[0] = torch.nan
    return tensor.to(dtype)


@pytest.mark.parametrize("row_shape", [(2, 3), (1500,)])
@pytest.mark.parametrize("slots", [[], [5, -1, 34, 13]])
def test_writes_change_the_slots_and_nothing_else(row_shape, slots):
    expected = pool(7, 5, *row_shape)
    actual = expected.clone()
    slots = torch.tensor(slots, dtype=torch.int64)
    values = torch.randn(len(slots), *row_shape)
    rows.write_rows(actual[:, 1], slots, values)
    real = slots >= 0
    rows.write_rows_reference(expected[:, 1], slots[real], values[real])
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("slots", [[], [5, -1, 34], [[5, 6, 7], [-1, -1, 34]]])
def test_gathered_rows_equal_the_references(dtype, slots):
    part = pool(7, 5, 9, dtype=dtype)[:, 2, :, 2:8].unflatten(-1, (2, 3))
    slots = torch.tensor(slots, dtype=torch.int64)
    actual = rows.gather_rows(part, slots)
    assert torch.equal(actual, rows.gather_rows_reference(part, slots))


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.bfloat16, 2**-7), (torch.float16, 0)])
def test_rows_change_layout_and_dtype(dtype, rtol):
    """The interpreter cuts bf16 off where a device rounds it."""
    source, expected = pool(7, 5, 33), pool(10, 3, 33, dtype=dtype)
    actual = expected.clone()
    source_slots = torch.tensor([34, 5, -1, 6, 11])
    target_slots = torch.tensor([29, 3, 4, -1, 13])
    rows.write_rows(actual[:, 1], target_slots, rows.gather_rows(source[:, 0], source_slots))
    written = target_slots >= 0
    came = rows.gather_rows_reference(source[:, 0], source_slots[written])
    rows.write_rows_reference(expected[:, 1], target_slots[written], came)
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=0, equal_nan=True)
