"""RouterService: everything of the router but HTTP.

Life:
 1. constructed from config and cluster: reads tokenizer and limits, knows no node
 2. start: requests are taken
 3. set_nodes, whenever the cluster changes, from the event loop
 4. stop: nothing new is taken, what runs may finish within a limit, every grant is given back
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from sluice.cache.keys import secret_salt
from sluice.protocol.config import SluiceConfig
from sluice.protocol.messages import (
    Cluster,
    DeadlineExceeded,
    DecodeClient,
    GenerateRequest,
    PrefillClient,
    RouterStatus,
    SluiceError,
    Unavailable,
    UnknownModel,
)
from sluice.protocol.tracing import Span, begin_span
from sluice.router.accounting import recorded
from sluice.router.canary.canary import Canary
from sluice.router.common.auth import read_api_keys
from sluice.router.common.background import Background
from sluice.router.common.body import Bodies
from sluice.router.dispatch.dispatcher import Dispatcher, Tokens
from sluice.router.dispatch.nodes import Nodes
from sluice.router.dispatch.policy import Policy
from sluice.router.dispatch.queue import WaitingQueue
from sluice.router.dispatch.reservation import CALL_LIMIT_S
from sluice.router.metrics import RouterMetrics
from sluice.router.output_text import Delta, OutputText
from sluice.router.reading.readers import Readers
from sluice.router.shared import Shared
from sluice.router.text.answers.conversation import NO_LANDMARKS, Landmarks
from sluice.router.text.chat import ChatEncoder
from sluice.router.text.checkpoint import read_checkpoint
from sluice.router.text.grammar_judge import GrammarJudge
from sluice.router.text.token_text import TokenTexts
from sluice.router.troubles import Troubles

STATUS_LIMIT_S = 1.0  # how long /metrics and /admin/status wait for fresh numbers
ASK_EVERY_S = 0.25  # and how often they may ask every node for them, whoever wants them
STOP_LIMIT_S = 30.0


@dataclass(frozen=True)
class Job:
    """A request with what only the router knows of it.

    arrived: time.monotonic(). traceparent: the client's own, as it came. landmarks: of the answer.
    only_prompt: no output is wanted, only what is known of the prompt.
    """

    request: GenerateRequest
    stop: tuple[str, ...]
    arrived: float
    traceparent: str = ""
    landmarks: Landmarks = NO_LANDMARKS
    only_prompt: bool = False

    def span(self) -> Span:
        """The root of what we do for the request."""
        return begin_span(
            "request",
            self.traceparent,
            seconds_ago=time.monotonic() - self.arrived,
            request_id=self.request.request_id,
            prompt_tokens=len(self.request.prompt_token_ids),
        )


class RouterService:
    """Takes jobs and answers them with text, over the nodes that the cluster names.

    Everything runs in one event loop. Raises ConfigError if the checkpoint or the key file cannot
    be read.
    """

    def __init__(
        self, config: SluiceConfig, cluster: Cluster, router_id: str | None = None
    ) -> None:
        """router_id: whom nodes take us for; no process ever had it before."""
        self.config = config
        self.cluster = cluster
        self.checkpoint = read_checkpoint(config.model)
        self.encoder = ChatEncoder(self.checkpoint)
        self.readers = Readers(self.encoder, config.model, self.checkpoint.max_model_len)
        self.bodies = Bodies()
        self.grammars = GrammarJudge(config.model.path, self.checkpoint)
        self.token_texts = TokenTexts(self.checkpoint.tokenizer)
        self.api_keys = read_api_keys(config.router.api_keys_file)
        self.model_name = config.model.served_name
        self.created = int(time.time())
        self.router_id = router_id or f"router-{uuid.uuid4().hex[:12]}"
        self._background = Background()
        self.nodes = Nodes(
            router_id=self.router_id,
            lease_s=config.transfer.lease_s,
            shared=config.router.replicas > 1,
            background=self._background,
            on_change=lambda: self.queue.wake(),
        )
        self.queue = WaitingQueue(
            self.nodes,
            Policy(config.router.prefill_policy, config.router.decode_policy),
            max_waiting=config.router.max_queue,
            patience_s=config.transfer.lease_s,
        )
        self.metrics = RouterMetrics(
            lambda: self.nodes, lambda: len(self.queue), lambda: self._num_active
        )
        self._refreshes = Shared(lambda: self.nodes.refresh(STATUS_LIMIT_S), ASK_EVERY_S)
        self._scrapes = Shared(self._render_metrics, 0.0)
        self.troubles = Troubles()
        self.canary = self._make_canary()
        self._dispatcher = Dispatcher(
            self.queue,
            router_id=self.router_id,
            background=self._background,
            on_retry=lambda reason: self.metrics.retries.labels(reason).inc(),
            local_below_tokens=config.router.local_prefill_below_tokens,
        )
        self._accepting = False
        self._num_active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def ready(self) -> bool:
        """Whether a request that came now could be answered."""
        return self._accepting and not self._missing_roles()

    @property
    def num_running(self) -> int:
        """Requests not yet answered, those in the queue included."""
        return self._num_active

    async def start(self) -> None:
        """Take requests from now on."""
        self._accepting = True
        self.troubles.listen()

    async def stop(self, limit_s: float = STOP_LIMIT_S) -> None:
        """Take nothing new, let what runs finish for `limit_s`, end the rest with an error."""
        self._accepting = False
        if self.canary is not None:
            self.canary.retire()
        await self._wait_until_idle(limit_s)
        self.queue.close(Unavailable("the router is stopping; send the request again"))
        self.nodes.close("the router is stopping")
        await self._wait_until_idle(CALL_LIMIT_S)
        if self.canary is not None:
            await self.canary.close(CALL_LIMIT_S)
        await self._background.drain(2 * CALL_LIMIT_S)
        await self.readers.close()
        await self.grammars.close()
        self.troubles.close()

    def set_nodes(
        self,
        prefill: Sequence[PrefillClient],
        decode: Sequence[DecodeClient],
        draining: Collection[str] = (),
    ) -> None:
        """The cluster's nodes, all of them, as of now. Call it from the event loop.

        Nodes are told apart by id and incarnation. Requests on a node that is no longer named
        fail over at once; a draining one gets no new requests.
        """
        self.nodes.update(prefill, decode, draining)

    async def wait_idle(self, node_id: str) -> None:
        """Return when no request holds the node; at once if it is unknown."""
        if (node := self.nodes.find(node_id)) is not None:
            await node.ledger.idle.wait()

    async def refresh(self) -> None:
        """Fetch the nodes' gauges, so that what is shown is not a heartbeat old."""
        await self._refreshes.get()

    async def rendered_metrics(self) -> bytes:
        """The metrics of all routers and nodes, whichever router is asked."""
        return await self._scrapes.get()

    async def _render_metrics(self) -> bytes:
        await self.refresh()
        if self.config.router.replicas == 1:
            return self.metrics.render()
        try:
            async with asyncio.timeout(STATUS_LIMIT_S):
                return self.metrics.render(await self.cluster.routers())
        except (SluiceError, TimeoutError):  # a gap in the others' numbers
            return self.metrics.render([self.status()])

    def status(self) -> RouterStatus:
        return RouterStatus(self.router_id, self.metrics.families())

    def secret_salt(self, salt: str) -> str:
        """A client's cache_salt as nodes get it; routers of one deployment agree on it."""
        secret = self.config.router.prefix_secret
        return secret_salt("" if secret is None else secret.get_secret_value(), salt)

    def check_model(self, name: str | None) -> None:
        """Raises UnknownModel; None stands for the one model there is."""
        if name is not None and name != self.model_name:
            raise UnknownModel(f"model is {name!r}, expected {self.model_name!r}")

    def check_ready(self) -> None:
        """Raises Unavailable if the router is stopping or a role has no ready node."""
        if not self._accepting:
            raise Unavailable("the router is not taking requests; try another one, or later")
        if missing := self._missing_roles():
            raise Unavailable(f"no {' and no '.join(missing)} node is ready; try again in a moment")

    async def generate(
        self, request: GenerateRequest, deadline: float
    ) -> AsyncGenerator[Tokens, None]:
        """The request's output tokens. `deadline`: time.monotonic(); raises DeadlineExceeded."""
        self.check_ready()
        async with contextlib.aclosing(self._dispatcher.generate(request)) as stream:
            while True:
                try:
                    async with asyncio.timeout_at(_loop_time(deadline)):
                        tokens = await anext(stream)
                except StopAsyncIteration:
                    return
                except TimeoutError as error:
                    raise DeadlineExceeded(
                        f"no answer within {self.config.router.request_timeout_s:g} s "
                        "(router.request_timeout_s)"
                    ) from error
                yield tokens

    async def answer(self, job: Job) -> AsyncGenerator[Delta, None]:
        """The job's text, piece by piece; the last piece has a finish reason.

        Close the iterator to end the request early.
        """
        request = job.request
        deadline = job.arrived + self.config.router.request_timeout_s
        text = OutputText(
            self.checkpoint.tokenizer,
            job.stop,
            request.sampling.min_tokens,
            job.landmarks,
            only_prompt=job.only_prompt,
        )
        num_prompt_tokens = len(request.prompt_token_ids)
        with (
            self.counted(),
            recorded(self.metrics, request.request_id, num_prompt_tokens, job.arrived) as record,
            job.span() as span,
        ):
            if span.traceparent:
                request = replace(request, traceparent=span.traceparent)
            async with contextlib.aclosing(self.generate(request, deadline)) as stream:
                async for tokens in stream:
                    delta = text.take(tokens)
                    record.delta(delta, tokens.nodes)
                    yield delta
                    if delta.finish_reason is not None:
                        return

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """For the block, a client is being answered: `stop` waits for it."""
        self._num_active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_active -= 1
            if self._num_active == 0:
                self._idle.set()

    def _make_canary(self) -> Canary | None:
        if (config := self.config.router.canary) is None:
            return None
        return Canary(config, lambda result: self.metrics.canary_requests.labels(result).inc())

    async def _wait_until_idle(self, limit_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._idle.wait()

    def _missing_roles(self) -> list[str]:
        roles = (("prefill", self.nodes.prefill), ("decode", self.nodes.decode))
        return [role for role, nodes in roles if not any(node.ready for node in nodes)]


def _loop_time(monotonic: float) -> float:
    """A point of time.monotonic() on the event loop's clock."""
    return asyncio.get_running_loop().time() + monotonic - time.monotonic()
