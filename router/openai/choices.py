"""Choices: one output each, as the entries of a stream or as the whole entry of an answer.

A choice turns deltas into entries of OpenAI's `choices`, without their log-probabilities' texts
ever running ahead of the text: tokens whose text is held back wait for the entry that shows it.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

from sluice.protocol.messages import FinishReason, Logprobs
from sluice.router.output_text import Delta, Scored
from sluice.router.text.answers.conversation import CallPart, OutputParser, Part
from sluice.router.text.token_text import TokenTexts

Entry = dict[str, Any]


class Choice(Protocol):
    """One output of an answer. Use it for a stream or for a whole answer, not for both."""

    def opening(self, first: Delta) -> list[Entry]:
        """Entries that come before those of the first delta."""
        ...

    def entries(self, delta: Delta) -> list[Entry]:
        """A stream's entries for one delta: none while its text is held back."""
        ...

    def whole(self, deltas: Sequence[Delta]) -> Entry:
        """The output in one entry."""
        ...


class TextChoice:
    """A choice of /v1/completions.

    prefix: text to show before the output. prompt: its tokens, for their log-probabilities, which
    are shown in `logprobs` with the prefix; prompt_logprobs: and in a field of that name, with so
    many of the likeliest, unless None.
    """

    def __init__(
        self,
        index: int,
        texts: TokenTexts,
        *,
        prefix: str,
        with_logprobs: bool,
        prompt: Sequence[int] = (),
        prompt_logprobs: int | None = None,
    ) -> None:
        self._prompt = prompt
        self._prompt_logprobs = prompt_logprobs
        self._index = index
        self._texts = texts
        self._prefix = prefix
        self._with_logprobs = with_logprobs
        self._scored: list[Scored] = []

    def opening(self, first: Delta) -> list[Entry]:
        if not self._prefix and self._prompt_logprobs is None:
            return []
        entry = self._entry(self._prefix, None)
        if self._with_logprobs and self._prefix:
            entry["logprobs"] = self._of_prompt(first.prompt_logprobs)
        return [entry | self._listed(first.prompt_logprobs)]

    def entries(self, delta: Delta) -> list[Entry]:
        self._scored += delta.scored
        entries = []
        if delta.text:
            entries.append(self._entry(delta.text, None))
        if delta.finish_reason is not None:
            entries.append(self._entry("", delta.finish_reason))
        return entries

    def whole(self, deltas: Sequence[Delta]) -> Entry:
        self._scored += [scored for delta in deltas for scored in delta.scored]
        text = self._prefix + "".join(delta.text for delta in deltas)
        entry = self._entry(text, deltas[-1].finish_reason)
        scores = deltas[0].prompt_logprobs
        if self._with_logprobs and self._prefix:
            before = self._of_prompt(scores)
            entry["logprobs"] = {key: before[key] + entry["logprobs"][key] for key in before}
        return entry | self._listed(scores)

    def _of_prompt(self, scores: Sequence[Logprobs]) -> Entry:
        """The same of the prompt's tokens; the first has nothing before it to be likely after."""
        texts = [self._texts.text_of(token_id) for token_id in self._prompt]
        ends = list(itertools.accumulate(map(len, texts)))
        likely: list[Entry | None] = [
            {self._texts.text_of(token_id): value for token_id, value in score.top}
            | {text: score.chosen}
            for text, score in zip(texts[1:], scores, strict=False)
        ]
        return {
            "tokens": texts,
            "token_logprobs": [None, *(score.chosen for score in scores)],
            "top_logprobs": [None, *likely],
            "text_offset": [0, *ends[:-1]],
        }

    def _listed(self, scores: Sequence[Logprobs]) -> Entry:
        """`prompt_logprobs`, by token ids, if they are asked for."""
        if self._prompt_logprobs is None:
            return {}
        listed: list[Entry | None] = [None]
        for token_id, score in zip(self._prompt[1:], scores, strict=False):
            top = score.top[: self._prompt_logprobs]
            ranked = {each: (value, rank) for rank, (each, value) in enumerate(top, 1)}
            ranked[token_id] = (score.chosen, score.rank)
            listed.append({str(each): self._told(each, *told) for each, told in ranked.items()})
        return {"prompt_logprobs": listed}

    def _told(self, token_id: int, logprob: float, rank: int) -> Entry:
        text = self._texts.text_of(token_id)
        return {"logprob": logprob, "rank": rank, "decoded_token": text}

    def _entry(self, text: str, reason: FinishReason | None) -> Entry:
        return {
            "index": self._index,
            "text": text,
            "logprobs": self._logprobs(),
            "finish_reason": None if reason is None else reason.value,
        }

    def _logprobs(self) -> Entry | None:
        if not self._with_logprobs:
            return None
        scored, self._scored = self._scored, []
        return {
            "tokens": [self._texts.text_of(token.token_id) for token in scored],
            "token_logprobs": [token.logprobs.chosen for token in scored],
            "top_logprobs": [self._by_text(token) for token in scored],
            "text_offset": [len(self._prefix) + token.offset for token in scored],
        }

    def _by_text(self, scored: Scored) -> dict[str, float]:
        """The likeliest tokens and, as OpenAI does it, the chosen one."""
        top = {self._texts.text_of(token_id): value for token_id, value in scored.logprobs.top}
        return top | {self._texts.text_of(scored.token_id): scored.logprobs.chosen}


