"""Policy: which prefill node and which decode node a request goes to. No IO, no clock.

What a pair costs is what its prefill node costs and what its decode node costs, so the two are
chosen apart: no pair could be better than the best of both.

Who cannot start claims one node, which is then kept from those behind:
 - one without room on decode, the decode node with the most room
 - one without a prefill node, the best of them, or else the one with the most room; the first in
   line also its room on decode, since otherwise the one could be gone whenever the other comes
The first in line loses nothing to those behind, so it starts, and then the next is first.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from sluice.router.dispatch.cached import CachedPrefixes
from sluice.router.dispatch.ledger import Ledger
from sluice.router.dispatch.prompt import Need, Prompt


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

    @property
    def max_tokens(self) -> int:
        """Longest request that it can ever hold; 0 if new ones may not go there."""
        ...

    def room_tokens(self, beside: int = 0) -> int:
        """Longest request that can start there now, beside one of so many tokens; 0 for none."""
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


# Requests to pass over in one look: a look is short, even where they all wait for the same node.
MAX_CLAIMS = 128


class Policy:
    """Picks by one rule for each role. Holds no nodes; takes no credit."""

    def __init__(self, prefill_policy: str, decode_policy: str, seed: int | None = None) -> None:
        self.prefill_rule = PREFILL_RULES[prefill_policy]
        self.decode_rule = DECODE_RULES[decode_policy]
        self.random = random.Random(seed)
        self.picks = itertools.count(1)


class Turn(Generic[P, D]):
    """One look at those who wait, in their order. Whoever is given a pair takes its credit at once.

    claims: tokens to compute of those who wait, by the prefill node that they wait for.
    """

    def __init__(self, policy: Policy, prefill: Sequence[P], decode: Sequence[D]) -> None:
        self._policy = policy
        self._prefill = _Side(policy.prefill_rule, prefill, policy.random)
        self._decode = _Side(policy.decode_rule, decode, policy.random)
        self.claims = self._prefill.claims
        self._num_passed = 0

    @property
    def over(self) -> bool:
        """Nobody behind may start now."""
        return not self._decode.open or self._num_passed == MAX_CLAIMS

    @property
    def only_local(self) -> bool:
        """Nobody behind may start now who needs a prefill node, nor is there one to look at: the
        first in line has its claims."""
        return self._num_passed > 0 and not self._prefill.open

    def pick(self, prompt: Prompt, avoid: Collection[str] = ()) -> tuple[P | None, D] | None:
        """A pair that can start the request now, or None.

        A request whose prompt decode computes gets no prefill node. avoid: ids of nodes on which
        the request failed; they are taken only if no other node could ever hold it.
        """
        with_room = self._decode.with_room(prompt.on_decode, avoid)
        if not with_room:
            self._num_passed += 1
            return None
        if prompt.local:
            return None, self._give(self._decode, self._decode.best(with_room, prompt))
        prefill = self._prefill.find(prompt, prompt.on_prefill, avoid)
        if prefill is None:
            if self._num_passed == 0:
                self._decode.keep(self._decode.best(with_room, prompt), prompt.on_decode)
            self._num_passed += 1
            return None
        decode = self._decode.best(with_room, prompt)
        return self._give(self._prefill, prefill), self._give(self._decode, decode)

    def _give(self, side: _Side[N], spot: _Spot[N]) -> N:
        side.given = spot
        spot.node.last_picked = next(self._policy.picks)
        return spot.node


class _Spot(Generic[N]):
    """A node as one look sees it.

    kept_tokens: of the first in line, who keeps its place here. claimed: by one who waits for it.
    """

    __slots__ = (
        "claimed",
        "kept_tokens",
        "max_tokens",
        "node",
        "node_id",
        "room_tokens",
        "trusted",
    )

    def __init__(self, node: N) -> None:
        self.node = node
        self.node_id = node.node_id
        self.max_tokens = node.max_tokens
        self.kept_tokens = 0
        self.claimed = False
        self.refresh()

    def refresh(self) -> None:
        self.trusted = self.node.trusted
        self.room_tokens = 0 if self.claimed else self.node.room_tokens(self.kept_tokens)


class _Side(Generic[N]):
    """The nodes of one role in one look.

    claims: see Turn. open: whether any request could start here. given: the node that was given
    last, on which credit has been taken since.
    """

    def __init__(self, rule: Rule, nodes: Sequence[N], draw: random.Random) -> None:
        self.claims: dict[str, int] = {}
        self.given: _Spot[N] | None = None
        self._rule = rule
        self._draw = draw
        self._spots = [_Spot(node) for node in nodes]
        self._open = any(spot.room_tokens for spot in self._spots)

    @property
    def open(self) -> bool:
        self._take_note()
        return self._open

    def with_room(self, need: Need, avoid: Collection[str]) -> list[_Spot[N]]:
        """The nodes on which the request can start now; if there is none, one is claimed."""
        able = self._able(need, avoid)
        with_room = [spot for spot in able if need.start_tokens <= spot.room_tokens]
        if not with_room and able:
            self._claim(max(able, key=lambda spot: spot.room_tokens))
        return with_room

    def find(self, prompt: Prompt, need: Need, avoid: Collection[str]) -> _Spot[N] | None:
        """The node for the request, on which it can start now; or None, and one is claimed."""
        if not self._rule.waits:
            with_room = self.with_room(need, avoid)
            return self.best(with_room, prompt) if with_room else None
        able = self._able(need, avoid)
        if not able:
            return None
        best = self.best(able, prompt)
        if need.start_tokens <= best.room_tokens:
            return best
        uncached_tokens = _uncached_tokens(best.node, prompt)
        if with_room := [spot for spot in able if need.start_tokens <= spot.room_tokens]:
            idle = self.best(with_room, prompt)
            if _uncached_tokens(idle.node, prompt) <= uncached_tokens:
                return idle  # what the better one lacks is room, and it saves nothing
        self.claims[best.node_id] = self.claims.get(best.node_id, 0) + uncached_tokens
        self._claim(best)
        return None

    def best(self, spots: list[_Spot[N]], prompt: Prompt) -> _Spot[N]:
        """The first by the role's rule."""
        rank, claims, sample = self._rule.rank, self.claims, self._rule.sample
        if sample is not None and len(spots) > sample:
            spots = self._draw.sample(spots, sample)
        return min(spots, key=lambda s: (rank(s.node, prompt, claims), s.node.last_picked))

    def keep(self, spot: _Spot[N], need: Need) -> None:
        """Leave the request's room to it; others may have the rest."""
        spot.kept_tokens = need.start_tokens
        self._refresh(spot)

    def _able(self, need: Need, avoid: Collection[str]) -> list[_Spot[N]]:
        self._take_note()
        able = [spot for spot in self._spots if need.max_tokens <= spot.max_tokens]
        return [spot for spot in able if spot.trusted and spot.node_id not in avoid] or able

    def _claim(self, spot: _Spot[N]) -> None:
        """Nobody behind starts here."""
        spot.claimed = True
        self._refresh(spot)

    def _take_note(self) -> None:
        if self.given is not None:
            given, self.given = self.given, None
            self._refresh(given)

    def _refresh(self, spot: _Spot[N]) -> None:
        spot.refresh()
        self._open = any(other.room_tokens for other in self._spots)
