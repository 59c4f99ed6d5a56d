"""write_rows and gather_rows on one layer's strided view of a pool."""

import pytest
import torch

from sluice.kernels.rows import gather_rows, write_rows


@pytest.fixture
def pool():
    """[pages, layers, rows_per_page, 2, 3], NaN in the null page."""
    tensor = torch.randn(7, 3, 5, 2, 3)
    tensor[0] = torch.nan
    return tensor


def test_rows_written_at_slots_are_gathered_from_them(pool):
    before = pool.clone()
    slots = torch.tensor([7, -1, 34, 13])
    values = torch.randn(4, 2, 3)
    write_rows(pool[:, 1], slots, values)
    gathered = gather_rows(pool[:, 1], slots)
    for i, slot in enumerate(slots.tolist()):
        assert torch.equal(gathered[i], torch.zeros(2, 3) if slot < 0 else values[i])
        if slot >= 0:
            before[slot // 5, 1, slot % 5] = values[i]
    assert torch.equal(pool[1:], before[1:]), "only the slots, of one layer, may change"


def test_gather_takes_slots_of_any_shape(pool):
    slots = torch.tensor([[6, -1], [33, 5], [-1, -1]])
    gathered = gather_rows(pool[:, 2], slots)
    assert gathered.shape == (3, 2, 2, 3)
    assert torch.equal(gathered[1, 0], pool[33 // 5, 2, 33 % 5])
    assert (gathered[slots < 0] == 0).all(), "NaN of the null page must not come through"


def test_a_part_of_each_row_is_written_and_gathered_alone():
    pool = torch.randn(7, 3, 5, 11)
    before, part = pool.clone(), pool[:, 1, :, 4:10].unflatten(-1, (2, 3))
    slots, values = torch.tensor([7, 34]), torch.randn(2, 2, 3)
    write_rows(part, slots, values)
    assert torch.equal(gather_rows(part, slots), values)
    before[slots // 5, 1, slots % 5, 4:10] = values.flatten(1)
    assert torch.equal(pool, before), "only the part, of one layer, may change"


@pytest.mark.parametrize("num_rows", [0, 1])
def test_empty_slots_are_fine(pool, num_rows):
    slots = torch.zeros(4, 0, dtype=torch.int64)
    assert gather_rows(pool[:, 0], slots).shape == (4, 0, 2, 3)
    write_rows(pool[:, 0], torch.full((num_rows,), -1), torch.zeros(num_rows, 2, 3))


def test_rows_take_the_pools_dtype():
    pool = torch.zeros(3, 1, 4, 6, dtype=torch.bfloat16)
    values = torch.randn(1, 6)
    write_rows(pool[:, 0], torch.tensor([9]), values)
    assert torch.equal(pool[2, 0, 1], values[0].bfloat16())
