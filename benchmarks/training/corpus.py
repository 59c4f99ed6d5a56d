"""Texts as token ids, and the sentences that every recall task is made of."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tokenizers import Tokenizer

from sluice.benchmarks.training.texts import Texts
from sluice.deploy.commands import recall
from sluice.model.tokenizer import EOS_TOKEN_ID, SPECIAL_TOKENS

HELD_OUT_SHARE = 0.04  # of each book, its end: measured on, never trained on
USER, ASSISTANT = (SPECIAL_TOKENS.index(f"<｜{who}｜>") for who in ("User", "Assistant"))
NAMES = (
    *recall.NAMES,
    "Ursula", "Victor", "Wendy", "Xavier", "Yara", "Zoe", "Adam", "Bella", "Cody", "Diana",
    "Ethan", "Fiona", "Greg", "Hanna", "Igor", "Jack", "Kira", "Leo", "Mona", "Nate", "Olga",
    "Paul", "Rosa", "Sam", "Tara", "Uma", "Vera", "Wade", "Yuri", "Zara", "Amber", "Brian",
    "Clara", "Derek", "Elsa", "Felix", "Gina", "Hugo", "Iris", "Jonas", "Karen", "Lucas", "Megan",
    "Norman",
)  # fmt: skip
NUM_REPEATS = 3_000  # enough for a merge in texts of some megabytes

Ids = list[int]


class Exchange(NamedTuple):
    """A question up to the name in its answer, the answer's code, and what ends the turn."""

    question: Ids
    code: Ids
    end: Ids


class Phrases:
    """Encodes the fixed sentences; every word of them is given with the space before it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, Ids] = {}

    def encode(self, text: str) -> Ids:
        """Token ids of a text. Remembered: few are different, and they are asked for often."""
        if text not in self._known:
            self._known[text] = self._tokenizer.encode(text).ids
        return self._known[text]

    def code(self, rng: random.Random) -> Ids:
        return self.encode(f" {rng.randrange(10_000):04d}")

    def fact(self, name: str, code: Ids) -> tuple[Ids, Ids, Ids]:
        """` The secret code: Alice`, ` 4821` and `.`"""
        return self.encode(" The secret code:") + self.encode(f" {name}"), code, self.encode(".")

    def exchange(self, name: str, code: Ids) -> Exchange:
        """The question for a fact, and the answer in its words."""
        question = self.encode("What is the secret code of") + self.encode(f" {name}")
        answer = self.encode("The secret code:") + self.encode(f" {name}")
        return Exchange(
            [USER, *question, *self.encode("?"), ASSISTANT, *answer],
            code,
            [*self.encode("."), EOS_TOKEN_ID],
        )


@dataclass(frozen=True)
class Corpus:
    """Token ids of books without their ends, of those ends, and of dialogues as chat turns."""

    books: Sequence[Ids]
    held_out: Sequence[Ids]
    dialogues: Sequence[Ids]

    @classmethod
    def of(cls, texts: Texts, tokenizer: Tokenizer) -> Corpus:
        ends = [round(len(book) * (1 - HELD_OUT_SHARE)) for book in texts.books]
        pairs = list(zip(texts.books, ends, strict=True))
        return cls(
            books=[tokenizer.encode(book[:end]).ids for book, end in pairs],
            held_out=[tokenizer.encode(book[end:]).ids for book, end in pairs],
            dialogues=[
                turn(tokenizer.encode(question).ids, tokenizer.encode(answer).ids)
                for question, answer in texts.dialogues
            ],
        )


def turn(question: Ids, answer: Ids) -> Ids:
    """One question and its answer, as the chat template writes them."""
    return [USER, *question, ASSISTANT, *answer, EOS_TOKEN_ID]


def excerpt(books: Sequence[Ids], num_tokens: int, rng: random.Random) -> Ids:
    """Consecutive tokens from a random place; several places if one book does not have enough.

    Longer books are drawn more often, in proportion.
    """
    lengths = [len(book) for book in books]
    ids: Ids = []
    while len(ids) < num_tokens:
        missing = num_tokens - len(ids)
        book = rng.choices(books, lengths)[0]
        start = rng.randrange(max(1, len(book) - missing))
        ids += book[start : start + missing]
    return ids


def tokenizer_texts(texts: Texts, num_repeats: int = NUM_REPEATS) -> Iterator[str]:
    """What merges are learned from: the texts, and enough of names and two-digit numbers.

    Each of those is then one token: a code is two, and a name cannot be told by its first letters.
    """
    yield from texts.passages()
    for name in NAMES:
        yield f" {name}" * num_repeats
    for number in range(100):
        yield f" {number:02d}{number:02d}" * num_repeats
    yield " The secret code: What is the secret code of" * num_repeats
