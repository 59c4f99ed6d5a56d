"""DecodeNode: receives pages of prefilled prompts and streams the rest of their tokens.

The life of a request:

1. `reserve` takes pages in every pool for the whole request, or refuses naming what is short.
2. Prefill writes into them. When every pool's rows have landed, the request joins the batch; its
   first output token came with the last notification. A request that is `local` joins at once, and
   its prompt is computed here, in chunks beside the others' tokens.
3. Each step computes one token of every running request and sends all new tokens to each router
   in one message. A request whose grammar is slower than the step keeps its logits and sits out
   until it knows which tokens it may choose from.
4. With its last token, at `release`, or when its router falls silent, its pages are given back.

`release` may come before `reserve`, which then is refused.
"""

from __future__ import annotations

import logging
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch
from torch import Tensor

from sluice.cache.clock import lease_clock
from sluice.cache.manager import NoRoom
from sluice.decode_node.admission import admit, pages_to_write
from sluice.decode_node.grants import Grants, Stream
from sluice.decode_node.outbox import Outbox, Sink
from sluice.decode_node.planner import StepPlanner, Work
from sluice.engine.choice import NextToken, choose
from sluice.engine.node import Node
from sluice.engine.request import Request
from sluice.engine.runner import Runner
from sluice.protocol.config import SluiceConfig
from sluice.protocol.grammar import Matcher
from sluice.protocol.messages import (
    GenerateRequest,
    NodeError,
    NodeStatus,
    PageGrant,
    Role,
    SluiceError,
    TokenChunk,
)
from sluice.transfer.receiver import Arrival, Receiver
from sluice.transfer.transport import Transport, make_transport

log = logging.getLogger(__name__)

T = TypeVar("T")

IDLE_WAIT_S = 0.1  # how late an expired lease may be noticed
EPOCH_BITS = 63  # nobody guesses one that was not told him
# What a step waits for grammars, which take 0.1 ms a token as a rule; a client's own may take 10.
MASK_PATIENCE_S = 0.002
MASKERS = 4  # threads, so that one such grammar does not hold up the others
ARRIVAL_POLL_S = 0.0005  # notifications are polled; short against the transfer of one chunk


