"""StopFilter: lets text through up to the first stop string, however it is cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Holds back what may be the beginning of a stop string until that is decided.

    The stop string that is complete first ends the text; of two that end at the same character
    the longer one counts. The stop string itself is not part of the text.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """The text that may be shown now."""
        if not self._stop or self.stopped:
            return "" if self.stopped else piece
        text = self._held + piece
        if (start := self._first_match(text)) is not None:
            self.stopped, self._held = True, ""
            return text[:start]
        keep = self._num_undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text held back, when the output ended without completing a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> int | None:
        """Start of the match that ends first."""
        found = [(text.find(stop), len(stop)) for stop in self._stop]
        matches = [(start + length, start) for start, length in found if start >= 0]
        return min(matches)[1] if matches else None

    def _num_undecided(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string may begin with."""
        longest = max(len(stop) for stop in self._stop) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0
