"""OutputText: a request's output tokens as the text its client sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from sluice.protocol.messages import FinishReason, Logprobs
from sluice.router.dispatch.dispatcher import Tokens
from sluice.router.text.answers.conversation import NO_LANDMARKS, Landmarks
from sluice.router.text.answers.stop import StopFilter
from sluice.router.text.detokenize import Detokenizer


@dataclass(frozen=True)
class Scored:
    """An output token with its log-probabilities. `offset`: characters of output before it."""

    token_id: int
    offset: int
    logprobs: Logprobs


@dataclass(frozen=True)
class Delta:
    """The next piece of an answer. `num_tokens`: output tokens so far, the last one included.

    num_reasoning_tokens: those of them before the end of reasoning.
    prompt_logprobs: of the prompt's tokens from the second on, with the first delta, if asked for.
    stop_string: the one that ended the text; "" if none did.
    scored: the tokens behind the text, if the request asks for log-probabilities. They may come
    before their text, which can be held back.
    """

    text: str
    num_tokens: int
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    scored: tuple[Scored, ...] = ()
    num_reasoning_tokens: int = 0
    stop_string: str = ""
    prompt_logprobs: tuple[Logprobs, ...] = ()


class OutputText:
    """Works token by token where stop strings or log-probabilities tell one from the next, so that
    text and counts do not depend on how tokens were batched.

    min_tokens: a stop string may begin only after so many tokens. landmarks: stop strings are
    looked for neither in reasoning nor in tool calls. only_prompt: no output is wanted, and the one
    token that there is has to be shown to nobody.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        min_tokens: int = 0,
        landmarks: Landmarks = NO_LANDMARKS,
        *,
        only_prompt: bool = False,
    ) -> None:
        self._only_prompt = only_prompt
        self._landmarks = landmarks
        is_open = landmarks.begin_of_reasoning is None
        self._end_of_reasoning = landmarks.end_of_reasoning if is_open else None  # where it is open
        self._num_reasoning_tokens = 0
        self._detokenizer = Detokenizer(tokenizer, landmarks.shown)
        self._filter = StopFilter(stop, ends=landmarks.begin_of_calls)
        self._can_stop = bool(stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._num_cached_tokens = 0
        self._num_characters = 0
        self._scored: list[Scored] = []
        self._prompt_logprobs: tuple[Logprobs, ...] = ()  # that came with these tokens

    def take(self, tokens: Tokens) -> Delta:
        """The text these tokens add; its finish reason is STOP if a stop string is complete."""
        self._num_cached_tokens = max(self._num_cached_tokens, tokens.num_cached_tokens)
        self._prompt_logprobs = tokens.prompt_logprobs
        if self._only_prompt:
            return self._delta("", FinishReason.LENGTH)
        visible = tokens.token_ids
        if tokens.finish_reason is FinishReason.STOP:
            visible = visible[:-1]  # the stop token ends the text, it is not part of it
        text = ""
        one_by_one = self._can_stop or tokens.logprobs
        for index, group in enumerate([(i,) for i in visible] if one_by_one else [visible]):
            if tokens.logprobs:
                scored = Scored(group[0], self._num_characters, tokens.logprobs[index])
                self._scored.append(scored)
            self._open_reasoning(group)
            reasoning = self._end_of_reasoning is not None
            self._count(group)
            text += self._push(self._detokenizer.push(group), reasoning=reasoning)
            if self._filter.stopped:
                return self._delta(text, FinishReason.STOP)
        self._take_unseen(tokens, len(visible))
        if tokens.finish_reason is None:
            return self._delta(text, None)
        rest = self._detokenizer.flush()
        text += self._push(rest, reasoning=self._end_of_reasoning is not None)
        if self._filter.stopped:
            return self._delta(text, FinishReason.STOP)
        return self._delta(text + self._filter.flush(), tokens.finish_reason)

    def _take_unseen(self, tokens: Tokens, num_visible: int) -> None:
        """The stop token, if these end in one: it has no text, but it was sampled, and counts."""
        for index in range(num_visible, len(tokens.token_ids)):
            self._num_tokens += 1
            if tokens.logprobs:
                self._scored.append(
                    Scored(tokens.token_ids[index], self._num_characters, tokens.logprobs[index])
                )

    def _open_reasoning(self, token_ids: tuple[int, ...]) -> None:
        """An answer may open its reasoning itself, with its first token."""
        opening = self._landmarks.begin_of_reasoning
        if self._num_tokens == 0 and opening is not None and token_ids[:1] == (opening,):
            self._end_of_reasoning = self._landmarks.end_of_reasoning

    def _count(self, token_ids: tuple[int, ...]) -> None:
        self._num_tokens += len(token_ids)
        if (end := self._end_of_reasoning) is None:
            return
        if end in token_ids:
            self._end_of_reasoning = None
        self._num_reasoning_tokens += token_ids.index(end) if end in token_ids else len(token_ids)

    def _push(self, piece: str, *, reasoning: bool) -> str:
        self._num_characters += len(piece)
        if reasoning or self._num_tokens <= self._min_tokens:
            return piece
        return self._filter.push(piece)

    def _delta(self, text: str, finish_reason: FinishReason | None) -> Delta:
        scored, self._scored = tuple(self._scored), []
        return Delta(
            text,
            self._num_tokens,
            finish_reason,
            self._num_cached_tokens,
            scored,
            self._num_reasoning_tokens,
            self._filter.stopped_at,
            self._prompt_logprobs,
        )
