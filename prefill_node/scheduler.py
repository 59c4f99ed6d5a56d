"""Which chunks of which prompts a prefill step computes: first come, first served, in chunks."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from sluice.cache.keys import PrefixKeys
from sluice.cache.manager import NoRoom
from sluice.cache.prefix_tree import Hit
from sluice.engine.batch import Chunk
from sluice.engine.request import Request
from sluice.engine.runner import Runner
from sluice.protocol.messages import Logprobs, NodeError, PageGrant, PrefillResult, SluiceError
from sluice.protocol.tracing import NO_SPAN, Span, begin_span
from sluice.transfer.outgoing import Transfer

log = logging.getLogger(__name__)

WORTH_KEEPING_TOKENS = 16  # below, a resume point costs more than it saves
SCORED_TOKENS = 256  # of a step whose logits are all wanted: 128 MB with a large vocabulary


@dataclass
class Job:
    """One prompt to compute and deliver.

    It has ended once it has an outcome, an error or an abort; it leaves the node when nothing of
    it is in flight.
    """

    request: Request
    grant: PageGrant
    result: Future[PrefillResult]
    keys: PrefixKeys
    router_id: str
    outcome: PrefillResult | None = None
    error: SluiceError | None = None
    num_cached_tokens: int = 0
    likely_resumes: frozenset[int] = frozenset()  # lengths from which later prompts may go on
    aborts: list[Future[None]] = field(default_factory=list)
    node_id: str = ""
    span: Span = NO_SPAN
    scores: list[Logprobs] = field(default_factory=list)  # of the prompt's tokens, from the second

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens to prefill: the prompt, and after a fail-over the output that was emitted."""
        return self.grant.num_tokens

    @property
    def computed(self) -> bool:
        return self.request.num_computed_tokens >= self.num_prompt_tokens

    @property
    def ended(self) -> bool:
        return bool(self.outcome or self.error or self.aborts)

    def tell(self, error: SluiceError) -> None:
        """Tell the caller of a failure; abort still waits for what may be in flight."""
        if not self.result.done():
            self.result.set_exception(error)

    def settle(self) -> None:
        """Tell everyone who waits for this job."""
        self._note_end()
        if self.error is not None:
            self.tell(self.error)
        elif self.aborts or self.outcome is None:
            self.result.set_exception(NodeError(f"request {self.request.request_id}: aborted"))
        else:
            self.result.set_result(self.outcome)
        for abort in self.aborts:
            abort.set_result(None)

    def begin(self, node_id: str, traceparent: str) -> None:
        """The node has the job: log it and begin its span, which `settle` ends."""
        self.node_id = node_id
        self.span = self._span("prefill", traceparent)
        tokens = self.num_prompt_tokens
        log.info("event=prefill_started request_id=%s tokens=%d", self.request.request_id, tokens)

    def trace(self, transfer: Transfer) -> None:
        """Record a transfer that has just completed."""
        if self.span is not NO_SPAN:
            self._span(
                "transfer",
                self.span.traceparent,
                seconds_ago=transfer.seconds,
                bytes=sum(sent.bytes for sent in transfer.pools.values()),
                descriptors=sum(sent.descriptors for sent in transfer.pools.values()),
            ).end()

    def _note_end(self) -> None:
        if self.error is not None:  # it has its line already
            self.span.fail(str(self.error))
        else:
            log.info(
                "event=%s request_id=%s cached_tokens=%d",
                "prefill_aborted" if self.outcome is None else "prefilled",
                *(self.request.request_id, self.num_cached_tokens),
            )
        self.span.end(cached_tokens=self.num_cached_tokens)

    def _span(self, name: str, parent: str, **more: float) -> Span:
        request_id = self.request.request_id
        return begin_span(name, parent, request_id=request_id, node=self.node_id, **more)


