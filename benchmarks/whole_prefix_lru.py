"""What trace replays are compared with: whole prompts in one LRU list, without a tree."""

from __future__ import annotations

from collections import OrderedDict

from sluice.benchmarks.replay import Hits
from sluice.benchmarks.traces import Prompt, Trace


class WholePrefixLru:
    """Keeps each prompt's pages as one entry, and gives up the entry used longest ago.

    A prompt hits the longest beginning that it shares with any entry, up to the last resume point
    in it: there is one every `resume_every_tokens` and one at the end.
    """

    def __init__(
        self,
        *,
        max_bytes: int,
        bytes_per_token: float,
        resume_bytes: int,
        resume_every_tokens: int,
    ) -> None:
        self._left_bytes = max_bytes
        self._bytes_per_token = bytes_per_token
        self._resume_bytes = resume_bytes
        self._resume_every_tokens = resume_every_tokens
        self._entries: OrderedDict[tuple[int, ...], int] = OrderedDict()  # block ids -> bytes
        self._holding: dict[int, list[tuple[int, ...]]] = {}  # by block, entries that have it

    def hit_tokens(self, prompt: Prompt, block_tokens: int) -> int:
        """Tokens of the longest beginning to go on from; the entry that has it is used now."""
        for index in range(len(prompt.block_ids), 0, -1):
            if entries := self._holding.get(prompt.block_ids[index - 1]):
                self._entries.move_to_end(entries[-1])
                shared = min(index * block_tokens, prompt.num_tokens - 1)
                return shared // self._resume_every_tokens * self._resume_every_tokens
        return 0

    def add(self, prompt: Prompt) -> None:
        """Keep the prompt, unless it is there or is larger than the memory."""
        key = prompt.block_ids
        if key in self._entries:
            return
        num_resumes = 1 + (prompt.num_tokens - 1) // self._resume_every_tokens
        num_bytes = int(prompt.num_tokens * self._bytes_per_token)
        num_bytes += num_resumes * self._resume_bytes
        while self._left_bytes < num_bytes and self._entries:
            self._drop(*self._entries.popitem(last=False))
        if self._left_bytes >= num_bytes:
            self._left_bytes -= num_bytes
            self._entries[key] = num_bytes
            for block in key:
                self._holding.setdefault(block, []).append(key)

    def _drop(self, key: tuple[int, ...], num_bytes: int) -> None:
        self._left_bytes += num_bytes
        for block in key:
            self._holding[block].remove(key)
            if not self._holding[block]:
                del self._holding[block]


def replay_whole_prefixes(trace: Trace, cache: WholePrefixLru) -> Hits:
    """All prompts of the trace, one after another."""
    num_blocks = num_tokens = 0
    for prompt in trace.prompts:
        hit_tokens = cache.hit_tokens(prompt, trace.block_tokens)
        cache.add(prompt)
        num_blocks += hit_tokens // trace.block_tokens
        num_tokens += hit_tokens
    return Hits(num_blocks, num_tokens)
