"""Grants: pages promised to transfers, from `reserve` until the request ends.

    reserve ──► pending ──all pages landed──► running ──last token──► gone
                  │ lease over, or release        │ release
                  ▼ with a write in flight        ▼
                 held ──2 leases──► gone         gone

A request whose prompt is computed here runs at once, and nothing is ever written to its grant.
Nodes and their pages know a grant by its id, routers by their attempt's, which is as unique.

A pending grant's pages may be the target of a write that is on its way. They are reused only when
prefill says that nothing is in flight, or when no lease it could have seen is still running and
what it abandoned at the end of that can arrive no more: a lease for each of the two.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from sluice.engine.batch import Chunk
from sluice.engine.request import Request
from sluice.protocol.messages import PageGrant
from sluice.protocol.tracing import NO_SPAN, Span, begin_span

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Stream:
    """One granted request: its pages, whom its tokens go to, and until when it may wait."""

    request: Request
    grant: PageGrant
    cache_salt: str
    router_id: str
    deadline: float  # on the node's clock; for a pending grant the end of its lease
    running: bool = False
    traceparent: str = ""
    span: Span = NO_SPAN  # from the arrival of all pages on
    masking: Future[None] | None = None  # works out which tokens its grammar allows next
    unchosen: Tensor | None = None  # [1, vocab], of a step that was done before that

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def may_choose(self) -> bool:
        """Whether its next token can be chosen without waiting for its grammar."""
        return self.masking is None or self.masking.done()

    def start(self) -> None:
        """All pages have landed, or none are to come: the request may run."""
        self.running = True
        request_id, node_id = self.request_id, self.grant.node_id
        self.span = begin_span("decode", self.traceparent, request_id=request_id, node=node_id)
        log.info("event=decode_started request_id=%s", request_id)

    def fail(self, error: str) -> None:
        """Note what ends the request early; `end` still has to come."""
        self.span.fail(error)
        log.warning("event=decode_failed request_id=%s error=%s", self.request_id, error)

    def end(self) -> None:
        """Note that the request has no place here any more."""
        num_tokens = self.request.num_output_tokens
        self.span.end(output_tokens=num_tokens)
        log.info("event=released request_id=%s output_tokens=%d", self.request_id, num_tokens)

    def next_chunk(self, prompt_tokens: int) -> Chunk:
        """What to compute next: the newest token, or up to so many tokens of a local prompt."""
        start, num_tokens = self.request.num_computed_tokens, self.grant.num_tokens
        if start < num_tokens:
            return Chunk(self.request, start, min(start + prompt_tokens, num_tokens))
        return Chunk(self.request, start, start + 1)


class Held(NamedTuple):
    """A grant whose pages wait: until when, on the node's clock."""

    request_id: str
    until: float


class Grants:
    """Streams by grant id, and the ids whose pages wait out a lease."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._streams: dict[str, Stream] = {}
        self._held: dict[str, Held] = {}
        self._ids: dict[str, str] = {}  # request id -> grant id, of both

    def add(self, stream: Stream) -> None:
        self._streams[stream.grant.grant_id] = stream
        self._ids[stream.request_id] = stream.grant.grant_id

    def get(self, grant_id: str) -> Stream | None:
        return self._streams.get(grant_id)

    def id_of(self, request_id: str) -> str | None:
        """The grant of the attempt, held ones too."""
        return self._ids.get(request_id)

    def remove(self, grant_id: str) -> None:
        del self._ids[self._streams.pop(grant_id).request_id]

    def hold(self, grant_id: str, now: float) -> None:
        """Stop serving the grant but keep its pages while a write may arrive."""
        stream = self._streams.pop(grant_id)
        until = max(now, stream.deadline) + 2 * self.lease_s
        self._held[grant_id] = Held(stream.request_id, until)

    def hold_longer(self, grant_id: str, now: float) -> None:
        """A write to a held grant was seen, or may come: prefill's lease may be a new one."""
        if (held := self._held.get(grant_id)) is not None:
            self._held[grant_id] = held._replace(until=now + 3 * self.lease_s)

    def let_go(self, grant_id: str) -> bool:
        """Hold the grant no longer; returns whether it was held."""
        if (held := self._held.pop(grant_id, None)) is None:
            return False
        del self._ids[held.request_id]
        return True

    def take_held(self, now: float) -> list[str]:
        """Grants whose pages are safe to reuse now."""
        over = [grant_id for grant_id, held in self._held.items() if held.until <= now]
        for grant_id in over:
            self.let_go(grant_id)
        return over

    def running(self) -> list[Stream]:
        return [stream for stream in self._streams.values() if stream.running]

    def pending(self) -> list[Stream]:
        return [stream for stream in self._streams.values() if not stream.running]

    def of_router(self, router_id: str) -> list[Stream]:
        return [s for s in self._streams.values() if s.router_id == router_id]

    @property
    def num_held(self) -> int:
        return len(self._held)