class PrefillScheduler:
    """Jobs in order of arrival: waiting for pages, or running (their pages are held).

    Ended ones may have given their pages back while something of theirs may be in flight.
    """

    def __init__(self, runner: Runner, *, max_batch_tokens: int, resume_every_tokens: int) -> None:
        self._runner = runner
        self._manager = runner.manager
        self._max_batch_tokens = max_batch_tokens
        self._resume_every_tokens = resume_every_tokens
        self._waiting: deque[Job] = deque()
        self._running: dict[str, Job] = {}
        self._leaving: dict[str, Job] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, job: Job) -> None:
        self._waiting.append(job)

    def find(self, grant_id: str) -> Job | None:
        return next((job for job in self._jobs() if job.grant.grant_id == grant_id), None)

    def find_request(self, request_id: str) -> Job | None:
        return next((job for job in self._jobs() if job.request.request_id == request_id), None)

    def of_router(self, router_id: str) -> list[Job]:
        return [job for job in self._jobs() if job.router_id == router_id]

    def ended(self) -> list[Job]:
        return [job for job in self._jobs() if job.ended]

    def remove(self, job: Job) -> None:
        """Forget the job and give its pages back; nothing of it may be in flight."""
        self.give_back(job)
        del self._leaving[job.request.grant_id]

    def give_back(self, job: Job) -> None:
        """Give an ended job's pages back, which nobody reads any more. May be called again."""
        grant_id = job.request.grant_id
        if self._running.pop(grant_id, None) is not None:
            self._manager.release(grant_id)
        elif grant_id not in self._leaving:
            self._waiting.remove(job)
        self._leaving[grant_id] = job

    def next_chunks(self) -> list[Chunk]:
        """The next step's chunks: at most `max_batch_tokens` tokens, oldest request first."""
        self._admit()
        chunks: list[Chunk] = []
        budget = self._max_batch_tokens
        for job in self._computable():
            if job.request.wants_scores:  # alone in a step: its logits are many
                if chunks:
                    break
                budget = min(budget, SCORED_TOKENS)
            start = job.request.num_computed_tokens
            end = min(start + budget, self._next_resume(job, start))
            self._manager.extend(job.request.grant_id, end)
            chunks.append(Chunk(job.request, start, end))
            budget -= end - start
            if budget == 0 or job.request.wants_scores:
                break
        return chunks

    def settle(self, job: Job) -> None:
        """Keep what a chunk added for later prompts, then expire what the request needs no more.

        Work can resume where it is likely to, and with the memory that this leaves at the prompt's
        end and at every `resume_every_tokens`; but not among replayed tokens, whose window and
        state are not right yet.
        """
        request = job.request
        end = request.num_computed_tokens
        if (
            request.wants_scores
        ):  # nobody comes back to it, and it was computed without what is cached
            self._manager.expire(request.grant_id, end)
            return
        self._manager.cache_history(request.grant_id, job.keys, end)
        likely = end in job.likely_resumes
        wanted = likely or job.computed or end % self._resume_every_tokens == 0
        if wanted and end >= request.history_tokens:
            copies = self._manager.cache_resume(
                request.grant_id, job.keys, request.token_ids, end, spare=not likely
            )
            self._runner.copy_pages(copies)
        self._manager.expire(request.grant_id, end)

    def _next_resume(self, job: Job, start: int) -> int:
        """The next length at which work can resume: a chunk goes no further."""
        every = self._resume_every_tokens
        likely = (length for length in job.likely_resumes if length > start)
        return min(job.num_prompt_tokens, (start // every + 1) * every, *likely)

    def _likely_resumes(self, job: Job, hit: Hit) -> frozenset[int]:
        """Where an earlier prompt with the same beginning goes another way, and the last unit.

        Another prompt may turn off where one did. A conversation goes on from its end, but where a
        chat template writes the last few tokens anew, from the unit before. The same prompt again
        has its last token to compute: a short one, without a whole unit before that, goes on there.
        """
        if not self._manager.prefix_cache:
            return frozenset()
        unit, before_last = self._manager.unit_tokens, job.num_prompt_tokens - 1
        last_unit = before_last // unit * unit
        is_short = last_unit == 0 and before_last >= WORTH_KEEPING_TOKENS
        return frozenset({hit.known_tokens, before_last if is_short else last_unit})

    def _jobs(self) -> tuple[Job, ...]:
        return (*self._running.values(), *self._waiting, *self._leaving.values())

    def _admit(self) -> None:
        """Take pages for waiting jobs, in order, as far as they reach."""
        while self._waiting and not self._waiting[0].ended:
            if not self._try_admit(self._waiting[0]):
                return
            job = self._waiting.popleft()
            self._running[job.request.grant_id] = job

    def _try_admit(self, job: Job) -> bool:
        request = job.request
        hit = self._manager.find_resumable(job.keys, request.token_ids)
        try:
            copies = self._manager.grant(
                request.grant_id,
                num_tokens=hit.num_tokens,
                max_tokens=job.num_prompt_tokens,
                hit=hit,
            )
        except NoRoom:
            return False
        self._runner.copy_pages(copies)
        request.num_computed_tokens = job.num_cached_tokens = hit.num_tokens
        request.history_tokens = hit.history_tokens
        job.likely_resumes = self._likely_resumes(job, hit)
        return True

    def _computable(self) -> Iterator[Job]:
        return (job for job in self._running.values() if not job.computed and not job.ended)
