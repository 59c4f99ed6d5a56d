"""Recall tasks: a secret code dropped into a long text, and the question for it.

The shipped checkpoint was trained to complete exactly this form, from the name on; it does not
know to begin the answer by itself, so its first words are given. Its sliding window is 32 tokens:
a code stated further back can only come through the compressed pools, and a right answer shows
that they were computed, moved to the other node and read there.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from sluice.deploy.commands.prose import paragraphs

# Names the checkpoint was trained with; each is one token of its vocabulary.
NAMES = (
    "Alice", "Bob", "Carol", "David", "Erin", "Frank", "Grace", "Heidi", "Ivan", "Judy", "Kevin",
    "Laura", "Mike", "Nina", "Oscar", "Peggy", "Quinn", "Ruth", "Steve", "Tina",
)  # fmt: skip
HEADING_PARAGRAPHS = 3  # title, author and the first chapter's number


@dataclass(frozen=True)
class RecallTask:
    """A text, a question about it, and the answer: its given start and the code to recall."""

    document: str
    question: str
    answer_start: str
    code: str

    @property
    def fact(self) -> str:
        """The sentence in the document that holds the code."""
        return f"{self.answer_start} {self.code}."

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation up to the code: the last message is an answer that is to go on."""
        return [
            {"role": "system", "content": self.document},
            {"role": "user", "content": self.question},
            {"role": "assistant", "content": self.answer_start, "prefix": True},
        ]

    def is_right(self, completion: str) -> bool:
        return completion.strip() == f"{self.code}."


def recall_task(
    rng: random.Random, *, words_before: int, words_after: int, num_distractors: int = 3
) -> RecallTask:
    """Prose with one person's code stated `words_after` words before its end.

    Codes of other people stand at random places around it, so that the name matters.
    """
    name, *others = rng.sample(NAMES, 1 + num_distractors)
    prose = _excerpt(rng, words_before + words_after)
    code = _code(rng)
    facts = {words_before: f"{_start(name)} {code}."}
    for other in others:
        place = rng.choice([n for n in range(len(prose)) if n not in facts])
        facts[place] = f"{_start(other)} {_code(rng)}."
    pieces = [f"{facts[n]} {word}" if n in facts else word for n, word in enumerate(prose)]
    return RecallTask(
        document=" ".join(pieces),
        question=f"What is the secret code of {name}?",
        answer_start=_start(name),
        code=code,
    )


def _start(name: str) -> str:
    return f"The secret code: {name}"


def _code(rng: random.Random) -> str:
    return f"{rng.randrange(10_000):04d}"


def _excerpt(rng: random.Random, num_words: int) -> list[str]:
    """Consecutive words of the novel from a random place."""
    words = " ".join(paragraphs()[HEADING_PARAGRAPHS:]).split()
    start = rng.randrange(len(words) - num_words + 1)
    return words[start : start + num_words]
