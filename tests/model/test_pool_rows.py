"""Packed rows are read the same whether kernels unpack those listed, or each page is first."""

import pytest
import torch

from sluice.cache.pools import allocate_pools
from sluice.cache.row_format import RowFormat
from sluice.cache.spec import Full, PoolSpec
from sluice.kernels.formats import read_rows
from sluice.kernels.packed_rows import PackedRows
from sluice.model.common.inputs import ForwardInputs
from sluice.model.v4.pool_rows import matched, source, store

FP8 = RowFormat("fp8", 24, 8, tile=16, code="e4m3", scale="ue8m0")
FP4 = RowFormat("fp4", 32, 0, tile=32, code="e2m1", scale="ue8m0", rotated=True)
SPEC = PoolSpec("p", (0, 1), (32,), "float32", 1, 4, Full(), choices=(FP8, FP4))
NUM_TOKENS = 14
PAGES = torch.tensor([[7, 2, 9, 4]])  # of the only request


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def inputs_of(spec):
    token = torch.arange(NUM_TOKENS)
    return ForwardInputs(
        token_ids=token,
        positions=token,
        request_index=torch.zeros_like(token),
        query_start=torch.tensor([0, NUM_TOKENS]),
        num_computed=torch.tensor([0]),
        num_history=torch.tensor([0]),
        page_tables={spec.table: PAGES},
    )


def read(rows, slots):
    """What a kernel sees: [*slots.shape, dim]."""
    return read_rows(rows, slots, torch.float32)


@pytest.mark.parametrize("form", ["float32", "fp8", "fp4"])
def test_rows_listed_once_and_many_times_are_the_same(form):
    spec = SPEC.stored_as(form)
    [pool] = allocate_pools([spec], {spec.table: 12}).values()
    pool.tensor.fill_(255 if spec.format else torch.nan)
    inputs, values = inputs_of(spec), torch.randn(NUM_TOKENS, 32)
    slots = inputs.slots(spec, inputs.request_index, inputs.positions)
    store(pool, 1, slots, values)

    few = torch.stack([slots[:5], slots[5:10]])
    many = few.repeat(9, 1)
    few[0, 2] = many[3, 1] = -1
    assert few.numel() <= PAGES.numel() * spec.rows_per_page < many.numel()
    as_stored, unpacked = (source(pool, 1, slots, inputs, torch.float32) for slots in (few, many))
    assert isinstance(as_stored[0], PackedRows) == (spec.format is not None)
    assert isinstance(unpacked[0], torch.Tensor)
    sparse, whole = read(*as_stored), read(*unpacked)
    assert torch.equal(sparse[1], whole[1])
    assert not sparse[0, 2].any() and not whole[3, 1].any()
    written = values if spec.format is None else matched(values, pool)
    if spec.format is not FP8:  # which leaves queries as they are
        assert torch.equal(sparse[1], written[5:10])


def test_products_with_rotated_keys_are_the_same_but_for_rounding():
    spec = SPEC.stored_as("fp4")
    [pool] = allocate_pools([spec], {spec.table: 12}).values()
    inputs, keys, query = inputs_of(spec), torch.randn(NUM_TOKENS, 32), torch.randn(32)
    slots = inputs.slots(spec, inputs.request_index, inputs.positions)
    store(pool, 0, slots, keys)
    products = read(*source(pool, 0, slots[None], inputs, torch.float32))[0] @ matched(query, pool)
    # Rounding to FP4 costs about a tenth; with only one side rotated it would be more than all.
    assert (products - keys @ query).abs().mean() < 0.4 * (keys @ query).abs().mean()
    [plain] = allocate_pools([SPEC], {SPEC.table: 12}).values()
    assert matched(query, plain) is query
