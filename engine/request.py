"""Request: one generation as a node sees it, between arrival and its last token."""

from __future__ import annotations

from array import array
from collections.abc import MutableSequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sluice.protocol.messages import FinishReason, GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from sluice.engine.penalties import TokenCounts
    from sluice.protocol.grammar import Matcher


@dataclass(slots=True)
class Request:
    """A generation's tokens and progress. Owned by the node's loop thread.

    grant_id names this attempt: pages and transfers are held under it, so that a retried request
    never meets what its first attempt left behind. token_ids: prompt and output so far, in an array
    on nodes: the garbage collector would walk long lists, while all streams wait.
    num_computed_tokens: tokens whose rows are in the pools. history_tokens: tokens whose rows in
    Full pools are shared and must not be written; more than are computed while tokens are replayed.
    wants_scores: this attempt has to tell the log-probabilities of its prompt.
    matcher, counts, biases, stops: what the choice of the next token remembers, so that a step need
    not work it out again.
    """

    request_id: str
    grant_id: str
    num_prompt_tokens: int
    sampling: SamplingParams
    token_ids: MutableSequence[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    history_tokens: int = 0
    wants_scores: bool = False
    matcher: Matcher | None = field(default=None, repr=False)
    counts: TokenCounts | None = field(default=None, repr=False)
    biases: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    stops: tuple[Tensor, Tensor] | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        request: GenerateRequest,
        grant_id: str,
        matcher: Matcher | None = None,
        token_ids: MutableSequence[int] | None = None,
    ) -> Request:
        """token_ids: the request's, if they are in an array already."""
        return cls(
            request_id=request.request_id,
            grant_id=grant_id,
            num_prompt_tokens=len(request.prompt_token_ids),
            sampling=request.sampling,
            wants_scores=request.wants_scores,
            token_ids=array("q", request.token_ids) if token_ids is None else token_ids,
            matcher=matcher,
        )

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def append(self, token_id: int) -> FinishReason | None:
        """Add an output token; says why the generation ends with it, if it does."""
        self.token_ids.append(token_id)
        if token_id in self.sampling.stop_token_ids:
            return FinishReason.STOP
        if self.num_output_tokens >= self.sampling.max_tokens:
            return FinishReason.LENGTH
        return None
