"""How many pages each table gets from a node's memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sluice.cache.spec import PoolSpec, TableSpec, ceil_div, tables_of


def plan_pages(
    specs: Sequence[PoolSpec],
    *,
    cache_bytes: int,
    max_requests: int,
    max_step_tokens: int,
    max_model_len: int,
    keep_prefixes: bool = False,
    resume_share: float = 0.0,
) -> dict[TableSpec, int]:
    """Usable pages of each table, so that all pools together fit into `cache_bytes`.

    Tables with bounded retention get what `max_requests` requests can ever hold while a step
    computes `max_step_tokens` tokens, so an admitted request never finds them empty. The rest goes
    to the Full tables, with the same capacity in tokens for each, but for a `resume_share` of it:
    that gives the bounded tables room for resume points of cached prefixes. Unless prefixes are
    kept, no more is taken than `max_requests` of the longest requests fill.

    Raises ValueError if the memory does not hold even one page of each Full table.
    """
    page_bytes = dict.fromkeys(tables_of(specs), 0)
    for spec in specs:
        page_bytes[spec.table] += spec.page_bytes
    pages: dict[TableSpec, int] = {}
    for table in page_bytes:
        if not table.keeps_all:
            per_request = table.max_pages(1, max_model_len) + 1
            pages[table] = max_requests * per_request + max_step_tokens // table.tokens_per_page
    bounded_bytes = sum((count + 1) * page_bytes[table] for table, count in pages.items())
    resume_bytes = sum(table.max_pages(1, max_model_len) * page_bytes[table] for table in pages)

    full = [table for table in page_bytes if table not in pages]
    null_bytes = sum(page_bytes[table] for table in full)
    left_bytes = cache_bytes - bounded_bytes - null_bytes
    if resume_bytes and left_bytes > 0:
        num_resumes = int(left_bytes * resume_share / resume_bytes)
        left_bytes -= num_resumes * resume_bytes
        for table in pages:
            pages[table] += num_resumes * table.max_pages(1, max_model_len)
    unit = math.lcm(*(table.tokens_per_page for table in full))  # tokens: whole pages of all
    unit_bytes = sum(page_bytes[table] * (unit // table.tokens_per_page) for table in full)
    max_tokens = left_bytes * unit // unit_bytes if full else 0
    for table in full:
        pages[table] = max_tokens // table.tokens_per_page
        if not keep_prefixes:
            pages[table] = min(pages[table], max_requests * table.max_pages(1, max_model_len))
        if pages[table] < 1:
            longest = max(table.tokens_per_page for table in full)
            needed = bounded_bytes + null_bytes + ceil_div(longest * unit_bytes, unit)
            raise ValueError(
                f"cache_bytes is {cache_bytes}, expected at least {needed} for "
                f"{max_requests} requests of {max_step_tokens} tokens a step; "
                "raise cache_bytes or lower max_running_requests or max_batch_tokens"
            )
    return {table: pages[table] for table in page_bytes}
