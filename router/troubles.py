"""Troubles: the latest warnings and errors of this process, for the status page.

They are the log's own lines, which carry ids, counts and reasons but no prompt and no answer.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

MAX_KEPT = 20
MAX_CHARACTERS = 300


@dataclass(frozen=True)
class Trouble:
    """One log line: its event, and the rest as it was written. `at`: seconds since the epoch."""

    at: float
    event: str
    detail: str


class Troubles(logging.Handler):
    """Hears the project's logger from `listen` to `close`, and keeps the last MAX_KEPT lines."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kept: deque[Trouble] = deque(maxlen=MAX_KEPT)

    def __iter__(self) -> Iterator[Trouble]:
        """The latest first."""
        return reversed(tuple(self._kept))

    def listen(self) -> None:
        logging.getLogger("sluice").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        event, _, detail = record.getMessage().removeprefix("event=").partition(" ")
        self._kept.append(Trouble(record.created, event, detail[:MAX_CHARACTERS]))

    def close(self) -> None:
        logging.getLogger("sluice").removeHandler(self)
        super().close()
