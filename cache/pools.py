"""Pools: the tensors that specs describe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from sluice.cache.spec import PoolSpec, TableSpec

NULL_PAGE = 0  # never granted; page tables point here where a request holds no page


class Pool:
    """One cache pool: `tensor` [num_pages, num_layers, rows_per_page, *row_shape], page-first.

    Where the spec has a packed format, the tensor is uint8 and a row `row_bytes` of it.

    One page of all layers is contiguous, so that a transfer or an offload moves it as one run of
    bytes. Page 0 is the null page; its content means nothing.
    """

    def __init__(self, spec: PoolSpec, tensor: torch.Tensor) -> None:
        assert tensor.shape[1:] == spec.page_shape, "a pool's tensor must have its spec's shape"
        assert tensor.is_contiguous(), "pages are addressed by byte offset"
        self.spec = spec
        self.tensor = tensor
        self._index = {layer: index for index, layer in enumerate(spec.layers)}

    def layer(self, layer: int) -> torch.Tensor:
        """View [num_pages, rows_per_page, *row_shape] of one of the model's layers."""
        return self.tensor[:, self._index[layer]]

    def copy_page(self, source: int, target: int) -> None:
        """Copy the content of one page to another."""
        self.tensor[target] = self.tensor[source]

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


def allocate_pools(
    specs: Sequence[PoolSpec], num_pages: Mapping[TableSpec, int]
) -> dict[str, Pool]:
    """Zeroed pools with `num_pages[spec.table]` usable pages each, and the null page."""
    return {
        spec.name: Pool(spec, _allocate((num_pages[spec.table] + 1, *spec.page_shape), spec))
        for spec in specs
    }


def _allocate(shape: tuple[int, ...], spec: PoolSpec) -> torch.Tensor:
    device = "cpu" if spec.device == "host" else spec.device
    return torch.zeros(
        shape,
        dtype=getattr(torch, spec.number_dtype),
        device=device,
        pin_memory=spec.device == "host",
    )
