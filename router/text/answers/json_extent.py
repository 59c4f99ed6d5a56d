"""Extent: where JSON ends that a model writes piece by piece, and what it lacks where it stops."""

from __future__ import annotations

CLOSERS = {"{": "}", "[": "]"}


class Extent:
    """An object or array, from its first bracket on. Each character is looked at once."""

    def __init__(self, opened: str = "") -> None:
        """opened: brackets that came before."""
        self._closers = [CLOSERS[bracket] for bracket in opened]
        self._ended = False
        self._in_string = False
        self._escaped = False
        self._last = ""  # character that was no white space

    def end_in(self, piece: str) -> int | None:
        """The place after the end in the next piece; None if it goes on."""
        if self._ended:
            return 0
        for place, character in enumerate(piece):
            self._take(character)
            if not self._closers:
                self._ended = True
                return place + 1
        return None

    @property
    def missing(self) -> str:
        """What ends it where it stands now."""
        if self._ended:
            return ""
        value = "null" if self._last and self._last in ",:" and not self._in_string else ""
        string = ("\\" if self._escaped else "") + '"' if self._in_string else ""
        return string + value + "".join(reversed(self._closers))

    def _take(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif self._in_string:
            self._escaped = character == "\\"
            self._in_string = character != '"'
        elif character == '"':
            self._in_string = True
        elif character in CLOSERS:
            self._closers.append(CLOSERS[character])
        elif character in "}]" and self._closers:
            self._closers.pop()
        if not character.isspace():
            self._last = character
