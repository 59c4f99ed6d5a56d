"""PrefillNode: computes prompts and writes their pages into decode nodes.

The life of a prompt:

1. `run` puts it into the inbox; the scheduler takes pages for it when there is room.
2. Each step computes chunks of several prompts; a chunk's finished pages are posted at once and
   move while the next step computes.
3. The last chunk's logits give the first output token; window, compressor state and that token go
   with the last chunk.
4. When everything has landed, `run`'s future gets the first token and the pages are given back.

`abort` may come at any time, before `run` too: the prompt leaves after what is in flight has
settled. It leaves as well when its router falls silent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

import torch

from sluice.cache.clock import lease_clock
from sluice.engine.batch import Chunk
from sluice.engine.choice import choose, score
from sluice.engine.loop import pass_failure, promise
from sluice.engine.node import Node
from sluice.engine.request import Request
from sluice.engine.runner import Runner
from sluice.model.v4.pool_rows import convert_rows
from sluice.prefill_node.acquaintances import Acquaintances
from sluice.prefill_node.scheduler import Job, PrefillScheduler
from sluice.protocol.config import SluiceConfig
from sluice.protocol.messages import (
    ChoiceFailed,
    GenerateRequest,
    NodeError,
    NodeInfo,
    PageGrant,
    PageRun,
    PrefillResult,
    Role,
    SluiceError,
    TransferFailed,
)
from sluice.transfer.plan import PoolTraffic
from sluice.transfer.sender import Sender
from sluice.transfer.transport import Transport, make_transport

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.1  # how late a silent router may be noticed
TRANSFER_POLL_S = 0.0005  # completions are polled; shorter than the transfer of one chunk


class PrefillNode(Node):
    """A prefill node. Public methods may be called from any thread."""

    role = Role.PREFILL
    open_transport = staticmethod(make_transport)

    def __init__(
        self,
        runner: Runner,
        transport: Transport,
        config: SluiceConfig,
        node_id: str,
        host: str,
        *,
        clock: Callable[[], float] = lease_clock,
    ) -> None:
        self._sender = Sender(
            transport,
            runner.pools,
            mode=config.transfer.mode,
            checksum=config.transfer.checksum,
            staging_bytes=config.transfer.staging_bytes,
            convert=convert_rows,
            clock=clock,
        )
        self._acquaintances = Acquaintances(self._sender)
        self._scheduler = PrefillScheduler(
            runner,
            max_batch_tokens=config.prefill.max_batch_tokens,
            resume_every_tokens=config.prefill.resume_every_tokens,
        )
        super().__init__(runner, transport, config, node_id, host, clock=clock)

    @staticmethod
    def _tokens_of_a_step(config: SluiceConfig) -> int:
        return config.prefill.max_batch_tokens

    def connect(self, peer: NodeInfo) -> Future[None]:
        """Meet one decode node, where no controller does it. Raises IncompatiblePeers."""
        return self._loop.call(lambda: self._acquaintances.add(self.info, peer))

    def meet(self, version: int, peers: Sequence[NodeInfo]) -> Future[dict[str, SluiceError]]:
        """Know exactly these decode nodes; the future gets those that failed, and why.

        To be repeated, with the same version or a higher one: that mends what has broken since. A
        list that comes late, after one of a higher version, raises NodeError and changes nothing.
        """
        return self._loop.call(lambda: self._acquaintances.meet(self.info, version, peers))

    def run(self, request: GenerateRequest, grant: PageGrant) -> Future[PrefillResult]:
        """Compute the prompt into the grant; the future gets the first output token.

        It raises TransferFailed if the pages could not be delivered, NodeError if the prompt
        could not be computed, or came too late, twice or after its abort, InvalidRequest for what
        the request asks and no node can do.
        """
        result: Future[PrefillResult] = promise()
        keys = self.runner.manager.keys_of(request.token_ids, request.cache_salt)

        def add(state: Request) -> None:
            self._attempts.check(request)
            if self._scheduler.find_request(request.request_id) is not None:
                raise NodeError(f"request {request.request_id}: came twice; the first goes on")
            self._sender.open(replace(grant, expires_at=request.expires_at))
            self._routers.sign(request.router_id)
            job = Job(state, grant, result, keys, router_id=request.router_id)
            self._scheduler.add(job)
            job.begin(self.info.node_id, request.traceparent)

        added = self._intake.take(request, grant.grant_id, add)
        added.add_done_callback(lambda added: pass_failure(added, result))
        return result

    def abort(self, request_id: str) -> Future[None]:
        """Stop a request; done when nothing of it is in flight, nor will be.

        An unknown id is done at once: its `run` is refused, should it still come.
        """
        settled: Future[None] = promise()

        def mark() -> None:
            self._attempts.end(request_id)
            job = self._scheduler.find_request(request_id)
            if job is None:
                settled.set_result(None)
            else:
                job.aborts.append(settled)

        self._loop.call(mark).add_done_callback(lambda marked: pass_failure(marked, settled))
        return settled

    def _turn(self) -> float:
        for router_id in self._routers.take_silent():
            self._drop(router_id)
        self._settle_transfers()
        self._let_go()
        chunks = self._scheduler.next_chunks()
        if chunks:
            self._step(chunks)
            return 0.0
        return TRANSFER_POLL_S if self._scheduler.num_running else IDLE_WAIT_S

    def _close(self) -> None:
        self._sender.close()

    def _load_now(self) -> tuple[int, int]:
        return self._scheduler.num_running, self._scheduler.num_waiting

    def _held_for(self, router_id: str) -> Sequence[str]:
        return [job.request.request_id for job in self._scheduler.of_router(router_id)]

    def _drop(self, router_id: str) -> None:
        """Nobody waits for what a silent router has asked for."""
        for job in self._scheduler.of_router(router_id):
            self._fail(job.grant.grant_id, NodeError(f"no sign of its router {router_id}"))

    def _settle_transfers(self) -> None:
        """Count completed transfers; a failed one ends its request."""
        for transfer in self._sender.poll():
            if transfer.error is not None:
                self._fail(transfer.grant_id, transfer.error)
            else:
                self.metrics.transfer_seconds.observe(transfer.seconds)
                self._count(transfer.pools)
                if (job := self._scheduler.find(transfer.grant_id)) is not None:
                    job.trace(transfer)

    def _count(self, pools: Mapping[str, PoolTraffic]) -> None:
        for pool, sent in pools.items():
            self.metrics.count_sent(
                pool, pages=sent.pages, num_bytes=sent.bytes, descriptors=sent.descriptors
            )

    def _let_go(self) -> None:
        """Release ended jobs of which nothing is in flight, and answer whoever waits.

        A failure is told, and pages are given back that nobody reads, without waiting for what a
        broken connection may still deliver: for that `abort` waits.
        """
        for job in self._scheduler.ended():
            if job.outcome is None:
                self._sender.cancel(job.grant.grant_id)
            if not self._sender.reads(job.grant.grant_id):
                self._scheduler.give_back(job)
            if job.error is not None:
                job.tell(job.error)
            if not self._sender.in_flight(job.grant.grant_id):
                self._scheduler.remove(job)
                self._sender.close_grant(job.grant.grant_id)
                self._attempts.end(job.request.request_id)
                job.settle()

    def _step(self, chunks: Sequence[Chunk]) -> None:
        """Compute the chunks, then post what each of them finished."""
        started = time.perf_counter()
        scored = chunks[0].request.wants_scores  # it is alone then

        def fail(why: str) -> None:
            for chunk in chunks:
                self._fail(chunk.request.grant_id, NodeError(why))

        if (logits := self._compute(chunks, fail, all_logits=scored)) is None:
            return
        self.metrics.step_seconds.observe(time.perf_counter() - started)
        self.metrics.computed_tokens.labels("prefill").inc(sum(c.num_tokens for c in chunks))
        if scored:
            self._finish_safely(chunks[0], logits)
            return
        for row, chunk in enumerate(chunks):
            self._finish_safely(chunk, logits[row : row + 1])

    def _finish_safely(self, chunk: Chunk, logits: torch.Tensor) -> None:
        """Whatever goes wrong with one chunk ends that request, not the loop."""
        try:
            self._finish_chunk(chunk, logits)
        except ChoiceFailed as error:
            self._fail(chunk.request.grant_id, error)
        except Exception as error:
            log.exception("event=chunk_failed request_id=%s", chunk.request.request_id)
            self._fail(chunk.request.grant_id, NodeError(f"prefill could not go on: {error}"))

    def _finish_chunk(self, chunk: Chunk, logits: torch.Tensor) -> None:
        """Post the chunk's pages, then keep or expire what the request needs no more.

        logits: [1, vocab] of the chunk's last token, or [num_tokens, vocab] to score all by.
        """
        request = chunk.request
        job = self._scheduler.find(request.grant_id)
        assert job is not None, "a computed chunk belongs to a job"
        request.num_computed_tokens = chunk.end
        if chunk.start == job.num_cached_tokens:
            pools = self.runner.manager.specs
            self._count_lookup(pools, job.num_prompt_tokens, job.num_cached_tokens)
        if request.wants_scores:
            self._score(job, chunk, logits)
        first_token = self._first_token(job, logits[-1:]) if job.computed else None
        if job.error is None and (job.outcome is None or job.outcome.finish_reason is None):
            self._post(job, chunk, first_token)
        if not isinstance(job.error, ChoiceFailed):  # its rows may be damaged: not for others
            self._scheduler.settle(job)

    def _score(self, job: Job, chunk: Chunk, logits: torch.Tensor) -> None:
        """How likely the prompt's tokens after the chunk's own were. Raises ChoiceFailed."""
        num_top = job.request.sampling.num_prompt_logprobs
        assert num_top is not None, "such a job's request asks for it"
        came = job.request.token_ids[chunk.start + 1 : chunk.end + 1]
        job.scores += score(logits[: len(came)], came, num_top)

    def _first_token(self, job: Job, logits: torch.Tensor) -> int | None:
        """Sample it into the job's outcome; None if that failed, which ends the job."""
        request = job.request
        [choice] = choose(logits, [request])
        if choice.error is not None:
            self._fail(request.grant_id, choice.error)
            return None
        token = choice.token_id
        reason = request.append(token)
        job.outcome = PrefillResult(
            request.request_id,
            token,
            reason,
            job.num_cached_tokens,
            choice.logprobs,
            tuple(job.scores),
        )
        return token

    def _post(self, job: Job, chunk: Chunk, first_token: int | None) -> None:
        """Write the rows this chunk finished into the grant; a failure ends the job.

        The first chunk takes along the rows of the cached prefix.
        """
        start = 0 if chunk.start == job.num_cached_tokens else chunk.start
        tables = self.runner.manager.page_tables(job.request.grant_id)
        pages = {table: PageRun(held.first, tuple(held.pages)) for table, held in tables.items()}
        try:
            self._sender.send(job.grant, pages, start, chunk.end, first_token=first_token)
        except TransferFailed as error:
            self._fail(job.request.grant_id, error)

    def _fail(self, grant_id: str, error: SluiceError) -> None:
        job = self._scheduler.find(grant_id)
        if job is not None and job.error is None:
            job.error = error
            self.metrics.failed_requests.labels(type(error).__name__).inc()
            log.warning(
                "event=prefill_failed request_id=%s error=%s", job.request.request_id, error
            )
