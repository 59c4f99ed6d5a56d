"""Replays: a trace's prompts through a prefill node's scheduler and cache manager, without a model.

Prompts are computed one after another; nothing is computed but which pages they hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import torch
from tqdm import tqdm

from sluice.benchmarks.traces import Trace
from sluice.cache.budget import plan_pages
from sluice.cache.manager import CacheManager, PageCopy
from sluice.cache.prefix_tree import Hit
from sluice.cache.spec import PoolSpec, TableSpec, tables_of
from sluice.engine.batch import Chunk
from sluice.engine.graphs import DecodeSteps
from sluice.engine.request import Request
from sluice.engine.runner import Runner
from sluice.model.common.inputs import ForwardInputs
from sluice.model.registry import Model
from sluice.model.v4.step import Pools
from sluice.prefill_node.scheduler import Job, PrefillScheduler
from sluice.protocol.messages import PageGrant, PrefillResult, SamplingParams

STEP_TOKENS = 2048
MAX_REQUESTS = 16
MAX_MODEL_LEN = 1 << 20
NEVER_TOKENS = 1 << 40  # a distance between resume points that no prompt reaches


class ModelFreeRunner(Runner):
    """A runner that does everything but compute: there are no pools, and logits are given."""

    def __init__(self, manager: CacheManager, logits: torch.Tensor | None = None) -> None:
        """logits: [most requests of a step, vocab], what every step returns."""
        self.manager = manager
        self.specs = manager.specs
        self.pools = {}
        self.device = "cpu"
        self.max_model_len = MAX_MODEL_LEN
        self._logits = logits if logits is not None else torch.zeros(1, 1)
        self.vocab_size = self._logits.shape[-1]
        self.model = cast(
            Model, SimpleNamespace(fingerprint="", repeats=False, forward=self._forward)
        )
        self._grammars = None
        self.decode_steps = DecodeSteps(
            self.model, self.pools, manager, max_tokens=MAX_MODEL_LEN, device="cpu"
        )

    def copy_pages(self, copies: Iterable[PageCopy]) -> None:
        """Pages without content need no copies."""

    def _forward(self, inputs: ForwardInputs, pools: Pools) -> torch.Tensor:
        return self._logits[: inputs.num_requests]


class FixedPointsScheduler(PrefillScheduler):
    """Resumes at fixed distances and at the prompt's end alone, to compare with."""

    def _likely_resumes(self, job: Job, hit: Hit) -> frozenset[int]:
        return frozenset()


@dataclass(frozen=True)
class Hits:
    """What a replay found cached. A block is hit if all its tokens were."""

    num_blocks: int
    num_tokens: int


def make_scheduler(
    manager: CacheManager,
    *,
    resume_every_tokens: int,
    max_batch_tokens: int = STEP_TOKENS,
    kind: type[PrefillScheduler] = PrefillScheduler,
) -> PrefillScheduler:
    return kind(
        ModelFreeRunner(manager),
        max_batch_tokens=max_batch_tokens,
        resume_every_tokens=resume_every_tokens,
    )


def make_job(manager: CacheManager, name: str, token_ids: list[int]) -> Job:
    """A prompt as a prefill node gets it, with a grant that nothing is written to."""
    request = Request(name, name, len(token_ids), SamplingParams(max_tokens=1), token_ids)
    grant = PageGrant(name, 1, "decode", "", name, len(token_ids), {}, lease_s=1.0)
    result: Future[PrefillResult] = Future()
    return Job(request, grant, result, manager.keys_of(token_ids), router_id="replay")


def compute(scheduler: PrefillScheduler, job: Job) -> None:
    """Take the job in, compute its chunks, and let it go."""
    scheduler.add(job)
    while not job.computed:
        chunks: Sequence[Chunk] = scheduler.next_chunks()
        assert chunks, f"{job.num_prompt_tokens} tokens do not fit into the node's memory"
        for chunk in chunks:
            chunk.request.num_computed_tokens = chunk.end
            scheduler.settle(job)
    scheduler.remove(job)


def replay(trace: Trace, manager: CacheManager, scheduler: PrefillScheduler, title: str) -> Hits:
    """All prompts of the trace, one after another."""
    num_blocks = num_tokens = 0
    bar = tqdm(trace.prompts, desc=title, unit="request", disable=None)
    for number, prompt in enumerate(bar):
        job = make_job(manager, f"r{number}", trace.token_ids(prompt))
        compute(scheduler, job)
        num_blocks += job.num_cached_tokens // trace.block_tokens
        num_tokens += job.num_cached_tokens
    return Hits(num_blocks, num_tokens)


def pages_for_all(
    specs: Sequence[PoolSpec], trace: Trace, resume_every_tokens: int
) -> Mapping[TableSpec, int]:
    """So many pages of every table that nothing is ever evicted."""
    longest = max(prompt.num_tokens for prompt in trace.prompts)
    num_resumes = trace.num_tokens // resume_every_tokens + 3 * len(trace.prompts)
    return {
        table: (
            trace.num_tokens // table.tokens_per_page + 4 * len(trace.prompts)
            if table.keeps_all
            else num_resumes * table.max_pages(1, longest) + table.max_pages(STEP_TOKENS, longest)
        )
        for table in tables_of(specs)
    }


def pages_within(
    specs: Sequence[PoolSpec], trace: Trace, cache_bytes: int, resume_share: float
) -> Mapping[TableSpec, int]:
    """The pages that a prefill node makes of so much memory."""
    return plan_pages(
        specs,
        cache_bytes=cache_bytes,
        max_requests=MAX_REQUESTS,
        max_step_tokens=STEP_TOKENS,
        keep_prefixes=True,
        max_model_len=max(prompt.num_tokens for prompt in trace.prompts),
        resume_share=resume_share,
    )
