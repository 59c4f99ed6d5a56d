"""Prompt: a request with the keys of its tokens, by which cached prefixes are known."""

from __future__ import annotations

from sluice.cache.keys import Key, chained_keys, root_key
from sluice.engine.protocol import GenerateRequest


class Prompt:
    """One attempt at a request. Keys are computed once for each unit that nodes count in."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self._keys: dict[tuple[str, int], tuple[Key, ...]] = {}

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.request.emitted_token_ids)

    def keys(self, identity: str, unit_tokens: int) -> tuple[Key, ...]:
        """Keys of the prompt's whole units, as a node of this identity computes them."""
        known = self._keys.get((identity, unit_tokens))
        if known is None:
            root = root_key(identity, self.request.cache_salt)
            known = chained_keys(root, self.request.token_ids, unit_tokens).units
            self._keys[identity, unit_tokens] = known
        return known
