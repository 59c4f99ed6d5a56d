"""Prompt: a request as the queue knows it: how long it is, and the keys of its tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from sluice.cache.keys import Key, chained_keys, root_key
from sluice.protocol.messages import GenerateRequest

if TYPE_CHECKING:
    from sluice.router.dispatch.cached import CachedPrefixes


class Need(NamedTuple):
    """Tokens that a request needs pages for on a node: to start there, and at most."""

    start_tokens: int
    max_tokens: int


class Prompt:
    """One attempt at a request. Keys are computed once for each unit that nodes count in.

    local: decode computes it. cached: what CachedPrefixes has found for it, which keeps it up to
    date.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.num_tokens = len(request.prompt_token_ids) + len(request.emitted_token_ids)
        self.local = request.local
        self.on_prefill = Need(self.num_tokens, self.num_tokens)
        self.on_decode = Need(request.admit_tokens, request.max_total_tokens)
        self.cached: dict[CachedPrefixes, tuple[int, int]] = {}
        self._keys: dict[tuple[str, int], tuple[Key, ...]] = {}

    def make_keys(self, units: Iterable[tuple[str, int]]) -> None:
        """Compute the keys for these identities and units; from any one thread."""
        for identity, unit_tokens in units:
            self.keys(identity, unit_tokens)

    def keys(self, identity: str, unit_tokens: int) -> tuple[Key, ...]:
        """Keys of the prompt's whole units, as a node of this identity computes them."""
        known = self._keys.get((identity, unit_tokens))
        if known is None:
            root = root_key(identity, self.request.cache_salt)
            known = chained_keys(root, self.request.token_ids, unit_tokens).units
            self._keys[identity, unit_tokens] = known
        return known
