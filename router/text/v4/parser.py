"""V4Parser: DeepSeek-V4's output as reasoning, content and tool calls, while it comes.

    reasoning </think> content [\\n\\n <tool_calls> { <invoke> { <parameter> value } } ] [content]

The markers are whole only when all their text is there, so whatever may be the beginning of one is
held back until that is decided. Models make mistakes: missing ends are supplied, a call from within
the reasoning ends it, and text that belongs nowhere is content; nothing that was said is lost, but
for markers of which only the beginning has come: they are never text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from sluice.router.text.answers.conversation import Part
from sluice.router.text.answers.json_extent import Extent
from sluice.router.text.answers.parsing import StepParser
from sluice.router.text.answers.stop import num_undecided
from sluice.router.text.v4 import words as v4

OPEN_INVOKE = f"<{v4.DSML}invoke"
OPEN_PARAMETER = f"<{v4.DSML}parameter"
INVOKE = re.compile(rf'<{v4.DSML}invoke\s+name="([^"]*)"\s*>')
PARAMETER = re.compile(rf'<{v4.DSML}parameter\s+name="([^"]*)"(?:\s+string="(true|false)")?\s*>')
CONTAINER = re.compile(r'\s*(\{\s*["}]|\[\s*["\]\[{\-0-9tfn])')
TAGS = (OPEN_INVOKE, OPEN_PARAMETER, v4.CLOSE_INVOKE, v4.CLOSE_CALLS)
GAPS = ("\n\n", "\n", "")  # what the format puts between content and calls
BEGIN_OF_CALLS = tuple(gap + v4.OPEN_CALLS for gap in GAPS)
VALUE_ENDS = [v4.CLOSE_PARAMETER, v4.CLOSE_INVOKE]  # the second where the first is missing


class V4Parser(StepParser):
    """One answer. reasoning: it begins within <think>. calls: the request offered tools."""

    def __init__(self, *, reasoning: bool, calls: bool) -> None:
        super().__init__()
        self._calls = calls
        self._num_parameters = 0
        self._is_string = False
        self._extent = Extent()  # of an array or object that is passed on
        self._begins = True
        self._has_said = False
        self._step = self._reasoning if reasoning else self._begin

    def flush(self, *, complete: bool) -> list[Part]:
        """complete: ends that the model left out are supplied; else calls stay as they are."""
        values = (self._string, self._value, self._container)
        in_call = self._step in (self._between_parameters, *values)
        if self._step == self._reasoning:
            self._think(self._rest(complete=complete))
        elif self._step == self._container:
            self._contain(self._up_to(VALUE_ENDS)[0].rstrip())
            self._argue(self._extent.missing if complete else "")
        elif self._step in values:
            text, _ = self._up_to(VALUE_ENDS)  # the beginning of an end is no part of the value
            is_cut = self._step == self._value and not complete
            self._argue(text if is_cut else self._argument(text))
        elif self._step in (self._begin, self._content):
            self._say(self._rest(complete=complete))
        else:
            self._say(self._before_tags().strip())
        self._buffer = ""
        if in_call and complete:
            self._close_call()
        return self._take()

    def _rest(self, *, complete: bool) -> str:
        """What was held back, unless it is the beginning of a marker as far as one can tell."""
        is_marker = "<" in self._buffer or not self._has_said
        is_cut = self._buffer and not complete and is_marker
        return "" if is_cut or v4.DSML in self._buffer else self._buffer

    def _before_tags(self) -> str:
        found = [at for tag in TAGS if (at := self._buffer.find(tag)) >= 0]
        end = len(self._buffer) - num_undecided(self._buffer, TAGS)
        return self._buffer[: min(found, default=end)]

    def _begin(self) -> bool:
        """Before the content. A model may end its reasoning twice, or open it once more."""
        for marker, step in ((v4.END_THINK, self._begin), (v4.THINK, self._reasoning)):
            if self._buffer.startswith(marker):
                self._buffer, self._step = self._buffer.removeprefix(marker), step
                return True
            if marker.startswith(self._buffer):
                return False
        self._step = self._content
        return True

    def _reasoning(self) -> bool:
        if self._begins and self._buffer.startswith(v4.THINK):
            self._buffer = self._buffer.removeprefix(v4.THINK)  # the prompt has it already
        self._begins = self._begins and v4.THINK.startswith(self._buffer)
        if self._begins:
            return False
        markers = [v4.END_THINK, *(BEGIN_OF_CALLS if self._calls else ())]
        text, marker = self._up_to(markers)
        self._think(text)
        if marker is None:
            return False
        self._step = self._begin if marker == v4.END_THINK else self._between_calls
        return True

    def _content(self) -> bool:
        markers = BEGIN_OF_CALLS if self._calls else ()
        text, marker = self._up_to(markers)
        self._say(text)
        if marker is not None:
            self._step = self._between_calls
        return marker is not None

    def _between_calls(self) -> bool:
        """In the block of calls, before an invoke or the block's end."""
        self._buffer = self._buffer.lstrip()
        if self._buffer.startswith(v4.CLOSE_CALLS):
            self._buffer = self._buffer.removeprefix(v4.CLOSE_CALLS)
            self._step = self._content
            return True
        if (header := self._header(INVOKE)) is not None:
            self._open_call(header[1])
            return True
        return self._skip((OPEN_INVOKE, v4.CLOSE_CALLS))

    def _between_parameters(self) -> bool:
        """In an invoke, before a parameter or the invoke's end."""
        self._buffer = self._buffer.lstrip()
        if self._buffer.startswith(v4.CLOSE_INVOKE):
            self._buffer = self._buffer.removeprefix(v4.CLOSE_INVOKE)
            self._close_call()
            return True
        if self._buffer.startswith((v4.CLOSE_CALLS, OPEN_INVOKE)):  # the end is missing
            self._close_call()
            return True
        if (header := self._header(PARAMETER)) is not None:
            self._open_parameter(header[1], header[2])
            return True
        return self._skip(TAGS)

    def _string(self) -> bool:
        """In a string's value, which is passed on while it comes."""
        text, marker = self._up_to(VALUE_ENDS)
        self._argue(_escaped(text))
        if marker is None:
            return False
        self._argue('"')
        self._end_value(marker)
        return True

    def _value(self) -> bool:
        """In any other value, which is passed on when it is whole and known to be JSON.

        An array or an object, which may be long, is passed on while it comes, once it has begun as
        JSON does; but for missing ends, what a model writes wrong from there on stays so.
        """
        if CONTAINER.match(self._buffer):
            self._buffer = self._buffer.lstrip()
            self._step, self._extent = self._container, Extent()
            return True
        if not any(end in self._buffer for end in VALUE_ENDS):
            return False
        text, marker = self._up_to(VALUE_ENDS)
        assert marker is not None, "one of the ends is there"
        self._argue(_as_json(text))
        self._end_value(marker)
        return True

    def _container(self) -> bool:
        text, marker = self._up_to(VALUE_ENDS)
        shown = text.rstrip()  # white space may be the last before the end, which is no part of it
        self._contain(shown)
        if marker is None:
            self._buffer = text[len(shown) :] + self._buffer
            return False
        self._argue(self._extent.missing)
        self._end_value(marker)
        return True

    def _contain(self, text: str) -> None:
        self._argue(text)
        self._extent.end_in(text)

    def _argument(self, text: str) -> str:
        return _escaped(text) if self._is_string else _as_json(text)

    def _end_value(self, marker: str) -> None:
        if marker != v4.CLOSE_PARAMETER:
            self._buffer = marker + self._buffer
        self._is_string = False
        self._step = self._between_parameters

    def _open_call(self, name: str) -> None:
        self._num_parameters = 0
        self._call(name)
        self._argue("{")
        self._step = self._between_parameters

    def _open_parameter(self, name: str, is_string: str | None) -> None:
        self._argue(("" if self._num_parameters == 0 else ", ") + _json(name) + ": ")
        self._num_parameters += 1
        self._is_string = is_string == "true"
        if self._is_string:
            self._argue('"')
        self._step = self._string if self._is_string else self._value

    def _close_call(self) -> None:
        if self._is_string:
            self._argue('"')
            self._is_string = False
        self._argue("}")
        self._step = self._between_calls

    def _header(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """The tag at the buffer's beginning, taken out of it; None if it is not whole, or other."""
        if (header := pattern.match(self._buffer)) is not None:
            self._buffer = self._buffer[header.end() :]
        return header

    def _skip(self, tags: tuple[str, ...]) -> bool:
        """Where a tag is expected: wait for its rest; what is none, up to the next, is content."""
        unfinished = self._buffer.startswith(tags) and ">" not in self._buffer
        ends = [at for tag in tags if (at := self._buffer.find(tag, 1)) > 0]
        if unfinished or not ends:
            return False
        self._say(self._buffer[: min(ends)])
        self._buffer = self._buffer[min(ends) :]
        return True

    def _up_to(self, markers: Sequence[str]) -> tuple[str, str | None]:
        """Take text off the buffer: up to and with the first marker, or as far as it is certain."""
        found = [(self._buffer.find(marker), marker) for marker in markers]
        hits = [(at, marker) for at, marker in found if at >= 0]
        if hits:
            at, marker = min(hits, key=lambda hit: hit[0])
            text, self._buffer = self._buffer[:at], self._buffer[at + len(marker) :]
            return text, marker
        keep = num_undecided(self._buffer, markers)
        cut = len(self._buffer) - keep
        text, self._buffer = self._buffer[:cut], self._buffer[cut:]
        return text, None

    def _say(self, text: str) -> None:
        self._has_said = self._has_said or bool(text)
        super()._say(text)


def _json(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _escaped(text: str) -> str:
    """The inside of a JSON string; pieces of a string can be escaped one by one."""
    return _json(text)[1:-1]


def _as_json(text: str) -> str:
    """The value as JSON text: as it stands where it is JSON, else as a string."""
    try:
        json.loads(text, parse_constant=_refuse)
    except ValueError:
        return _json(text)
    return text.strip()


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
