"""What router, prefill nodes and decode nodes say to each other, without torch and without Ray.

Messages are frozen dataclasses; the clients at the end are what the router needs of a node and of
the cluster, so that the same router runs over Ray actors or over nodes in its own process.

A message to a node may come late, twice, never, or before one that was sent first:

late     it says until when it counts, on the receiver's clock: `GenerateRequest.expires_at`
twice    an attempt's id is used once: a node remembers those that ended, as long as they count
never    a node's status lists the attempts it holds for the router that asks: what the router has
         given up is ended there, what the node does not know is tried again elsewhere
before   an id that was aborted or released is refused when its request comes after all

    SluiceError
    ├── InvalidRequest      400  the request can never succeed as it is
    ├── UnknownModel        404  no such model here
    ├── QueueFull           429  too many requests wait; try again
    ├── Unavailable         503  no node of a role is ready, or the server is draining
    ├── DeadlineExceeded    504  the request's time is up
    ├── ConfigError              a config, checkpoint or command line cannot work
    │   └── IncompatiblePeers    two nodes whose pools have no mapping, the field named
    └── NodeError           500  something behind the router failed
        ├── Refused              decode cannot take the request now; another node, or later, may
        ├── TransferFailed       pages did not arrive; the request can be prefilled again
        ├── Preempted            decode took the pages back; the request can be prefilled again
        ├── ChoiceFailed         it got no next token; another node may do it, none is to blame
        └── NodeLost             the node died or stopped answering
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from sluice.cache.journal import CacheReport
from sluice.cache.spec import PoolSpec, TableSpec

PROTOCOL_VERSION = 5

# Output tokens for which decode takes pages at admission; more come as the output grows, and where
# they do not, the youngest request is preempted.
ADMIT_AHEAD_TOKENS = 64


class SluiceError(Exception):
    """Base of every error this project raises on purpose. `status` is its HTTP status."""

    status = 500
    code = "internal_error"


class InvalidRequest(SluiceError):
    """The request can never succeed as it is. `param` names the field at fault."""

    status = 400
    code = "invalid_request"

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code or self.code


class UnknownModel(SluiceError):
    status = 404
    code = "model_not_found"


class QueueFull(SluiceError):
    status = 429
    code = "queue_full"


class Unavailable(SluiceError):
    status = 503
    code = "unavailable"


class DeadlineExceeded(SluiceError):
    status = 504
    code = "deadline_exceeded"


class ConfigError(SluiceError):
    code = "config_error"


class IncompatiblePeers(ConfigError):
    code = "incompatible_peers"


class NodeError(SluiceError):
    """Something behind the router failed."""


class Refused(NodeError):
    """Decode cannot hold the request now: which pages are short is in the message."""


class TransferFailed(NodeError):
    pass


class Preempted(NodeError):
    pass


class ChoiceFailed(NodeError):
    """A request's next token could not be chosen, while its neighbours' could.

    Another node may do better, where a row was damaged; none is blamed, since as likely it is the
    request's own tokens.
    """


class NodeLost(NodeError):
    pass


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class NodeState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class SamplingParams:
    """How output tokens are chosen and when generation ends. `temperature` 0 is greedy.

    `max_tokens` counts output tokens of the whole answer. The random draw for output position i
    depends on (seed, i) only. Penalties look at the tokens so far: `repetition_penalty` at prompt
    and output, the other two at the output.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0  # least probability, as a share of the likeliest token's
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()  # eos included unless the client ignores it
    min_tokens: int = 0  # output tokens before a stop token may come
    presence_penalty: float = 0.0  # off the logit of every token that came already
    frequency_penalty: float = 0.0  # off the logit for each time the token came
    repetition_penalty: float = 1.0  # divides positive logits of what came, multiplies negative
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what to add to its logit)
    num_top_logprobs: int | None = None  # report log-probabilities: so many of the likeliest too
    num_prompt_logprobs: int | None = None  # the same for the prompt's tokens but the first
    json_schema: str = ""  # the output is a JSON text that this schema allows; "" for any text
    grammar: str = ""  # llguidance's words for what the output is; json_schema is part of it then


