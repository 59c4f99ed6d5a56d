"""Grammars: which tokens keep an output on the way to a text that a schema or grammar allows.

llguidance computes the masks from the checkpoint's tokenizer alone, without torch; a request's
matcher reads the request's own output, so it is in the same state on prefill, on decode and after
a fail-over.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from sluice.engine.protocol import ConfigError, InvalidRequest

# Between the tokens of a JSON text: a space, or a line break with its indentation. A weak model
# that may write any white space at all writes nothing else.
WHITE_SPACE = r"(\n[ \t]{0,32}|[ ]?)"


class Grammars:
    """Makes matchers for one checkpoint; any thread. Raises ConfigError for a broken tokenizer.

    A checkpoint without tokenizer.json can be served too, to clients that ask for no schema.
    """

    def __init__(self, folder: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        path = folder / "tokenizer.json"
        self._tokenizer = None
        if path.is_file():
            try:
                self._tokenizer = LLTokenizer(
                    str(path), n_vocab=vocab_size, eos_token=list(eos_token_ids) or None
                )
            except ValueError as error:
                raise ConfigError(f"checkpoint file {path}: no use for JSON: {error}") from error

    def matcher(self, json_schema: str) -> Matcher:
        """A matcher at the output's beginning. Raises InvalidRequest for a schema it cannot do."""
        grammar = LLMatcher.grammar_from_json_schema(
            json_schema, defaults={"whitespace_pattern": WHITE_SPACE}
        )
        return self.matcher_of(grammar, param="response_format")

    def matcher_of(self, grammar: str, *, param: str) -> Matcher:
        """The same for a grammar in llguidance's words; param: the field it was made of."""
        if self._tokenizer is None:
            raise InvalidRequest(
                f"{param}: the checkpoint has no tokenizer.json, expected plain text", param=param
            )
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise InvalidRequest(
                f"{param}: no grammar follows this schema: {matcher.get_error()}", param=param
            )
        return Matcher(matcher, self._vocab_size)


class Matcher:
    """One request's place in its grammar. Owned by the node's loop thread."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._num_followed = 0

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

    def follow(self, output_token_ids: Sequence[int]) -> None:
        """Take what has been added to the output since the last call."""
        self._matcher.consume_tokens(list(output_token_ids[self._num_followed :]))
        self._num_followed = len(output_token_ids)

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Which tokens may come next, [vocab]; the end only where the output is complete."""
        if self.error is not None:
            return np.ones(self._vocab_size, dtype=np.bool_)  # whatever is drawn is thrown away
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(packed, bitorder="little")[: self._vocab_size].astype(np.bool_)
