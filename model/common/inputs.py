"""ForwardInputs: what one forward pass computes, as flat tensors over a ragged batch.

The batch mixes chunks of prompts and single decode tokens; request r owns the tokens
[query_start[r], query_start[r+1]), which are its absolute positions
[num_computed[r], num_computed[r] + that many).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from sluice.cache.spec import PoolSpec, TableSpec
from sluice.kernels.rows import page_slots


@dataclass(frozen=True)
class ForwardInputs:
    """One ragged batch. T tokens, R requests; all integer tensors are int64.

    token_ids, positions, request_index: [T]; positions are absolute token numbers.
    query_start: [R + 1]; num_computed: [R], tokens whose rows are in the pools already.
    num_history: [R], tokens whose rows in Full pools are there and must not be written: more than
        `num_computed` where a request's last tokens are computed again for window and state.
    page_tables: for each table, [R, max_pages], the physical pages of each request's logical pages
        from `first_pages` on; 0, the null page, beyond the last.
    first_pages: [R], for tables whose pages expire; the others' begin with logical page 0.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    request_index: torch.Tensor
    query_start: torch.Tensor
    num_computed: torch.Tensor
    num_history: torch.Tensor
    page_tables: Mapping[TableSpec, torch.Tensor]
    first_pages: Mapping[TableSpec, torch.Tensor] = field(default_factory=dict)

    @property
    def num_requests(self) -> int:
        return self.num_computed.shape[0]

    def slots(
        self,
        spec: PoolSpec,
        request_index: torch.Tensor,
        tokens: torch.Tensor,
        valid: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Slots of the rows holding `tokens` (absolute) of the given requests, -1 if not `valid`.

        tokens: [n] or [n, k]; the others are broadcast to it.
        """
        return page_slots(
            tokens,
            request_index,
            valid,
            self.page_tables[spec.table],
            self.first_pages.get(spec.table),
            tokens_per_page=spec.tokens_per_page,
            tokens_per_row=spec.tokens_per_row,
        )


class PoolView(Protocol):
    """What a forward pass needs of a cache pool."""

    @property
    def spec(self) -> PoolSpec: ...

    def layer(self, layer: int) -> torch.Tensor:
        """View [num_pages, rows_per_page, *row_shape] of one of the model's layers.

        Where the spec has a packed format, rows are [row_bytes] uint8.
        """
        ...