@dataclass(frozen=True)
class GenerateRequest:
    """One attempt at a generation, under an id of its own.

    After a fail-over `emitted_token_ids` holds the output that the client has already. Nodes treat
    prompt + emitted as the tokens to prefill; output positions, `max_tokens` and the sampler's
    counter go on from `len(emitted_token_ids)`.

    router_id: who asks; what a node holds for a router that falls silent is given back.
    expires_at: on the clock of the node that gets the message (see NodeStatus.clock_s); it refuses
    what comes later, as the router may have given the attempt up and others have its pages.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    emitted_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""  # requests with different salts never share cached rows
    local: bool = False  # decode computes the prompt itself: nothing is prefilled elsewhere
    traceparent: str = ""  # the router's span, under which nodes put theirs
    priority: int = 0  # in the router's queue the lower goes first
    router_id: str = ""
    expires_at: float | None = None  # None: whenever it comes

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens that prefill computes."""
        return self.prompt_token_ids + self.emitted_token_ids

    @property
    def wants_scores(self) -> bool:
        """Whether the prompt's log-probabilities are still to be told; only prefill tells them."""
        return self.sampling.num_prompt_logprobs is not None and not self.emitted_token_ids

    @property
    def max_total_tokens(self) -> int:
        """Longest this request can become, prompt and output together."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens

    @property
    def admit_tokens(self) -> int:
        """Tokens for which decode takes pages at admission."""
        ahead = len(self.prompt_token_ids) + len(self.emitted_token_ids) + ADMIT_AHEAD_TOKENS
        return min(self.max_total_tokens, ahead)


@dataclass(frozen=True)
class PageRun:
    """Physical pages of logical pages [first, first + len(pages))."""

    first: int
    pages: tuple[int, ...]


@dataclass(frozen=True)
class PageGrant:
    """Pages in every pool of a decode node, promised to one request's transfer.

    `epoch` is drawn at random: who knows it holds the grant, what comes with another is dropped.
    The lease runs from the moment of receipt, the first one no longer than until `expires_at`;
    prefill must not post a write after it. Prefill computes `num_tokens` tokens; Full pools' rows
    that are complete at `skip_tokens` are on decode already.
    """

    grant_id: str
    epoch: int
    node_id: str
    incarnation: str
    request_id: str
    num_tokens: int
    pages: Mapping[TableSpec, PageRun]
    lease_s: float
    skip_tokens: int = 0
    expires_at: float | None = None  # on prefill's lease clock; None: lease_s after receipt


@dataclass(frozen=True)
class NodeInfo:
    """Who a node is. `agent` is the transport's opaque address; peers compare the rest."""

    node_id: str
    incarnation: str
    role: Role
    host: str
    fingerprint: str
    specs: tuple[PoolSpec, ...]
    max_model_len: int
    max_running_requests: int
    max_batch_tokens: int
    num_pages: Mapping[TableSpec, int]  # usable pages of each table
    agent: bytes = b""
    protocol_version: int = PROTOCOL_VERSION


class Logprobs(NamedTuple):
    """Natural log-probabilities at one output position, as the model gave them.

    Temperature, penalties and masks change what is drawn, not these. top: (token id,
    log-probability) of the likeliest tokens, best first. rank: of the token there, 1 for the
    likeliest; 0 where nobody asked.
    """

    chosen: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


@dataclass(frozen=True)
class PrefillResult:
    """The first output token. The pages are on decode when this arrives, unless it is the last.

    prompt_logprobs: of the prompt's tokens from the second on, if the request asks for them.
    """

    request_id: str
    token_id: int
    finish_reason: FinishReason | None
    num_cached_tokens: int = 0
    logprobs: Logprobs | None = None
    prompt_logprobs: tuple[Logprobs, ...] = ()


