"""A driver that runs a model over pools page by page, and transformers as the oracle."""

import dataclasses
import random
import sys
from pathlib import Path

import pytest
import torch

from sluice.cache.pools import NULL_PAGE, allocate_pools
from sluice.cache.spec import tables_of
from sluice.model.common.inputs import ForwardInputs
from sluice.model.make_checkpoint import make_checkpoint
from sluice.model.registry import load_model

sys.path.insert(0, str(Path(__file__).parent))  # for released.py
MAX_TOKENS = 3000  # of all requests together: no test has more, and large pools take time to fill


class Driver:
    """Holds exactly the pages that specs prescribe, at random places.

    All memory that a request does not hold, the null page included, is NaN before every step: a
    read of anything stale shows.
    """

    def __init__(self, model, *, specs=None, num_pages=200, seed=0):
        self.model = model
        self.specs = specs or model.specs
        self.tables = tables_of(self.specs)
        enough = {table: 8 + MAX_TOKENS // table.tokens_per_page for table in self.tables}
        pages = {table: min(num_pages, enough[table]) for table in self.tables}
        self.pools = allocate_pools(self.specs, pages)
        self.random = random.Random(seed)
        self.free = {table: list(range(1, pages[table] + 1)) for table in self.tables}
        self.held = {}  # request -> table -> {logical page: physical page}
        self.num_computed = {}
        self.num_history = {}
        for table in self.tables:
            self.random.shuffle(self.free[table])
            self._poison(table, [NULL_PAGE, *self.free[table]])

    def step(self, chunks, *, all_logits=True):
        """Compute {request: token ids}; returns {request: logits of its tokens}."""
        starts = {request: self.num_computed.get(request, 0) for request in chunks}
        for request, ids in chunks.items():
            self._hold(request, starts[request], starts[request] + len(ids))
        logits = self.model.forward(self._inputs(chunks, starts), self.pools, all_logits=all_logits)
        for request, ids in chunks.items():
            self.num_computed[request] = end = starts[request] + len(ids)
            self._hold(request, end, end)
        for table in self.tables:
            self._poison(table, [NULL_PAGE])
        lengths = [len(ids) if all_logits else 1 for ids in chunks.values()]
        return dict(zip(chunks, logits.split(lengths), strict=True))

    def run(self, request, ids, chunk_sizes):
        """Compute ids in chunks of the given sizes; returns logits of all tokens."""
        parts = torch.tensor(ids).split(list(chunk_sizes))
        return torch.cat([self.step({request: part.tolist()})[request] for part in parts])

    def share_history(self, request, source, history_tokens, num_tokens):
        """Begin after `num_tokens` with what Full pools hold of the source's history, no more."""
        self.num_computed[request], self.num_history[request] = num_tokens, history_tokens
        self._hold(request, num_tokens, num_tokens)
        for spec in self.specs:
            if spec.table.keeps_all:
                mine, theirs = self.held[request][spec.table], self.held[source][spec.table]
                for page in range(history_tokens // spec.tokens_per_page):
                    tensor = self.pools[spec.name].tensor
                    tensor[mine[page]] = tensor[theirs[page]]

    def release(self, request):
        for table, pages in self.held.pop(request).items():
            self._give_back(table, list(pages.values()))
        del self.num_computed[request]

    def _hold(self, request, start, end):
        tables = self.held.setdefault(request, {table: {} for table in self.tables})
        end = max(end, self.num_history.get(request, 0))
        for table, pages in tables.items():
            wanted = table.pages(start, end)
            self._give_back(table, [pages.pop(p) for p in list(pages) if p not in wanted])
            for page in wanted:
                if page not in pages:
                    pages[page] = self.free[table].pop()

    def _give_back(self, table, pages):
        self._poison(table, pages)
        self.free[table] += pages
        self.random.shuffle(self.free[table])

    def _poison(self, table, pages):
        for spec in self.specs:
            if spec.table == table and pages:
                # 255 is NaN as an FP8 code, as a scale and in bf16.
                self.pools[spec.name].tensor[pages] = torch.nan if spec.format is None else 255

    def _inputs(self, chunks, starts):
        lengths = torch.tensor([len(ids) for ids in chunks.values()])
        begin = torch.tensor([starts[request] for request in chunks])
        query_start = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        request_index = torch.arange(len(chunks)).repeat_interleave(lengths)
        offset = torch.arange(int(query_start[-1])) - query_start[request_index]
        return ForwardInputs(
            token_ids=torch.tensor([token for ids in chunks.values() for token in ids]),
            positions=begin[request_index] + offset,
            request_index=request_index,
            query_start=query_start,
            num_computed=begin,
            num_history=torch.tensor([self.num_history.get(request, 0) for request in chunks]),
            page_tables={table: self._page_table(table, chunks) for table in self.tables},
        )

    def _page_table(self, table, chunks):
        width = 1 + max(max(self.held[request][table], default=0) for request in chunks)
        matrix = torch.full((len(chunks), width), NULL_PAGE)
        for row, request in enumerate(chunks):
            for logical, physical in self.held[request][table].items():
                matrix[row, logical] = physical
        return matrix


@pytest.fixture
def driver():
    return Driver


@pytest.fixture(params=["hybrid", "native"])
def cache_path(request):
    return request.param


@pytest.fixture
def oracle(tmp_path, cache_path):
    """(config, seed) -> our model and transformers' full forward of the same checkpoint."""
    from transformers import DeepseekV4ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    def make(config, seed):
        make_checkpoint(tmp_path, config=config, seed=seed)
        reference = DeepseekV4ForCausalLM.from_pretrained(
            tmp_path, dtype=torch.float32, attn_implementation="eager"
        )

        @torch.no_grad()
        def full_forward(ids):
            return reference(input_ids=torch.tensor([ids]), use_cache=False).logits[0]

        return load_model(tmp_path, cache_path=cache_path), full_forward

    return make


@pytest.fixture
def relayout():
    """(specs, random) -> the same pools with other page spans, as a role may choose."""

    def change(specs, rng):
        full_factor = rng.choice([1, 2, 3])
        return tuple(
            dataclasses.replace(
                spec,
                tokens_per_page=spec.tokens_per_row
                * max(1, spec.rows_per_page * full_factor)
                * (rng.choice([1, 2]) if spec.retention.max_live_tokens is not None else 1),
            )
            for spec in specs
        )

    return change
