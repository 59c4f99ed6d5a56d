"""StepPlanner: what every running request computes in the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sluice.cache.manager import CacheManager, NoRoom
from sluice.decode_node.grants import Stream
from sluice.engine.batch import Chunk


class Work(NamedTuple):
    """What a step computes of a request. in_prompt: tokens of its prompt, not its newest one."""

    stream: Stream
    chunk: Chunk
    in_prompt: bool


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
            if stream.unchosen is not None:  # a step ahead of its grammar: it sits out
                waiting.popleft()
                continue
            chunk = stream.next_chunk(budget)
            try:
                self._manager.extend(stream.request.grant_id, chunk.end)
            except NoRoom as error:
                preempt(waiting.pop(), error)
                continue
            waiting.popleft()
            in_prompt = chunk.start < stream.grant.num_tokens
            if in_prompt:
                budget -= chunk.num_tokens
            if chunk.end > chunk.start:
                ready.append(Work(stream, chunk, in_prompt))
        return ready
