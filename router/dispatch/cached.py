"""CachedPrefixes: what the router knows of the prefixes that one node has cached.

    report ─────────► reported: what the node says it has, kept up with by what changed
    request sent ───► expected: what it will have, until reports can tell

A request's keys are expected from the moment it is sent until the second report after its end,
since the first may have been on its way already. What is known is at most what the node has, and
what the requests of the last reports' time add.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

from sluice.cache.journal import CacheReport
from sluice.cache.keys import Key
from sluice.router.dispatch.prompt import Prompt


class CachedPrefixes:
    """Counts in units of `unit_tokens`; identity: the node's, as its keys begin with."""

    def __init__(self, identity: str, unit_tokens: int) -> None:
        self._identity = identity
        self._unit_tokens = unit_tokens
        self._num_changes = 0  # of what is known
        self._reported: set[Key] = set()
        self.version = 0
        self._expected: Counter[Key] = Counter()
        self._sent: dict[str, tuple[Key, ...]] = {}
        self._ended: list[tuple[Key, ...]] = []  # since the last report
        self._ended_before: list[tuple[Key, ...]] = []  # since the one before it

    @property
    def key_unit(self) -> tuple[str, int]:
        return self._identity, self._unit_tokens

    def num_tokens(self, prompt: Prompt) -> int:
        """Tokens of the prompt's longest prefix that the node has, or will have."""
        known = prompt.cached.get(self)  # asked at every look at the queue
        if known is None or known[0] != self._num_changes:
            known = prompt.cached[self] = (self._num_changes, self._count(prompt))
        return known[1]

    def _count(self, prompt: Prompt) -> int:
        keys = prompt.keys(self._identity, self._unit_tokens)
        if not keys or self._lacks(keys[0]):  # as with most nodes
            return 0
        # A key is there only with all before it, in what nodes report as in what is expected.
        return bisect_left(keys, True, key=self._lacks) * self._unit_tokens

    def _lacks(self, key: Key) -> bool:
        return key not in self._reported and key not in self._expected

    def expect(self, holder: str, prompt: Prompt) -> None:
        """The prompt is on its way to the node."""
        keys = self._sent[holder] = prompt.keys(self._identity, self._unit_tokens)
        self._expected.update(keys)
        self._num_changes += 1

    def end(self, holder: str) -> None:
        """The holder has left the node, whose reports tell what it kept. Twice is harmless."""
        if (keys := self._sent.pop(holder, None)) is not None:
            self._ended.append(keys)

    def take(self, report: CacheReport) -> None:
        """Follow the node's report; one that another has overtaken changes nothing."""
        if report.version < self.version or report.since not in (0, self.version):
            return
        removed = self._reported if report.since == 0 else report.removed
        if removed or report.added or self._ended_before:
            self._num_changes += 1
        self._reported.difference_update(tuple(removed))
        self._reported.update(report.added)
        self.version = report.version
        self._forget(self._ended_before)
        self._ended_before, self._ended = self._ended, []

    def _forget(self, ended: list[tuple[Key, ...]]) -> None:
        """Reports tell of these keys by now."""
        for keys in ended:
            self._expected.subtract(keys)
            for key in keys:
                if self._expected[key] <= 0:
                    del self._expected[key]