class TokenChunk(NamedTuple):
    """Output tokens of one request from one or more decode steps, or its failure.

    position: output tokens before these, so that a chunk that is lost or comes twice is noticed.
    logprobs: one for each token if the request asks for them, else none. cause: the error to raise
    for it, where it is not the node's.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None
    preempted: bool = False  # the node took the pages back: prefill again and go on
    logprobs: tuple[Logprobs, ...] = ()
    position: int = 0
    cause: SluiceError | None = None


@dataclass(frozen=True)
class MetricFamily:
    """One metric of a node or a router as plain data, to be exported by a router.

    samples: (sample name, labels, value), as prometheus_client collects them.
    """

    name: str
    kind: str
    help: str
    samples: tuple[tuple[str, Mapping[str, str], float], ...]


@dataclass(frozen=True)
class NodeStatus:
    """A node's gauges, as of now. `pools` counts pages: free, used and cached.

    cached: keys of the prefixes it has (cache/keys.py; their root is its fingerprint and a
    request's salt), as far as they changed after the version that the caller named. clock_s: the
    node's clock, by which it judges `expires_at`. requests: ids of the attempts that it holds for
    the router that asked; None if it does not tell.
    """

    node_id: str
    running: int
    waiting: int
    pools: Mapping[str, Mapping[str, int]]
    metrics: tuple[MetricFamily, ...] = ()
    cached: CacheReport = field(default_factory=CacheReport)
    clock_s: float | None = None
    requests: tuple[str, ...] | None = None


@dataclass(frozen=True)
class NodeEntry:
    """A node as the cluster sees it."""

    node_id: str
    role: Role
    state: NodeState
    host: str
    detail: str = ""  # why it is dead or still starting


@dataclass(frozen=True)
class RouterStatus:
    """What one router process says of itself."""

    router_id: str
    metrics: tuple[MetricFamily, ...]


@dataclass(frozen=True)
class ClusterState:
    targets: Mapping[Role, int]
    nodes: tuple[NodeEntry, ...] = field(default_factory=tuple)


class PrefillClient(Protocol):
    """A prefill node, seen from the router. Every call may raise NodeLost."""

    info: NodeInfo

    async def run(self, request: GenerateRequest, grant: PageGrant) -> PrefillResult:
        """Compute the prompt, write its pages to the grant, sample the first token.

        Raises TransferFailed if pages could not be delivered, NodeError if the request came too
        late, twice, or after its abort.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Stop the request; returns when nothing of it is in flight, nor will be.

        An id that is not known yet is refused if it comes later.
        """
        ...

    async def status(
        self, router_id: str, cache_version: int | None = None, *, with_metrics: bool = True
    ) -> NodeStatus:
        """The node's gauges; also this router's sign of life, without which the node frees.

        cache_version: of the last report of cached prefixes that the router has, 0 for none yet;
        None if it wants no report. with_metrics: not with a heartbeat, of which they would be the
        most.
        """
        ...


class DecodeClient(Protocol):
    """A decode node, seen from the router. Every call may raise NodeLost."""

    info: NodeInfo

    async def reserve(self, request: GenerateRequest) -> PageGrant:
        """Allocate pages in every pool for the whole request.

        Raises Refused, or NodeError if the request came too late or after its release. Asked
        again for an attempt that it holds, the node answers with the same grant.
        """
        ...

    async def release(self, request_id: str, *, in_flight: bool) -> None:
        """End the attempt and give its pages back.

        An id that is not known yet is refused if it comes later. in_flight: prefill could not be
        asked, so a write may still land: the pages are reused leases later. Call again to prolong
        that, and without it once prefill has answered.
        """
        ...

    def tokens(self, router_id: str, number: int = 0) -> AsyncIterator[list[TokenChunk]]:
        """All token chunks for this router's requests, a list for each step. One per router.

        number: grows from one stream of a router to its next, which ends those before it.
        """
        ...

    async def status(
        self, router_id: str, cache_version: int | None = None, *, with_metrics: bool = True
    ) -> NodeStatus: ...


class Cluster(Protocol):
    """What the admin endpoints need of whoever starts and stops nodes."""

    async def state(self) -> ClusterState: ...

    async def routers(self) -> Sequence[RouterStatus]:
        """Every router process that answers, the asking one too."""
        ...

    async def scale(self, role: Role, replicas: int) -> None:
        """Set the target; raises InvalidRequest outside the configured limits."""
        ...

    async def drain(self, node_id: str) -> None:
        """Let the node finish what runs and take it away; raises InvalidRequest if unknown."""
        ...
