"""Grammars: which tokens keep an output on the way to a text that a schema or grammar allows.

llguidance computes the masks from the checkpoint's tokenizer alone, without torch; a request's
matcher reads the request's own output, so it is in the same state on prefill, on decode and after
a fail-over.

What a client's schema may cost is limited in three places. LIMITS, counted and so the same
everywhere: what one mask and one matcher may come to. `Grammars.check`, in a helper process of the
router that is given up where it takes too long or too much: what making a matcher may cost. And
nodes make matchers only of what has passed there, in a thread of their own (engine/intake.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from sluice.protocol.limits import WHITE_SPACE, check_size
from sluice.protocol.messages import InvalidRequest, SamplingParams

log = logging.getLogger(__name__)

# Measured with a vocabulary of 128,000 tokens: a mask at the edge of the default fuel takes 4 to
# 8 ms; 20,000 states of a lexer 9 MB, where the default's 250,000 are 110. A string of 10,000
# characters at most needs as many states.
LIMITS = LLParserLimits(max_lexer_states=20_000, verbose_errors=False)

PROBE_TOKENS = 4  # so far `check` goes into a text: some schemas are too much from the second on


class Grammars:
    """Makes matchers for one checkpoint; any thread.

    A checkpoint whose tokenizer is of no use here is served too, to clients that ask for no schema.
    """

    def __init__(self, folder: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        self._tokenizer = None
        self._why_not = "the checkpoint has no tokenizer.json"
        path = folder / "tokenizer.json"
        if path.is_file():
            try:
                self._tokenizer = LLTokenizer(
                    str(path), n_vocab=vocab_size, eos_token=list(eos_token_ids) or None
                )
            except Exception as error:  # noqa: BLE001 - what it raises for a tokenizer varies
                self._why_not = f"the checkpoint's tokenizer is of no use for grammars: {error}"
                log.warning("event=no_grammars reason=%s", self._why_not)

    def matcher_for(self, sampling: SamplingParams) -> Matcher | None:
        """A matcher of what the request must follow, at the output's beginning; None for any text.

        Raises InvalidRequest for what it cannot do.
        """
        if sampling.grammar:
            param = "response_format" if sampling.json_schema else "tools"
            return self.matcher_of(sampling.grammar, param=param)
        return self.matcher(sampling.json_schema) if sampling.json_schema else None

    def matcher(self, json_schema: str) -> Matcher:
        """A matcher at the output's beginning. Raises InvalidRequest for a schema it cannot do."""
        check_size(json_schema, "response_format")
        try:
            grammar = LLMatcher.grammar_from_json_schema(
                json_schema, defaults={"whitespace_pattern": WHITE_SPACE}
            )
        except ValueError as error:  # nested beyond what its parser takes
            raise _unsupported("response_format", str(error)) from error
        return self.matcher_of(grammar, param="response_format")

    def matcher_of(self, grammar: str, *, param: str) -> Matcher:
        """The same for a grammar in llguidance's words; param: the field it was made of."""
        check_size(grammar, param)
        if self._tokenizer is None:
            raise InvalidRequest(f"{param}: {self._why_not}, expected plain text", param=param)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise _unsupported(param, matcher.get_error())
        return Matcher(matcher, self._vocab_size, param)

    def check(self, sampling: SamplingParams) -> None:
        """Raises InvalidRequest for what no matcher can be made of, or none that gets anywhere.

        It may take very long, and much memory: that is for the caller to bound.
        """
        if (matcher := self.matcher_for(sampling)) is not None:
            _probe(matcher)
        if sampling.grammar and sampling.json_schema:  # by itself: reasoning may come before it
            _probe(self.matcher(sampling.json_schema))


def _probe(matcher: Matcher) -> None:
    """Go some tokens into a text. Raises InvalidRequest where the grammar cannot go on."""
    output: list[int] = []
    while len(output) < PROBE_TOKENS:
        allowed = np.flatnonzero(matcher.allowed())
        if matcher.error is not None:
            raise matcher.failure()
        if matcher.complete or not len(allowed):
            return
        output.append(int(allowed[0]))
        matcher.follow(output)


class Matcher:
    """One request's place in its grammar. One thread at a time.

    Never copied: copies would share a lexer, and with it the error of the one that exhausts it.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, param: str) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._param = param
        self._num_followed = 0
        self._allowed: npt.NDArray[np.bool_] | None = None  # after what was followed

    @property
    def error(self) -> str | None:
        """Why the grammar cannot go on, if it cannot: no further token may be trusted.

        One word: llguidance's own message quotes schema and output, which no log may hold.
        """
        return str(self._matcher.stop_reason()) if self._matcher.is_error() else None

    @property
    def complete(self) -> bool:
        """Whether the output so far is whole: it may end here."""
        return self._matcher.is_accepting()

    def failure(self) -> InvalidRequest:
        """What to tell the client of an `error`: another node would come to the same."""
        return InvalidRequest(
            f"{self._param}: the grammar failed ({self.error}): it allows no text, or is too "
            "complex to follow; simplify the schema",
            param=self._param,
        )

    def prepare(self, output_token_ids: Sequence[int]) -> None:
        """Work out the first mask, while nobody waits for it. Raises InvalidRequest."""
        self.look_ahead(output_token_ids)
        if self.error is not None:
            raise self.failure()

    def look_ahead(self, output_token_ids: Sequence[int]) -> None:
        """Work out what `allowed` will say after that output; the matcher is ours meanwhile."""
        self.follow(output_token_ids)
        self.allowed()

    def follow(self, output_token_ids: Sequence[int]) -> None:
        """Take what has been added to the output since the last call."""
        if new := list(output_token_ids[self._num_followed :]):
            self._allowed = None
            self._matcher.consume_tokens(new)
            self._num_followed = len(output_token_ids)

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Which tokens may come next, [vocab]; the end only where the output is complete."""
        if self.error is not None:
            return np.ones(self._vocab_size, dtype=np.bool_)  # whatever is drawn is thrown away
        if self._allowed is None:
            packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            bits = np.unpackbits(packed, count=self._vocab_size, bitorder="little")
            self._allowed = bits.view(np.bool_)
        return self._allowed.copy()


def _unsupported(param: str, problem: str) -> InvalidRequest:
    reason, _, _ = problem.partition("\n")
    return InvalidRequest(f"{param}: no grammar follows this schema: {reason}", param=param)
