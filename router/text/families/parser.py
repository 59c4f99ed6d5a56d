"""FamilyParser: an answer of a model with its own template as reasoning, content and tool calls.

    [<think>] reasoning </think> content calls

After a marker, arguments are passed on while they come; other calls when they are whole, and what
turns out to be none is content as it stands. So nothing that was said is lost; line breaks around
reasoning and calls belong to the format.
"""

from __future__ import annotations

from collections.abc import Collection

from sluice.router.text.answers.conversation import Part
from sluice.router.text.answers.json_extent import Extent
from sluice.router.text.answers.parsing import StepParser
from sluice.router.text.families.tool_formats import (
    END_THINK,
    THINK,
    ToolFormat,
    read_begun_call,
    read_call,
)


class FamilyParser(StepParser):
    """One answer. calls: their format, None if there are none. names: of the tools there are.

    opened: the prompt ends within <think>. thinks: else the answer may begin with <think>.
    """

    def __init__(
        self,
        *,
        opened: bool = False,
        thinks: bool = False,
        calls: ToolFormat | None = None,
        names: Collection[str] = (),
    ) -> None:
        super().__init__()
        self._calls = calls
        self._names = names
        self._thinks = thinks or opened
        self._is_marked = False  # the calls at hand come after a marker
        self._has_called = False  # one of them has been read
        self._unread = ""  # what is content if no call follows it
        self._extent = Extent()
        self._num_scanned = 0  # characters of the buffer that it has seen
        self._step = self._before_reasoning if opened else self._begin

    def flush(self, *, complete: bool) -> list[Part]:
        if self._step in (self._reasoning, self._before_reasoning):
            self._think(self._buffer)
        elif self._step in (self._next_call, self._whole_call):
            self._end_in_call(complete=complete)
        elif self._step == self._arguments:
            self._argue(self._extent.missing if complete else "")
        elif self._step == self._end_of_call:
            pass  # there is nothing more to tell
        elif complete or not self._begins_next_call():
            self._say(self._unread + self._buffer)
        self._buffer = self._unread = ""
        return self._take()

    def _begins_next_call(self) -> bool:
        """Whether what was held back after a call is the beginning of another one's marker."""
        if self._calls is None or not self._num_calls:
            return False
        return self._calls.marker.startswith(self._buffer.strip("\n"))

    def _begin(self) -> bool:
        """Before the first thing said."""
        text = self._buffer.lstrip()
        if not text or (self._thinks and text != THINK and THINK.startswith(text)):
            return False
        if self._thinks and text.startswith(THINK):
            self._buffer, self._step = text.removeprefix(THINK), self._before_reasoning
        elif self._calls is not None and text[0] in self._calls.bare and not self._maybe_marker():
            self._step = self._next_call
        elif self._calls is not None and self._maybe_marker() and not self._has_marker():
            return False
        else:
            self._step = self._content
        return True

    def _maybe_marker(self) -> bool:
        assert self._calls is not None, "asked where there may be calls"
        text = self._buffer.lstrip()[: len(self._calls.marker)]
        return self._calls.marker.startswith(text)

    def _has_marker(self) -> bool:
        return self._calls is not None and self._buffer.lstrip().startswith(self._calls.marker)

    def _before_reasoning(self) -> bool:
        self._buffer = self._buffer.lstrip("\n")
        if self._buffer:
            self._step = self._reasoning
        return bool(self._buffer)

    def _reasoning(self) -> bool:
        text, found = self._up_to(END_THINK)
        self._think(text)
        if found:
            self._step, self._thinks = self._after_reasoning, False
        return found

    def _after_reasoning(self) -> bool:
        self._buffer = self._buffer.lstrip("\n")
        if self._buffer:
            self._step = self._begin
        return bool(self._buffer)

    def _content(self) -> bool:
        if self._calls is None:
            self._say(self._buffer)
            self._buffer = ""
            return False
        text, found = self._up_to(self._calls.marker)
        self._say(text)
        if found:
            self._is_marked, self._has_called = True, False
            self._unread, self._step = self._calls.marker, self._next_call
        return found

    def _next_call(self) -> bool:
        """Where a call should begin, or the answer should end."""
        assert self._calls is not None, "there are calls"
        rest = self._buffer.lstrip(self._calls.between)
        if not self._has_called:
            self._unread += self._buffer[: len(self._buffer) - len(rest)]
        self._buffer = rest
        if not rest:
            return False
        if rest[0] == "{":
            self._step, self._extent, self._num_scanned = self._whole_call, Extent(), 0
            return True
        if self._calls.end and self._calls.end.startswith(rest[: len(self._calls.end)]):
            if not rest.startswith(self._calls.end):
                return False
            self._buffer = rest.removeprefix(self._calls.end)
            self._step = self._after_call
            if not self._has_called:  # markers around nothing are what the model said
                self._say(self._unread + self._calls.end)
        else:
            self._step = self._content
            self._say(self._unread)
        self._unread = ""
        return True

    def _after_call(self) -> bool:
        """Line breaks between calls are no content."""
        self._buffer = self._buffer.lstrip("\n")
        if self._buffer:
            self._step = self._content
        return bool(self._buffer)

    def _whole_call(self) -> bool:
        """A call from its beginning on: what has a marker and begins as one may be passed on."""
        if self._is_marked and (begun := read_begun_call(self._buffer)) is not None and begun[1]:
            self._add(begun[0], "")
            self._buffer, self._unread = begun[1], ""
            self._step, self._extent = self._arguments, Extent()
            return True
        end = self._extent.end_in(self._buffer[self._num_scanned :])
        if end is None:
            self._num_scanned = len(self._buffer)
            return False
        end += self._num_scanned
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        self._step = self._next_call
        call = read_call(text)
        if call is None or not self._is_offered(call[0]):
            self._say(self._unread + text)
            self._step = self._content
        else:
            self._add(*call)
        self._unread = ""
        return True

    def _arguments(self) -> bool:
        end = self._extent.end_in(self._buffer)
        piece, self._buffer = self._buffer[:end], "" if end is None else self._buffer[end:]
        self._argue(piece)
        if end is not None:
            self._step, self._extent = self._end_of_call, Extent("{")
        return end is not None

    def _end_of_call(self) -> bool:
        """What stands between the arguments and the end of the call's object."""
        end = self._extent.end_in(self._buffer)
        self._buffer = "" if end is None else self._buffer[end:]
        if end is not None:
            self._step = self._next_call
        return end is not None

    def _end_in_call(self, *, complete: bool) -> None:
        """An answer that is cut off within a call has what there is of it."""
        call = read_begun_call(self._buffer)
        if call is not None and self._is_offered(call[0]):
            self._add(*call)
        elif complete or not (self._is_marked or self._has_called):
            self._say(self._unread + self._buffer)

    def _is_offered(self, name: str) -> bool:
        """Where no marker says that it is a call, its name has to."""
        return self._is_marked or name in self._names

    def _up_to(self, marker: str) -> tuple[str, bool]:
        """The text before the marker, and whether that came; what may be of it is held back."""
        before, found, after = self._buffer.partition(marker)
        if found:
            self._buffer = after
            return before.rstrip("\n"), True
        held = next(n for n in range(len(marker) - 1, -1, -1) if before.endswith(marker[:n]))
        kept = len(before[: len(before) - held].rstrip("\n"))
        self._buffer = before[kept:]
        return before[:kept], False

    def _add(self, name: str, arguments: str) -> None:
        self._call(name, arguments)
        self._has_called = True
