"""MessagesAnswer: an answer in the shape of Anthropic's Messages API, streamed or whole.

The whole answer is what its events add up to but for one thing: a call that was cut off has begun
in a stream, and stands in no whole answer, as its input is no object.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import jiter

from sluice.protocol.messages import FinishReason
from sluice.router.common.errors import anthropic_error
from sluice.router.openai.choices import ChatOutput
from sluice.router.openai.streaming import Event
from sluice.router.output_text import Delta
from sluice.router.text.answers.conversation import Part

Block = dict[str, Any]


class MessagesAnswer:
    """One answer."""

    done = ""

    def __init__(
        self, request_id: str, model: str, output: ChatOutput, num_prompt_tokens: int
    ) -> None:
        self._id = f"msg_{request_id}"
        self._model = model
        self._output = output
        self._num_prompt_tokens = num_prompt_tokens
        self._blocks: list[_OpenBlock] = []
        self._is_open = False  # the last block
        self._last: Delta | None = None

    def whole(self, deltas: Sequence[Sequence[Delta]]) -> dict[str, Any]:
        for delta in deltas[0]:
            self.events(0, delta)
        self.end()
        shown = [block.whole() for block in self._blocks]
        return self._message([block for block in shown if block is not None], **self._stop())

    def events(self, index: int, delta: Delta) -> list[Event]:
        begins, self._last = self._last is None, delta
        events = []
        if begins:
            message = self._message([], stop_reason=None, stop_sequence=None)
            events.append(_event("message_start", message=message))
        for part in self._output.parts(delta):
            events += self._take(part)
        return events

    def end(self) -> list[Event]:
        events = self._close()
        told = _event("message_delta", delta=self._stop(), usage=self._usage())
        return [*events, told, _event("message_stop")]

    def failed(self, error: dict[str, Any], *, status: int) -> Event:
        return Event(anthropic_error(error, status=status), "error")

    def _take(self, part: Part) -> list[Event]:
        events: list[Event] = []
        if not self._is_open or self._blocks[-1].owner != part.owner:
            events += self._close()
            self._blocks.append(_block_for(part))
            self._is_open = True
            begun = self._blocks[-1].begun()
            events.append(
                _event("content_block_start", index=len(self._blocks) - 1, content_block=begun)
            )
        delta = self._blocks[-1].add(part)
        return [*events, self._delta(delta)] if delta is not None else events

    def _close(self) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        index = len(self._blocks) - 1
        events = [self._delta(delta) for delta in self._blocks[-1].ended()]
        return [*events, _event("content_block_stop", index=index)]

    def _delta(self, delta: Block) -> Event:
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _stop(self) -> dict[str, Any]:
        last = self._last or Delta("", 0)
        if last.finish_reason is FinishReason.LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self._output.has_calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if last.stop_string:
            return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_string}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _message(self, content: list[Block], **stop: Any) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **stop,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        """Cached tokens are counted apart from the others of the prompt."""
        last = self._last or Delta("", 0)
        return {
            "input_tokens": self._num_prompt_tokens - last.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": last.num_cached_tokens,
            "output_tokens": last.num_tokens,
        }


class _OpenBlock:
    """A block while it grows. owner: of the parts it is made of."""

    owner: str | int

    def __init__(self) -> None:
        self.text = ""

    def begun(self) -> Block:
        raise NotImplementedError

    def add(self, part: Part) -> Block | None:
        """The delta that tells of it, if there is anything to tell."""
        raise NotImplementedError

    def ended(self) -> list[Block]:
        """Deltas at the end of the block."""
        return []

    def whole(self) -> Block | None:
        raise NotImplementedError


class _Text(_OpenBlock):
    owner = "content"

    def begun(self) -> Block:
        return {"type": "text", "text": ""}

    def add(self, part: Part) -> Block:
        self.text += part.content
        return {"type": "text_delta", "text": part.content}

    def whole(self) -> Block:
        return {"type": "text", "text": self.text}


class _Thinking(_OpenBlock):
    """Its signature is empty: nothing is hidden that would have to be recognised."""

    owner = "reasoning"

    def begun(self) -> Block:
        return {"type": "thinking", "thinking": "", "signature": ""}

    def add(self, part: Part) -> Block:
        self.text += part.reasoning
        return {"type": "thinking_delta", "thinking": part.reasoning}

    def ended(self) -> list[Block]:
        return [{"type": "signature_delta", "signature": ""}]

    def whole(self) -> Block:
        return {"type": "thinking", "thinking": self.text, "signature": ""}


class _ToolUse(_OpenBlock):
    def __init__(self, number: int, name: str) -> None:
        super().__init__()
        self.owner = number
        self._called = {"id": f"toolu_{uuid.uuid4().hex[:24]}", "name": name}

    def begun(self) -> Block:
        return {"type": "tool_use", **self._called, "input": {}}

    def add(self, part: Part) -> Block | None:
        assert part.call is not None, "a call goes on with its own pieces only"
        self.text += part.call.arguments
        if not part.call.arguments:
            return None
        return {"type": "input_json_delta", "partial_json": part.call.arguments}

    def whole(self) -> Block | None:
        try:
            given = jiter.from_json((self.text or "{}").encode(), allow_inf_nan=False)
        except ValueError:  # cut off, or nested without end
            return None
        return {"type": "tool_use", **self._called, "input": given}


def _block_for(part: Part) -> _OpenBlock:
    if part.call is not None:
        return _ToolUse(part.call.index, part.call.name or "")
    return _Thinking() if part.reasoning else _Text()


def _event(kind: str, **told: Any) -> Event:
    return Event({"type": kind, **told}, kind)
