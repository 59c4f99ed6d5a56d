"""The memory that a role has is planned to the last page, and no byte beyond it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from simulated_pools import SPECS

from sluice.cache.budget import plan_pages
from sluice.cache.spec import tables_of

LIMITS = {"max_requests": 3, "max_step_tokens": 24, "max_model_len": 200}
SIZES = {table: sum(s.page_bytes for s in SPECS if s.table == table) for table in tables_of(SPECS)}


def taken(pages):
    """Bytes of the pools: a null page comes to each."""
    return sum((count + 1) * SIZES[table] for table, count in pages.items())


@pytest.mark.parametrize("resume_share", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("cache_bytes", [20_000, 30_000, 100_001])
def test_all_pools_together_fit_and_leave_no_room_for_more(cache_bytes, resume_share):
    options = {"keep_prefixes": True, "resume_share": resume_share}
    pages = plan_pages(SPECS, cache_bytes=cache_bytes, **LIMITS, **options)
    assert taken(pages) <= cache_bytes
    full = [table for table in pages if table.keeps_all]
    tokens = {table: pages[table] * table.tokens_per_page for table in full}
    assert max(tokens.values()) - min(tokens.values()) < max(t.tokens_per_page for t in full)
    resume_bytes = sum(
        table.max_pages(1, 200) * size for table, size in SIZES.items() if not table.keeps_all
    )
    assert cache_bytes - taken(pages) < sum(SIZES[t] for t in full) + resume_bytes


def test_tables_with_bounded_retention_have_what_requests_can_ever_hold():
    pages = plan_pages(SPECS, cache_bytes=30_000, **LIMITS)
    for table, count in pages.items():
        if not table.keeps_all:
            most = table.max_pages(1, 200) + 1
            assert count == 3 * most + 24 // table.tokens_per_page


def test_without_a_cache_no_more_is_taken_than_requests_can_fill():
    pages = plan_pages(SPECS, cache_bytes=10_000_000, **LIMITS)
    for table, count in pages.items():
        if table.keeps_all:
            assert count == 3 * -(-200 // table.tokens_per_page)


def test_too_little_memory_is_named_with_what_is_needed():
    with pytest.raises(ValueError, match="cache_bytes is 100, expected at least (\\d+)") as info:
        plan_pages(SPECS, cache_bytes=100, **LIMITS)
    needed = int(str(info.value).split("at least ")[1].split()[0])
    assert all(count >= 1 for count in plan_pages(SPECS, cache_bytes=needed, **LIMITS).values())


@pytest.mark.parametrize("table", tables_of(SPECS), ids=str)
@pytest.mark.parametrize("step_tokens", [1, 2, 5, 24])
def test_no_request_ever_holds_more_than_the_most_pages(table, step_tokens):
    """And there are lengths at which it does hold as many, or one fewer."""
    held = [len(table.pages(start, start + step_tokens)) for start in range(200 - step_tokens)]
    most = table.max_pages(step_tokens, 200)
    assert max(held) <= most
    assert table.keeps_all or max(held) >= most - 1
