"""Keys of cached prefixes: one chained hash for each unit of tokens.

A key stands for *all* tokens up to the end of its unit, and for everything else that cached rows
depend on (model, adapter, tenant's salt). The hash has a fixed seed, so that nodes and routers in
different processes agree.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

Key = bytes


@dataclass(frozen=True)
class PrefixKeys:
    """A prompt's keys: of the empty prefix, and of each whole unit of tokens."""

    root: Key
    units: tuple[Key, ...]

    def upto(self, num_units: int) -> PrefixKeys:
        return PrefixKeys(self.root, self.units[:num_units])

    @property
    def last(self) -> Key:
        return self.units[-1] if self.units else self.root


def root_key(*parts: str) -> Key:
    """The key of the empty prefix: what besides tokens the rows depend on."""
    return xxhash.xxh3_128_digest(b"\0".join(part.encode() for part in parts))


def chained_keys(root: Key, token_ids: Sequence[int], unit_tokens: int) -> PrefixKeys:
    """Keys of all whole units: the i-th covers the first (i + 1) * unit_tokens tokens."""
    tokens = memoryview(array("q", token_ids))
    keys = []
    key = root
    for end in range(unit_tokens, len(tokens) + 1, unit_tokens):
        hasher = xxhash.xxh3_128(key)
        hasher.update(tokens[end - unit_tokens : end])
        key = hasher.digest()
        keys.append(key)
    return PrefixKeys(root, tuple(keys))