class DecodeNode(Node):
    """A decode node. Public methods may be called from any thread."""

    role = Role.DECODE
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
        self._receiver = Receiver(transport, runner.pools, clock=clock)
        self._grants = Grants(config.transfer.lease_s)
        self._outbox = Outbox()
        self._late: list[Stream] = []  # those with logits from which nothing is chosen yet
        self._maskers = ThreadPoolExecutor(MASKERS, f"{node_id}-masks")
        self._planner = StepPlanner(runner.manager, config.decode.max_batch_tokens)
        super().__init__(runner, transport, config, node_id, host, clock=clock)

    @staticmethod
    def _tokens_of_a_step(config: SluiceConfig) -> int:
        return config.decode.max_running_requests

    def reserve(self, request: GenerateRequest) -> Future[PageGrant]:
        """Take pages in every pool for the prompt and some of the output.

        Asked twice for an attempt, it answers with the same grant. Raises Refused, InvalidRequest
        for what the request asks and no node can do, or NodeError if the request came too late or
        after its release.
        """
        grant_id = f"{request.request_id}.{uuid.uuid4().hex[:8]}"
        return self._intake.take(request, grant_id, lambda state: self._reserve(state, request))

    def release(self, request_id: str, *, in_flight: bool) -> Future[None]:
        """End the attempt. An unknown one is refused, should its `reserve` still come.

        in_flight: a write may still land, so the pages wait; each call prolongs that.
        """
        return self._loop.call(lambda: self._release_attempt(request_id, in_flight=in_flight))

    def subscribe(self, router_id: str, sink: Sink, number: int = 0) -> None:
        """Send the router's token chunks to `sink`, which is called on the loop thread.

        With None nothing more comes: another sink with a higher number has taken its place, or the
        router has fallen silent.
        """
        self._outbox.subscribe(router_id, sink, number)

    def unsubscribe(self, router_id: str, sink: Sink) -> None:
        self._outbox.unsubscribe(router_id, sink)

    def _turn(self) -> float:
        self._expire_leases()
        self._take_arrivals()
        self._choose_late()
        if work := self._planner.next(self._grants.running(), self._preempt):
            self._step(work)
        self._outbox.flush()
        if len(self._grants.running()) > len(self._late):
            return 0.0
        return ARRIVAL_POLL_S if self._late or self._grants.pending() else IDLE_WAIT_S

    def _close(self) -> None:
        self._maskers.shutdown(wait=False)
        self._receiver.close()

    def _load_now(self) -> tuple[int, int]:
        return len(self._grants.running()), len(self._grants.pending())

    def _held_for(self, router_id: str) -> Sequence[str]:
        return [stream.request_id for stream in self._grants.of_router(router_id)]

    def _reserve(self, state: Request, request: GenerateRequest) -> PageGrant:
        self._attempts.check(request)
        if (known := self._stream_of(request.request_id)) is not None:
            return known.grant
        self._routers.sign(request.router_id)
        grant_id, num_tokens = state.grant_id, len(state.token_ids)
        hit = admit(self.runner, state, request, self.info.node_id)
        kept = [spec for spec in self.runner.manager.specs if spec.table.keeps_all]
        self._count_lookup(kept, num_tokens, hit.num_tokens)
        grant = PageGrant(
            grant_id=grant_id,
            epoch=secrets.randbits(EPOCH_BITS),
            node_id=self.info.node_id,
            incarnation=self.info.incarnation,
            request_id=request.request_id,
            num_tokens=num_tokens,
            pages={} if request.local else pages_to_write(self.runner.manager, state, hit),
            lease_s=self._grants.lease_s,
            skip_tokens=hit.num_tokens,
        )
        stream = Stream(
            state,
            grant,
            request.cache_salt,
            request.router_id,
            deadline=self._clock() + self._grants.lease_s,
            traceparent=request.traceparent,
        )
        self._grants.add(stream)
        log.info(
            "event=reserved request_id=%s grant_id=%s tokens=%d skip_tokens=%d",
            *(request.request_id, grant_id, num_tokens, hit.num_tokens),
        )
        if request.local:
            state.num_computed_tokens, state.history_tokens = hit.num_tokens, hit.history_tokens
            stream.start()
        else:
            self._receiver.expect(grant)
        return grant

    def _stream_of(self, request_id: str) -> Stream | None:
        grant_id = self._grants.id_of(request_id)
        return None if grant_id is None else self._grants.get(grant_id)

    def _release_attempt(self, request_id: str, *, in_flight: bool) -> None:
        self._attempts.end(request_id)
        if (stream := self._stream_of(request_id)) is not None:
            self._release(stream, in_flight=in_flight)
        elif (grant_id := self._grants.id_of(request_id)) is not None:
            self._release_held(grant_id, in_flight=in_flight)

    def _release(self, stream: Stream, *, in_flight: bool) -> None:
        grant_id = stream.grant.grant_id
        self._attempts.end(stream.request_id)
        if in_flight and not stream.running:
            self._receiver.retire(grant_id)
            self._grants.hold(grant_id, self._clock())
        else:
            self._grants.remove(grant_id)
            self._free(grant_id)
        stream.end()

    def _release_held(self, grant_id: str, *, in_flight: bool) -> None:
        if in_flight:
            self._grants.hold_longer(grant_id, self._clock())
        elif self._grants.let_go(grant_id):
            self._free(grant_id)

    def _free(self, grant_id: str) -> None:
        self._receiver.forget(grant_id)
        self.runner.manager.release(grant_id)

    def _expire_leases(self) -> None:
        """Void what nobody vouches for any more."""
        for router_id in self._routers.take_silent():
            for stream in self._grants.of_router(router_id):
                self._void(stream, "the lease ended without a sign of its router")
            self._outbox.forget(router_id)
        now = self._clock()
        for stream in self._grants.pending():
            if now > stream.deadline:
                self._void(stream, "the lease ended before all pages arrived")
        for grant_id in self._grants.take_held(now):
            self._free(grant_id)

    def _void(self, stream: Stream, error: str, *, reason: str = "lease") -> None:
        self._send(stream, error=error)
        stream.fail(error)
        self.metrics.failed_requests.labels(reason).inc()
        self._release(stream, in_flight=True)

    def _take_arrivals(self) -> None:
        """Let requests run whose pages have all landed; any arrival renews its lease."""
        for arrival in self._receiver.poll():
            for pool, num_bytes in arrival.num_bytes.items():
                self.metrics.migrated_bytes.labels(pool, "in").inc(num_bytes)
            if arrival.retired:
                self._grants.hold_longer(arrival.grant_id, self._clock())
            stream = self._grants.get(arrival.grant_id)
            if stream is not None:
                self._guarded(stream, self._take_arrival, arrival)

    def _take_arrival(self, stream: Stream, arrival: Arrival) -> None:
        stream.deadline = self._clock() + self._grants.lease_s
        if arrival.error is not None:
            self._void(stream, arrival.error, reason="TransferFailed")
        elif arrival.first_token is not None:
            vocab_size = self.runner.vocab_size
            if not 0 <= arrival.first_token < vocab_size:
                raise NodeError(
                    f"the first token came as {arrival.first_token}, expected 0 to {vocab_size - 1}"
                )
            stream.request.num_computed_tokens = stream.grant.num_tokens
            self._keep_history(stream)
            stream.request.append(arrival.first_token)
            if stream.request.matcher is not None:
                self._begin_mask(stream, stream.request.matcher)
            stream.start()

    def _step(self, work: Sequence[Work]) -> None:
        """One more token for every running request, but for those whose prompt goes on."""
        started = time.perf_counter()

        def fail(why: str) -> None:
            self.metrics.failed_requests.labels("NodeError").inc(len(work))
            for stream, _, _ in work:
                self._guarded(stream, self._end_failed, why)

        if (logits := self._compute([chunk for _, chunk, _ in work], fail)) is None:
            return
        self._count_computed(work)
        rows = []
        for row, item in enumerate(work):
            try:
                if self._finish(item):
                    rows.append(row)
            except Exception as error:  # noqa: BLE001 - ends this request alone
                self._give_up(item.stream, error)
        rows = self._without_late(rows, work, logits)
        if len(rows) < len(work):
            logits = logits[rows]
        self._choose([work[row].stream for row in rows], logits)
        self.metrics.step_seconds.observe(time.perf_counter() - started)

    def _choose(self, streams: Sequence[Stream], logits: Tensor) -> None:
        """The next token of each stream. logits: [num_streams, vocab]."""
        choices = choose(logits, [stream.request for stream in streams])
        for stream, choice in zip(streams, choices, strict=True):
            try:
                self._emit(stream, choice)
            except Exception as error:  # noqa: BLE001 - ends this request alone
                self._give_up(stream, error)

    def _without_late(self, rows: list[int], work: Sequence[Work], logits: Tensor) -> list[int]:
        """The rows whose tokens can be chosen now; the others' logits wait for their grammars."""
        masking = [s.masking for s, _, _ in work if s.masking is not None]
        if not masking or not wait(masking, MASK_PATIENCE_S).not_done:
            return rows
        late = [row for row in rows if not work[row].stream.may_choose]
        for row in late:
            work[row].stream.unchosen = logits[row : row + 1].clone()
        self._late += [work[row].stream for row in late]
        return [row for row in rows if row not in late]

    def _choose_late(self) -> None:
        """Choose for streams whose grammars were slower than their step and have come to an end."""
        if not self._late:
            return
        late, ready = self._late, list[Stream]()
        self._late = []
        for stream in late:
            if self._grants.get(stream.grant.grant_id) is stream:  # it may have been released
                (ready if stream.may_choose else self._late).append(stream)
        if ready:
            logits = torch.cat([stream.unchosen for stream in ready if stream.unchosen is not None])
            for stream in ready:
                stream.unchosen = None
            self._choose(ready, logits)

    def _guarded(self, stream: Stream, work: Callable[[Stream, T], None], of: T) -> None:
        """Do something for one request; whatever it raises ends that request, not the loop."""
        try:
            work(stream, of)
        except Exception as error:  # noqa: BLE001 - ends this request alone
            self._give_up(stream, error)

    def _give_up(self, stream: Stream, error: Exception) -> None:
        """End a request of which something is broken; nothing of it is kept for others.

        Pages that do not come back are lost, which is better than to have them twice.
        """
        log.error("event=request_failed request_id=%s", stream.request_id, exc_info=error)
        self.metrics.failed_requests.labels("NodeError").inc()
        message = f"decode could not go on: {error}"
        self._send(stream, error=message)
        stream.fail(message)
        try:
            self._release(stream, in_flight=not stream.running)
        except Exception:
            log.exception("event=release_failed request_id=%s", stream.request_id)

    def _finish(self, work: Work) -> bool:
        """Note what a chunk computed; whether the request's next token follows from it."""
        stream, chunk, in_prompt = work
        stream.request.num_computed_tokens = chunk.end
        self.runner.manager.expire(stream.request.grant_id, chunk.end)
        if in_prompt and chunk.end == stream.grant.num_tokens:
            self._keep_history(stream)
        return chunk.end >= stream.grant.num_tokens

    def _count_computed(self, work: Sequence[Work]) -> None:
        """Count a step's tokens, once a kind: a look at a label for every request adds up."""
        prompts = [item.chunk.num_tokens for item in work if item.in_prompt]
        for kind, num_tokens in (("prefill", sum(prompts)), ("decode", len(work) - len(prompts))):
            if num_tokens:
                self.metrics.computed_tokens.labels(kind).inc(num_tokens)

    def _preempt(self, stream: Stream, why: NoRoom) -> None:
        self.metrics.failed_requests.labels("preempted").inc()
        self._guarded(stream, self._end_preempted, f"preempted: {why}")

    def _end_preempted(self, stream: Stream, why: str) -> None:
        self._end(stream, error=why, preempted=True)

    def _end_failed(self, stream: Stream, error: str) -> None:
        self._end(stream, error=error)

    def _emit(self, stream: Stream, choice: NextToken) -> None:
        if choice.error is not None:
            self._end_unchosen(stream, choice.error)
            return
        request, token = stream.request, choice.token_id
        logprobs = () if choice.logprobs is None else (choice.logprobs,)
        position = request.num_output_tokens
        reason = request.append(token)
        if reason is None:
            if request.matcher is not None:
                self._begin_mask(stream, request.matcher)
            chunk = TokenChunk(stream.request_id, (token,), logprobs=logprobs, position=position)
            self._outbox.put(stream.router_id, chunk)
        else:
            self._end(stream, (token,), finish_reason=reason, logprobs=logprobs)

    def _begin_mask(self, stream: Stream, matcher: Matcher) -> None:
        """Work out what its grammar allows next while the step is computed, and beside the loop."""
        output = stream.request.token_ids[stream.request.num_prompt_tokens :]
        stream.masking = self._maskers.submit(matcher.look_ahead, output)

    def _end_unchosen(self, stream: Stream, cause: SluiceError) -> None:
        """There is no next token; rows that may be damaged are not for others."""
        self.metrics.failed_requests.labels(type(cause).__name__).inc()
        self._send(stream, error=str(cause), cause=cause)
        stream.fail(str(cause))
        self._release(stream, in_flight=False)

    def _end(self, stream: Stream, token_ids: tuple[int, ...] = (), **outcome: Any) -> None:
        """Send the last chunk, keep the history for later requests, give the pages back."""
        self._send(stream, token_ids, **outcome)
        if "error" in outcome:
            stream.fail(outcome["error"])
        self._keep_history(stream)
        self._release(stream, in_flight=False)

    def _keep_history(self, stream: Stream) -> None:
        manager, request = self.runner.manager, stream.request
        keys = manager.keys_of(request.token_ids, stream.cache_salt)
        manager.cache_history(request.grant_id, keys, request.num_computed_tokens)

    def _send(self, stream: Stream, token_ids: tuple[int, ...] = (), **outcome: Any) -> None:
        position = stream.request.num_output_tokens - len(token_ids)
        chunk = TokenChunk(stream.request_id, token_ids, position=position, **outcome)
        self._outbox.put(stream.router_id, chunk)

    def _status(self, router_id: str, cache_version: int | None, with_metrics: bool) -> NodeStatus:
        running, pending = self._load_now()
        for state, count in (
            ("pending", pending),
            ("running", running),
            ("held", self._grants.num_held),
        ):
            self.metrics.grants.labels(state).set(count)
        self.metrics.show_dropped(self._receiver.dropped)
        return super()._status(router_id, cache_version, with_metrics)
