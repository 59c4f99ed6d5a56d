"""Comparison: two deployments' measures of the same prompts, and whether they said the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from sluice.deploy.compare.measures import Measure


@dataclass(frozen=True)
class Agreement:
    """How far two answers go together. `first_difference`: a token's index, None if there is none.

    Tokens are those that the answers' texts have, `num_tokens` the longer one's.
    """

    num_tokens: int
    first_difference: int | None

    @property
    def exact(self) -> bool:
        return self.first_difference is None

    @property
    def num_agreed(self) -> int:
        return self.num_tokens if self.first_difference is None else self.first_difference


@dataclass(frozen=True)
class Pair:
    """One prompt on both deployments."""

    a: Measure
    b: Measure
    agreement: Agreement


@dataclass(frozen=True)
class Comparison:
    """`names`: what A and B are called; `pairs`: in the order of the prompts."""

    names: tuple[str, str]
    pairs: tuple[Pair, ...]

    def by_length(self) -> Iterator[tuple[int, list[Pair]]]:
        """Pairs whose prompts have up to so many tokens, a power of two, shortest first."""
        groups: dict[int, list[Pair]] = defaultdict(list)
        for pair in self.pairs:
            groups[1 << (pair.a.num_prompt_tokens - 1).bit_length()].append(pair)
        yield from sorted(groups.items())


def pair_up(
    names: tuple[str, str], a: Sequence[Measure], b: Sequence[Measure], tokenizer: Tokenizer
) -> Comparison:
    """Put the measures of the same prompts together."""
    pairs = zip(a, b, strict=True)
    return Comparison(
        names, tuple(Pair(one, other, _agreement(one, other, tokenizer)) for one, other in pairs)
    )


def _agreement(a: Measure, b: Measure, tokenizer: Tokenizer) -> Agreement:
    ours, theirs = (
        tokenizer.encode(text, add_special_tokens=False).ids for text in (a.text, b.text)
    )
    longer = max(len(ours), len(theirs))
    if a.text == b.text:
        return Agreement(longer, None)
    places = enumerate(zip(ours, theirs, strict=False))
    shorter = min(len(ours), len(theirs))
    return Agreement(longer, next((i for i, (one, other) in places if one != other), shorter))