class ChatOutput:
    """One output of a conversation, read by the checkpoint's parser as it comes.

    must_call: it consists of calls; what is none, such as the beginning of one, is no content.
    """

    def __init__(self, parser: OutputParser, *, must_call: bool = False) -> None:
        self._parser = parser
        self.must_call = must_call
        self.has_calls = False  # so far

    def parts(self, delta: Delta) -> list[Part]:
        parts = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            parts += self._parser.flush(complete=delta.finish_reason is FinishReason.STOP)
        if self.must_call:
            parts = [part for part in parts if not part.content]
        self.has_calls = self.has_calls or any(part.call for part in parts)
        return parts


class ChatChoice:
    """A choice of /v1/chat/completions."""

    def __init__(
        self, index: int, texts: TokenTexts, output: ChatOutput, *, with_logprobs: bool
    ) -> None:
        self._index = index
        self._texts = texts
        self._output = output
        self._with_logprobs = with_logprobs
        self._scored: list[Scored] = []

    def opening(self, first: Delta) -> list[Entry]:
        content = None if self._output.must_call else ""
        return [self._entry({"delta": {"role": "assistant", "content": content}}, None)]

    def entries(self, delta: Delta) -> list[Entry]:
        entries = [self._entry({"delta": _delta_of(part)}, None) for part in self._parts(delta)]
        if delta.finish_reason is not None:
            entries.append(self._entry({"delta": {}}, delta.finish_reason))
        return entries

    def whole(self, deltas: Sequence[Delta]) -> Entry:
        parts = [part for delta in deltas for part in self._parts(delta)]
        message: Entry = {"role": "assistant", "content": "".join(p.content for p in parts)}
        if reasoning := "".join(part.reasoning for part in parts):
            message["reasoning_content"] = reasoning
        if calls := _calls_of([part.call for part in parts if part.call is not None]):
            message["tool_calls"] = calls
        if calls or self._output.must_call:
            message["content"] = message["content"] or None
        return self._entry({"message": message}, deltas[-1].finish_reason)

    def _parts(self, delta: Delta) -> list[Part]:
        self._scored += delta.scored
        return self._output.parts(delta)

    def _entry(self, content: Entry, reason: FinishReason | None) -> Entry:
        return {
            "index": self._index,
            **content,
            "logprobs": self._logprobs(),
            "finish_reason": self._finish_reason(reason),
        }

    def _finish_reason(self, reason: FinishReason | None) -> str | None:
        if reason is FinishReason.STOP and self._output.has_calls:
            return "tool_calls"
        return None if reason is None else reason.value

    def _logprobs(self) -> Entry | None:
        if not self._with_logprobs:
            return None
        scored, self._scored = self._scored, []
        return {"content": [described(token, self._texts) for token in scored], "refusal": None}


def described(scored: Scored, texts: TokenTexts) -> Entry:
    """A token with its log-probability and the likeliest ones, as chat and responses show it."""

    def shown(token_id: int, logprob: float) -> Entry:
        token = {"token": texts.text_of(token_id), "logprob": logprob}
        return {**token, "bytes": list(texts.bytes_of(token_id))}

    top = [shown(token_id, value) for token_id, value in scored.logprobs.top]
    return {**shown(scored.token_id, scored.logprobs.chosen), "top_logprobs": top}


def _delta_of(part: Part) -> Entry:
    if part.call is not None:
        return {"tool_calls": [_call_delta(part.call)]}
    if part.reasoning:
        return {"reasoning_content": part.reasoning}
    return {"content": part.content}


def _call_delta(call: CallPart) -> Entry:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **_new_call(call.name, call.arguments)}


def _calls_of(parts: Sequence[CallPart]) -> list[Entry]:
    """Whole calls from their pieces, in order."""
    names = {part.index: part.name for part in parts if part.name is not None}
    return [
        _new_call(name, "".join(part.arguments for part in parts if part.index == index))
        for index, name in names.items()
    ]


def _new_call(name: str, arguments: str) -> Entry:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
