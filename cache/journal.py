"""Journal: which keys a node has cached, told to others as what changed since they last asked."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass

from sluice.cache.keys import Key

# Whoever asks twice a second misses none of them up to 16,384 changes a second; whoever misses
# some gets everything anew, so this bounds memory and nothing else.
MAX_CHANGES = 8192


@dataclass(frozen=True)
class CacheReport:
    """The keys that came and went after version `since`; those of `since` 0 are all there are."""

    version: int = 0
    since: int = 0
    added: tuple[Key, ...] = ()
    removed: tuple[Key, ...] = ()


class Journal:
    """Keys and the last changes to them. The version counts the changes since the beginning."""

    def __init__(self, max_changes: int = MAX_CHANGES) -> None:
        self._keys: set[Key] = set()
        self._changes: deque[Key] = deque(maxlen=max_changes)
        self._version = 0

    def add(self, key: Key) -> None:
        self._keys.add(key)
        self._note(key)

    def remove(self, key: Key) -> None:
        self._keys.discard(key)
        self._note(key)

    def since(self, version: int) -> CacheReport:
        """What changed after `version`; everything if that is unknown or too long ago."""
        num_changes = self._version - version
        if version == 0 or not 0 <= num_changes <= len(self._changes):
            return CacheReport(self._version, added=tuple(self._keys))
        changed = set(itertools.islice(reversed(self._changes), num_changes))
        added = changed & self._keys
        return CacheReport(self._version, version, tuple(added), tuple(changed - added))

    def _note(self, key: Key) -> None:
        self._version += 1
        self._changes.append(key)
