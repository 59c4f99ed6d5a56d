"""Admission: pages for a request in every pool, or a refusal that names what is short."""

from __future__ import annotations

from sluice.cache.manager import CacheManager, NoRoom
from sluice.cache.prefix_tree import Hit
from sluice.cache.spec import TableSpec
from sluice.engine.request import Request
from sluice.engine.runner import Runner
from sluice.protocol.messages import GenerateRequest, PageRun, Refused


def admit(runner: Runner, state: Request, request: GenerateRequest, node_id: str) -> Hit:
    """Take pages for the request; what of it is cached. Raises Refused."""
    manager, num_tokens = runner.manager, len(state.token_ids)
    keys = manager.keys_of(state.token_ids, request.cache_salt)
    if request.local:
        hit = manager.find_resumable(keys, state.token_ids)
    else:
        hit = manager.find_history(keys)
    try:
        copies = manager.grant(
            state.grant_id,
            num_tokens=hit.num_tokens if request.local else num_tokens,
            max_tokens=request.admit_tokens,
            hit=hit,
        )
    except NoRoom as error:
        raise Refused(f"{node_id}: {error}; try again or another node") from error
    runner.copy_pages(copies)
    return hit


def pages_to_write(manager: CacheManager, state: Request, hit: Hit) -> dict[TableSpec, PageRun]:
    """The pages prefill may write: those live after the prompt, without what is shared."""
    runs, num_tokens = {}, len(state.token_ids)
    for table, held in manager.page_tables(state.grant_id).items():
        live = table.pages(num_tokens, num_tokens)
        shared = hit.num_tokens // table.tokens_per_page if table.keeps_all else 0
        first = max(live.start, shared)
        runs[table] = PageRun(first, tuple(held.slice(range(first, max(first, live.stop)))))
    return runs
