"""StepPlanner: what every running request computes in the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from sluice.cache.manager import CacheManager, NoRoom
from sluice.decode_node.grants import Stream
from sluice.engine.batch import Chunk

Work = tuple[Stream, Chunk]


class StepPlanner:
    """Takes pages for what comes next, from the oldest request to the youngest.

    Where they run out the youngest is preempted: it goes on after another prefill. The oldest
    always goes on, since a request that does not fit by itself is never admitted. Prompts computed
    here share a budget of tokens, and wait a step where it is used up.
    """

    def __init__(self, manager: CacheManager, max_prompt_tokens: int) -> None:
        self._manager = manager
        self._max_prompt_tokens = max_prompt_tokens

    def next(
        self, running: Sequence[Stream], preempt: Callable[[Stream, NoRoom], None]
    ) -> list[Work]:
        """The step's work. `preempt` gives a request's pages back at once."""
        waiting = deque(running)
        budget = self._max_prompt_tokens
        ready = []
        while waiting:
            stream = waiting[0]
            chunk = stream.next_chunk(budget)
            try:
                self._manager.extend(stream.grant.grant_id, chunk.start, chunk.end)
            except NoRoom as error:
                preempt(waiting.pop(), error)
                continue
            waiting.popleft()
            if chunk.num_tokens:
                ready.append((stream, chunk))
            if stream.computes_prompt:
                budget -= chunk.num_tokens
        return ready
