"""StopFilter: lets text through up to the first stop string, however it is cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Holds back what may be the beginning of a stop string until that is decided.

    The stop string that is complete first ends the text; of two that end at the same character
    the longer one counts. The stop string itself is not part of the text.

    stopped_at: the stop string that came; "" while none has.

    ends: from the first of these on, nothing is looked at any more: what follows is no text.
    """

    def __init__(self, stop: Sequence[str], ends: Sequence[str] = ()) -> None:
        self._stop = tuple(stop)
        self._ends = tuple(ends)
        self._held = ""
        self.stopped_at = ""

    @property
    def stopped(self) -> bool:
        return bool(self.stopped_at)

    def push(self, piece: str) -> str:
        """The text that may be shown now."""
        if not self._stop or self.stopped:
            return "" if self.stopped else piece
        text = self._held + piece
        found = [at for end in self._ends if (at := text.find(end)) >= 0]
        watched = min(found, default=len(text) - num_undecided(text, self._ends))
        if (match := self._first_match(text[:watched])) is not None:
            end, start = match
            self.stopped_at, self._held = text[start:end], ""
            return text[:start]
        if found:
            self._stop, self._held = (), ""
            return text
        keep = max(len(text) - watched, num_undecided(text, self._stop))
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text held back, when the output ended without completing a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, int] | None:
        """End and start of the match that ends first."""
        found = [(text.find(stop), len(stop)) for stop in self._stop]
        matches = [(start + length, start) for start, length in found if start >= 0]
        return min(matches, default=None)


def num_undecided(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that one of the markers begins with."""
    longest = max((len(marker) for marker in markers), default=0) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[len(text) - length :]
        if any(marker.startswith(end) for marker in markers):
            return length
    return 0
