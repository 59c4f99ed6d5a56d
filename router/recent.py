"""Recent: what the status page says of the last minute and of the latest requests."""

from __future__ import annotations

import statistics
import time
from collections import Counter, deque
from collections.abc import Callable

WINDOW_S = 60
NUM_LATEST = 100  # requests that a median is taken over


class Recent:
    """Bounded, whatever the load. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tokens: Counter[int] = Counter()  # by whole second
        self._first_token_s: deque[float] = deque(maxlen=NUM_LATEST)
        self._per_token_s: deque[float] = deque(maxlen=NUM_LATEST)

    def add_tokens(self, num_tokens: int) -> None:
        """Output tokens were handed to a client just now."""
        now = int(self._clock())
        if now not in self._tokens:
            for second in [s for s in self._tokens if s < now - WINDOW_S]:
                del self._tokens[second]
        self._tokens[now] += num_tokens

    def add_first_token(self, seconds: float) -> None:
        self._first_token_s.append(seconds)

    def add_per_token(self, seconds: float) -> None:
        self._per_token_s.append(seconds)

    def tokens_by_second(self) -> list[int]:
        """Output tokens in each of the last WINDOW_S whole seconds, the oldest first."""
        now = int(self._clock())
        return [self._tokens[second] for second in range(now - WINDOW_S, now)]

    @property
    def median_first_token_s(self) -> float | None:
        return _median(self._first_token_s)

    @property
    def median_per_token_s(self) -> float | None:
        return _median(self._per_token_s)


def _median(values: deque[float]) -> float | None:
    return statistics.median(values) if values else None
