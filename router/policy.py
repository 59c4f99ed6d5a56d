"""Policy: which prefill node and which decode node a request goes to. No IO, no clock.

What a pair costs is what its prefill node costs and what its decode node costs, so the two are
chosen apart: no pair could be better than the best of both.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from sluice.engine.protocol import GenerateRequest
from sluice.router.cached import CachedPrefixes
from sluice.router.ledger import Ledger
from sluice.router.prompt import Prompt


class Candidate(Protocol):
    """What a policy sees of a node."""

    last_picked: int  # order of picks
    ledger: Ledger
    cached: CachedPrefixes

    @property
    def node_id(self) -> str: ...

    @property
    def trusted(self) -> bool:
        """Whether requests that went there came to an end, or it is time to see if they do."""
        ...

    def could_hold(self, request: GenerateRequest) -> bool:
        """Whether the request fits at all, were it alone here."""
        ...

    def can_start(self, request: GenerateRequest) -> bool:
        """Whether the request can have its pages now."""
        ...


P = TypeVar("P", bound=Candidate)
D = TypeVar("D", bound=Candidate)
N = TypeVar("N", bound=Candidate)

Claims = Mapping[str, int]  # node id -> tokens of earlier requests that wait for it
Rank = Callable[[Candidate, Prompt, Claims], float]


def no_rank(node: Candidate, prompt: Prompt, claims: Claims) -> float:
    """All alike."""
    return 0.0


def load(node: Candidate, prompt: Prompt, claims: Claims) -> float:
    """How full the node is by its scarcest resource."""
    return node.ledger.load


# What waiting for a token costs, in computed tokens. Less than 1, as waiting delays this request
# alone, while a token computed twice delays all that come until the nodes are idle again, and takes
# the place of another one in the cache. Measured with benchmarks/policy_replay.py on the synthetic
# trace: 1 hits 70 % of what one node hits, 0.2 hits 94 %, 0.1 hits 96 %; the slowest hundredth
# waits 13.8, 5.8, 5.9 s.
WAIT_COST = 0.1


def tokens_to_compute(node: Candidate, prompt: Prompt, claims: Claims) -> float:
    """What it costs to compute the prompt here, after the work that is here already."""
    before = node.ledger.outstanding_tokens + claims.get(node.node_id, 0)
    return WAIT_COST * before + _uncached_tokens(node, prompt)


def share_taken(node: Candidate, prompt: Prompt, claims: Claims) -> float:
    """The part of a decode node that is taken once the prompt is here: of its batch, and of its
    pages, where the ones that hold the prompt already are neither sent nor taken again."""
    return node.ledger.share_with(prompt.request.admit_tokens - node.cached.num_tokens(prompt))


def _uncached_tokens(node: Candidate, prompt: Prompt) -> int:
    return prompt.num_tokens - node.cached.num_tokens(prompt)


@dataclass(frozen=True)
class Rule:
    """The node of the lowest rank; between equals, the one picked longest ago.

    sample: choose among so many, drawn at random. waits: the best node is worth waiting for while
    it is busy, as its rank counts the work before this.
    """

    rank: Rank
    sample: int | None = None
    waits: bool = False


COMMON = {
    "round_robin": Rule(no_rank),
    "least_loaded": Rule(load),
    "power_of_two": Rule(load, sample=2),
}
PREFILL_RULES = {**COMMON, "cache_aware": Rule(tokens_to_compute, waits=True)}
DECODE_RULES = {**COMMON, "cache_aware": Rule(share_taken)}


# Requests to pass over in one look, where they all wait for the same nodes. A look of so many takes
# the event loop a few milliseconds, and comes with every change of credit.
MAX_CLAIMS = 128


class Policy:
    """Picks by one rule for each role. Holds no nodes; takes no credit."""

    def __init__(self, prefill_policy: str, decode_policy: str, seed: int | None = None) -> None:
        self.prefill_rule = PREFILL_RULES[prefill_policy]
        self.decode_rule = DECODE_RULES[decode_policy]
        self.random = random.Random(seed)
        self.picks = itertools.count(1)


class Turn(Generic[P, D]):
    """One look at those who wait, in their order. `over`: nobody behind may start now."""

    def __init__(self, policy: Policy, prefill: Sequence[P], decode: Sequence[D]) -> None:
        self.over = False
        self.claims: dict[str, int] = {}
        self._num_claims = 0
        self._policy = policy
        self._prefill = prefill
        self._decode = decode

    def pick(self, prompt: Prompt, avoid: Collection[str] = ()) -> tuple[P | None, D] | None:
        """A pair that can start the request now, or None.

        A request whose prompt decode computes gets no prefill node. avoid: ids of nodes on which
        the request failed; they are taken only if no other node could ever hold it.
        """
        decode = self._choose(self._policy.decode_rule, self._decode, prompt, avoid)
        if decode is not None and prompt.request.local:
            decode.last_picked = next(self._policy.picks)
            return None, decode
        prefill = self._choose(self._policy.prefill_rule, self._prefill, prompt, avoid)
        if decode is None or prefill is None:
            self.over = True  # nobody overtakes
            return None
        if not self._free(prefill, prompt):
            self._claim(prefill, prompt)
            return None
        prefill.last_picked = decode.last_picked = next(self._policy.picks)
        return prefill, decode

    def _choose(
        self, rule: Rule, nodes: Sequence[N], prompt: Prompt, avoid: Collection[str]
    ) -> N | None:
        able = [node for node in nodes if node.could_hold(prompt.request)]
        able = [n for n in able if n.trusted and n.node_id not in avoid] or able
        if not rule.waits:
            able = [node for node in able if node.can_start(prompt.request)]
        if rule.sample is not None and len(able) > rule.sample:
            able = self._policy.random.sample(able, rule.sample)
        return min(
            able,
            key=lambda node: (rule.rank(node, prompt, self.claims), node.last_picked),
            default=None,
        )

    def _free(self, node: P, prompt: Prompt) -> bool:
        return node.node_id not in self.claims and node.can_start(prompt.request)

    def _claim(self, node: P, prompt: Prompt) -> None:
        """The node is kept for the request: only others' nodes may be given to those behind."""
        claimed = self.claims.get(node.node_id, 0)
        self.claims[node.node_id] = claimed + _uncached_tokens(node, prompt)
        self._num_claims += 1
        self.over = len(self.claims) == len(self._prefill) or self._num_claims == MAX_CLAIMS
