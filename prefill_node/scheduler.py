"""Which chunks of which prompts a prefill step computes: first come, first served, in chunks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from sluice.cache.manager import CacheManager, NoRoom
from sluice.engine.batch import Chunk
from sluice.engine.protocol import NodeError, PageGrant, PrefillResult
from sluice.engine.request import Request


@dataclass
class Job:
    """One prompt to compute and deliver.

    It has ended once it has an outcome, an error or an abort; it leaves the node when nothing of
    it is in flight.
    """

    request: Request
    grant: PageGrant
    result: Future[PrefillResult]
    outcome: PrefillResult | None = None
    error: NodeError | None = None
    aborts: list[Future[None]] = field(default_factory=list)

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

    def settle(self) -> None:
        """Tell everyone who waits for this job."""
        if self.error is not None:
            self.result.set_exception(self.error)
        elif self.aborts or self.outcome is None:
            self.result.set_exception(NodeError(f"request {self.request.request_id}: aborted"))
        else:
            self.result.set_result(self.outcome)
        for abort in self.aborts:
            abort.set_result(None)


class PrefillScheduler:
    """Jobs in order of arrival: waiting for pages, or running (their pages are held)."""

    def __init__(self, manager: CacheManager, max_batch_tokens: int) -> None:
        self._manager = manager
        self._max_batch_tokens = max_batch_tokens
        self._waiting: deque[Job] = deque()
        self._running: dict[str, Job] = {}

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

    def ended(self) -> list[Job]:
        return [job for job in self._jobs() if job.ended]

    def remove(self, job: Job) -> None:
        """Forget the job and give its pages back; nothing of it may be in flight."""
        if self._running.pop(job.request.grant_id, None) is not None:
            self._manager.release(job.request.grant_id)
        else:
            self._waiting.remove(job)

    def next_chunks(self) -> list[Chunk]:
        """The next step's chunks: at most `max_batch_tokens` tokens, oldest request first."""
        self._admit()
        chunks = []
        budget = self._max_batch_tokens
        for job in self._computable():
            start = job.request.num_computed_tokens
            end = min(job.num_prompt_tokens, start + budget)
            self._manager.extend(job.request.grant_id, start, end)
            chunks.append(Chunk(job.request, start, end))
            budget -= end - start
            if budget == 0:
                break
        return chunks

    def _jobs(self) -> tuple[Job, ...]:
        return (*self._running.values(), *self._waiting)

    def _admit(self) -> None:
        """Take pages for waiting jobs, in order, as far as they reach."""
        while self._waiting and not self._waiting[0].ended:
            job = self._waiting[0]
            try:
                self._manager.grant(
                    job.request.grant_id, num_tokens=0, max_tokens=job.num_prompt_tokens
                )
            except NoRoom:
                return
            self._running[job.request.grant_id] = self._waiting.popleft()

    def _computable(self) -> Iterator[Job]:
        return (job for job in self._running.values() if not job.computed and not job.ended)
