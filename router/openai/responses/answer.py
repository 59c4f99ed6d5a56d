"""ResponsesAnswer: an answer in the shape of OpenAI's Responses API, streamed or whole.

The whole answer is what its events add up to, so the two cannot differ. An output is a row of
items, reasoning, message or function call, each of which is complete before the next one begins.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from sluice.protocol.messages import FinishReason
from sluice.router.openai.choices import ChatOutput, described
from sluice.router.openai.streaming import Event
from sluice.router.output_text import Delta, Scored
from sluice.router.text.answers.conversation import Part
from sluice.router.text.token_text import TokenTexts

Item = dict[str, Any]


class ResponsesAnswer:
    """One answer. repeated: what it shows of its request (responses_request)."""

    done = ""

    def __init__(
        self,
        request_id: str,
        model: str,
        output: ChatOutput,
        num_prompt_tokens: int,
        repeated: dict[str, Any],
        texts: TokenTexts,
        *,
        with_logprobs: bool,
    ) -> None:
        self._id = f"resp_{request_id}"
        self._model = model
        self._output = output
        self._num_prompt_tokens = num_prompt_tokens
        self._repeated = repeated
        self._texts = texts
        self._with_logprobs = with_logprobs
        self._created = int(time.time())
        self._items: list[Item] = []
        self._open: _OpenItem | None = None  # the last of the items, while it grows
        self._scored: list[Scored] = []  # whose text has not come yet
        self._last: Delta | None = None
        self._num_events = 0

    def whole(self, deltas: Sequence[Sequence[Delta]]) -> dict[str, Any]:
        for delta in deltas[0]:
            self.events(0, delta)
        self.end()
        return self._response(self._status)

    def events(self, index: int, delta: Delta) -> list[Event]:
        events = []
        if self._last is None:
            for name in ("created", "in_progress"):
                events.append(self._of_response(name, "in_progress"))
        self._last = delta
        self._scored += delta.scored
        for part in self._output.parts(delta):
            events += self._take(part)
        return events

    def end(self) -> list[Event]:
        """The last item is complete, and with it the answer, or what was said of it."""
        events = [] if self._items or self._output.must_call else self._begin(_Message())
        events += self._close(self._status)
        return [*events, self._of_response(self._status, self._status)]

    def failed(self, error: dict[str, Any], *, status: int) -> Event:
        told = {"code": "server_error", "message": error["error"]["message"]}
        return self._event("response.failed", response=self._response("failed") | {"error": told})

    def _take(self, part: Part) -> list[Event]:
        events: list[Event] = []
        if (item := self._open) is None or item.owner != part.owner:
            item = _item_for(part)
            events = [*self._close("completed"), *self._begin(item)]
        name, told = item.add(part)
        if isinstance(item, _Message):
            logprobs = self._logprobs()
            item.logprobs += logprobs
            told = told | {"logprobs": logprobs}
        elif self._scored:
            self._scored.clear()  # of tokens that are no text of a message
        place = item.place
        return [*events, self._event(f"response.{name}.delta", **place, **told)]

    def _begin(self, item: _OpenItem) -> list[Event]:
        item.index = len(self._items)
        self._items.append(item.shown("in_progress"))
        self._open = item
        added = self._event(
            "response.output_item.added", output_index=item.index, item=item.begun()
        )
        if (part := item.content_part(empty=True)) is None:
            return [added]
        return [added, self._event("response.content_part.added", **item.place, part=part)]

    def _close(self, status: str) -> list[Event]:
        """What is told of the open item, if there is one, when nothing more comes."""
        if (item := self._open) is None:
            return []
        self._open = None
        shown = self._items[item.index] = item.shown(status)
        name, told = item.ended()
        events = [self._event(f"response.{name}.done", **item.place, **told)]
        if (part := item.content_part(empty=False)) is not None:
            events.append(self._event("response.content_part.done", **item.place, part=part))
        done = self._event("response.output_item.done", output_index=item.index, item=shown)
        return [*events, done]

    def _logprobs(self) -> list[Item]:
        if not self._with_logprobs:
            return []
        scored, self._scored = self._scored, []
        return [described(token, self._texts) for token in scored]

    @property
    def _status(self) -> str:
        cut = self._last is not None and self._last.finish_reason is FinishReason.LENGTH
        return "incomplete" if cut else "completed"

    def _of_response(self, name: str, status: str) -> Event:
        return self._event(f"response.{name}", response=self._response(status))

    def _event(self, name: str, /, **told: Any) -> Event:
        number, self._num_events = self._num_events, self._num_events + 1
        return Event({"type": name, "sequence_number": number, **told}, name)

    def _response(self, status: str) -> dict[str, Any]:
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": incomplete,
            "model": self._model,
            "output": list(self._items),
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "truncation": "disabled",
            "usage": None if status == "in_progress" else self._usage(),
            "user": None,
            **self._repeated,
        }

    def _usage(self) -> dict[str, Any]:
        last = self._last or Delta("", 0)
        return {
            "input_tokens": self._num_prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": last.num_cached_tokens,
                "cache_write_tokens": 0,  # what nobody is billed for
            },
            "output_tokens": last.num_tokens,
            "output_tokens_details": {"reasoning_tokens": last.num_reasoning_tokens},
            "total_tokens": self._num_prompt_tokens + last.num_tokens,
        }


class _OpenItem:
    """An item while it grows. owner: of the parts it is made of. kind: as events name it."""

    owner: str | int
    prefix: str
    kind: str
    text_kind: str

    def __init__(self) -> None:
        self.id = f"{self.prefix}_{uuid.uuid4().hex}"
        self.index = 0  # among the answer's items
        self.text = ""

    @property
    def place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.index, "content_index": 0}

    def add(self, part: Part) -> tuple[str, dict[str, Any]]:
        """The name of the event that tells of it, and its text."""
        piece = part.reasoning or part.content
        self.text += piece
        return self.kind, {"delta": piece}

    def ended(self) -> tuple[str, dict[str, Any]]:
        return self.kind, {"text": self.text}

    def content_part(self, *, empty: bool) -> dict[str, Any] | None:
        return {"type": self.text_kind, "text": "" if empty else self.text}

    def begun(self) -> Item:
        return self.shown("in_progress") | {"content": []}

    def shown(self, status: str) -> Item:
        raise NotImplementedError


class _Reasoning(_OpenItem):
    owner = "reasoning"
    prefix, kind, text_kind = "rs", "reasoning_text", "reasoning_text"

    def shown(self, status: str) -> Item:
        content = [self.content_part(empty=False)]
        return {
            "id": self.id,
            "type": "reasoning",
            "summary": [],
            "content": content,
            "status": status,
        }


class _Message(_OpenItem):
    owner = "content"
    prefix, kind, text_kind = "msg", "output_text", "output_text"

    def __init__(self) -> None:
        super().__init__()
        self.logprobs: list[Item] = []

    def ended(self) -> tuple[str, dict[str, Any]]:
        return self.kind, {"text": self.text, "logprobs": self.logprobs}

    def content_part(self, *, empty: bool) -> dict[str, Any]:
        logprobs = [] if empty else self.logprobs
        text = "" if empty else self.text
        return {"type": self.text_kind, "text": text, "annotations": [], "logprobs": logprobs}

    def shown(self, status: str) -> Item:
        content = [self.content_part(empty=False)]
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }


class _Call(_OpenItem):
    prefix, kind, text_kind = "fc", "function_call_arguments", ""

    def __init__(self, number: int, name: str) -> None:
        super().__init__()
        self.owner = number
        self._name = name
        self._call_id = f"call_{uuid.uuid4().hex[:24]}"

    @property
    def place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.index}

    def add(self, part: Part) -> tuple[str, dict[str, Any]]:
        assert part.call is not None, "a call goes on with its own pieces only"
        self.text += part.call.arguments
        return self.kind, {"delta": part.call.arguments}

    def ended(self) -> tuple[str, dict[str, Any]]:
        return self.kind, {"name": self._name, "arguments": self.text}

    def content_part(self, *, empty: bool) -> None:
        return None

    def begun(self) -> Item:
        return self.shown("in_progress")

    def shown(self, status: str) -> Item:
        return {
            "id": self.id,
            "type": "function_call",
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self.text,
            "status": status,
        }


def _item_for(part: Part) -> _OpenItem:
    if part.call is not None:
        return _Call(part.call.index, part.call.name or "")
    return _Reasoning() if part.reasoning else _Message()
