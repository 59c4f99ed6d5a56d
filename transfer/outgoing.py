"""Outgoing: one grant while its pages are being written.

queue ──next part──► in flight ──► over          a chunk is one part, or several where rows go
  │ failure              │ anything else         through staging memory and it has not room for
  ▼                      ▼                       all of them at once
dropped              may be in flight ──a lease──► over

A post of which nothing has left, as its connection was lost before, goes back to the queue. Else
only completion is silence. A transport that reports an error, or is told to give up, may have parts
of the post on their way still; TCP gives up what stays unacknowledged for a lease (see
nixl_transport.py), so for so long decode must not use its pages again.

In READ mode a post is an offer, and decode reads when it comes by. Where its answer is lost or not
waited for, the pages stay as they are until no read of them can count or go on any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sluice.cache.spec import PoolSpec, TableSpec
from sluice.protocol.messages import PageGrant, PageRun, TransferFailed
from sluice.transfer.offers import Declined
from sluice.transfer.peers import Peer
from sluice.transfer.plan import (
    ByteRuns,
    Copy,
    PoolTraffic,
    rows_to_send,
    touched_pages,
    traffic_of,
)
from sluice.transfer.staging import Bay
from sluice.transfer.transport import Handle, NothingLeft, Posts

# How long after a lost offer its pages may be read, at most a lease each: the offer's way, a freeze
# of the reader too short to void its grants, the read, and what the reader has abandoned of it.
UNHEARD_LEASES = 4


@dataclass(frozen=True)
class Transfer:
    """A post that has completed, or the failure of its grant, which comes once.

    seconds: from posting to completion. pools: what moved, by pool; both empty for a failure.
    """

    grant_id: str
    seconds: float = 0.0
    pools: Mapping[str, PoolTraffic] = field(default_factory=dict)
    error: TransferFailed | None = None


@dataclass(frozen=True)
class Shipment:
    """Rows of pools that wait to be posted, and the pages they lie in.

    first_token: goes with the last part of the last chunk.
    """

    rows: Mapping[str, range]
    pages: Mapping[TableSpec, PageRun]
    first_token: int | None


@dataclass(frozen=True)
class Post:
    """One part's write. posted_at: in seconds of the sender's clock. bay: what it reads.

    copies, message: to post it once more, if nothing has left.
    """

    handle: Handle
    peer: Peer
    copies: Sequence[Copy]
    message: bytes
    posted_at: float
    pools: Mapping[str, PoolTraffic]
    bay: Bay | None = None


class Outgoing:
    """What waits to be posted for a grant, is in flight for it, and until when anything may be.

    `error` is the first failure and final: what waits is dropped then. `sent_tokens`: all rows that
    are complete at this length have been queued.
    """

    def __init__(self, grant: PageGrant, opened_at: float, *, read_by_peer: bool) -> None:
        self.grant = grant
        self._unheard_s = (UNHEARD_LEASES if read_by_peer else 1) * grant.lease_s
        self._read_by_peer = read_by_peer
        self.deadline = opened_at + grant.lease_s
        if grant.expires_at is not None:
            self.deadline = min(self.deadline, grant.expires_at)
        self.sent_tokens = 0
        self.num_posts = 0
        self.again: deque[Post] = deque()  # of which nothing has left, on connections now lost
        self._num_refused = 0
        self.queue: deque[Shipment] = deque()
        self.in_flight: list[Post] = []
        self.silent_at = opened_at  # from when on no byte of a post that did not complete can move
        self.stranded: list[Bay] = []  # of lost offers
        self.error: TransferFailed | None = None
        self._told = False
        self._last_page: dict[str, int] = {}  # by pool, the last page that was counted

    def check(self, now: float) -> None:
        """Raise TransferFailed unless the grant may still be written to."""
        if self.error is None and now >= self.deadline:
            self.fail(
                TransferFailed(
                    f"grant {self.grant.grant_id}: its lease of {self.grant.lease_s} s ended "
                    f"{now - self.deadline:.3f} s ago and nothing more may be written to it; "
                    "reserve again"
                )
            )
        if self.error is not None:
            raise self.error

    def told(self) -> None:
        """The caller knows of the failure."""
        self._told = True

    def fail(self, error: TransferFailed) -> None:
        self.error = self.error or error
        self.queue.clear()

    def busy(self, now: float) -> bool:
        """Whether its source pages are still to be read, or its target pages to be written."""
        return bool(self.waits or self.in_flight) or now < self.silent_at

    @property
    def waits(self) -> bool:
        """Whether anything is still to be posted."""
        return bool(self.queue or self.again)

    def reads(self, now: float) -> bool:
        """Whether what its source pages hold still matters.

        What is left of a write that did not complete brings whatever bytes into pages that never
        count; a peer that reads may take them for right.
        """
        return bool(self.waits or self.in_flight) or (self._read_by_peer and now < self.silent_at)

    def uses(self, peer: Peer) -> bool:
        """Whether anything of it is in flight on the peer's connection."""
        return any(post.peer is peer for post in self.in_flight)

    def overdue(self, now: float) -> bool:
        """Whether a post has outlasted the lease, so that it may not arrive any more."""
        return bool(self.in_flight) and now >= self.deadline

    def rows(self, spec: PoolSpec, end: int) -> range:
        """Rows of a pool to post once `end` tokens are computed."""
        return rows_to_send(
            spec,
            start=self.sent_tokens,
            end=end,
            num_tokens=self.grant.num_tokens,
            skip_tokens=self.grant.skip_tokens,
        )

    def posted(self, post: Post) -> None:
        self.in_flight.append(post)
        self.num_posts += 1

    def count(self, target: PoolSpec, rows: range, runs: ByteRuns) -> PoolTraffic:
        """What a post moves of one pool; a page that an earlier post began counts once."""
        pages = touched_pages(target, rows)
        again = self._last_page.get(target.name) == pages.start
        self._last_page[target.name] = pages[-1]
        return traffic_of(runs, len(pages) - again)

    def settle(self, posts: Posts, now: float) -> tuple[list[Post], list[Transfer], set[Peer]]:
        """Posts that are over, completed or failed; what completed; whose connections are lost."""
        over, transfers, lost = [], [], set()
        for post in self.in_flight:
            try:
                if not posts.poll(post.handle):
                    continue
                # Decode heard of it no earlier than it was posted: its lease ends later.
                self.deadline = max(self.deadline, post.posted_at + self.grant.lease_s)
                transfers.append(Transfer(self.grant.grant_id, now - post.posted_at, post.pools))
                self._num_refused = 0
            except NothingLeft as error:
                post.peer.broken = True
                self._put_back(post, error)
                continue
            except TransferFailed as error:
                self.fail(error)
                if not isinstance(error, Declined):
                    lost.add(post.peer)
                    self._unheard(now)
            over.append(post)
        self.in_flight = [p for p in self.in_flight if p not in over and p not in self.again]
        return over, transfers, lost

    def _put_back(self, post: Post, error: NothingLeft) -> None:
        """Post it once more, on another connection; but not to a peer that refused two."""
        self.again.append(post)
        self._num_refused += not error.silent
        if self._num_refused > 1:
            self.fail(error)

    def take_back(self) -> list[Post]:
        """Posts that will not be repeated."""
        dropped = list(self.again)
        self.again.clear()
        return dropped

    def news_of_failure(self) -> Iterator[Transfer]:
        """The grant's failure, if it has not been reported yet."""
        if self.error is not None and not self._told:
            self._told = True
            yield Transfer(self.grant.grant_id, error=self.error)

    def give_up(self, posts: Posts, reason: str, now: float) -> list[Post]:
        """Abandon what is in flight, and return it; the failure is reported by the next poll."""
        given_up, self.in_flight = self.in_flight, []
        for post in given_up:
            posts.abandon(post.handle)
            self._unheard(now)
        self.fail(
            TransferFailed(f"grant {self.grant.grant_id}: {reason}; prefill it for another node")
        )
        return given_up

    def _unheard(self, now: float) -> None:
        """A post is over and nobody knows how."""
        self.silent_at = max(self.silent_at, now + self._unheard_s)
