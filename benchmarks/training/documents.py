"""Training documents: prose, dialogues, and tasks that only what stands far back can solve.

Copying is learned from the short to the long: first repeated segments and facts repeated in new
orders, whose answers lie within or near the window; then lists of facts recalled from farther
back; then facts hidden in prose and asked for at its end, which is what `recall_task` measures.
Each document says how much the prediction of each of its tokens counts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sluice.benchmarks.training.corpus import NAMES, Corpus, Exchange, Ids, Phrases, excerpt, turn
from sluice.model.tokenizer import BOS_TOKEN_ID

# Weights of a token in the loss. A code's token outweighs prose, of which there is much more; what
# cannot be known (a code when it is first stated) counts nothing.
UNKNOWABLE, FRAME, QUESTION, FILLER, PROSE, LISTED, ANSWER = 0.0, 0.2, 0.3, 0.5, 1.0, 3.0, 5.0

UNSEEN_IN_COPY = 4  # tokens of a copy until it shows itself as one
FIRST_WORD = 300  # ids below are special tokens, bytes and the first merges
MAX_QUESTIONS = 8
MIN_TOKENS_PER_FACT = 48  # of a document with needles
NUM_LISTED = (1, 2, 2, 3, 3, 4, 5, 6, 8, 12, 16)  # facts repeated; few are more often drawn


@dataclass
class Document:
    """Token ids, and the weight of predicting each of them."""

    token_ids: Ids = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def add(self, token_ids: Sequence[int], weight: float) -> None:
        self.token_ids += token_ids
        self.weights += [weight] * len(token_ids)

    def cut(self, num_tokens: int) -> Document:
        return Document(self.token_ids[:num_tokens], self.weights[:num_tokens])

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class RecallTask:
    """A prompt that ends where the code is to be answered; `distance` tokens lie between.

    distance: from the end of the fact, its period included, to the first token of the answer.
    """

    prompt_ids: Ids
    code_ids: Ids
    distance: int


class DocumentMaker:
    """Draws documents of a wished length, at least 256 tokens. Equal seeds draw equal ones."""

    def __init__(self, corpus: Corpus, phrases: Phrases, vocab_size: int, seed: int) -> None:
        self._corpus = corpus
        self._phrases = phrases
        self._vocab_size = vocab_size
        self._rng = random.Random(seed)

    def batch(
        self, size: int, num_tokens: int, mixture: Mapping[Kind, float]
    ) -> tuple[Tensor, Tensor]:
        """Token ids and weights, [size, num_tokens] each, of kinds drawn from the mixture."""
        kinds = self._rng.choices(list(mixture), list(mixture.values()), k=size)
        documents = [kind(self, num_tokens) for kind in kinds]
        return (
            torch.tensor([document.token_ids for document in documents]),
            torch.tensor([document.weights for document in documents]),
        )

    def prose(self, num_tokens: int) -> Document:
        document = _begun()
        document.add(self._excerpt(num_tokens - 1), PROSE)
        return document

    def dialogues(self, num_tokens: int) -> Document:
        """Turns: a word and its definition, or a sentence's beginning and how it goes on."""
        document = _begun()
        while len(document) < num_tokens:
            known = self._corpus.dialogues
            if known and self._rng.random() < 0.7:
                document.add(self._rng.choice(known), PROSE)
            else:
                said = self._excerpt(self._rng.randrange(24, 80))
                middle = self._rng.randrange(6, 14)
                document.add(turn(said[:middle], said[middle:]), PROSE)
        return document.cut(num_tokens)

    def copy(self, num_tokens: int) -> Document:
        """A segment, prose, and the segment again."""
        length = self._rng.randrange(16, num_tokens // 2 - 8)
        segment = self._words(length) if self._rng.random() < 0.5 else self._excerpt(length)
        document = _begun()
        document.add(segment, UNKNOWABLE)
        document.add(self._excerpt(num_tokens - 1 - 2 * length), UNKNOWABLE)
        document.add(segment[:UNSEEN_IN_COPY], UNKNOWABLE)
        document.add(segment[UNSEEN_IN_COPY:], PROSE)
        return document

    def periodic(self, num_tokens: int) -> Document:
        """One random segment over and over."""
        segment = self._words(self._rng.randrange(5, 48))
        document = _begun()
        document.add([*segment, segment[0]], UNKNOWABLE)
        document.add(segment[1:], PROSE)
        while len(document) < num_tokens:
            document.add(segment, PROSE)
        return document.cut(num_tokens)

    def repeated_facts(self, num_tokens: int) -> Document:
        """A few facts, stated again and again, each time in another order."""
        codes = self._codes(self._rng.choice(NUM_LISTED))
        document, weight = _begun(), UNKNOWABLE
        while len(document) < num_tokens:
            self._list(document, codes, weight)
            weight = LISTED
        return document.cut(num_tokens)

    def listed_facts(self, num_tokens: int) -> Document:
        """Many facts, prose, and the facts again in another order."""
        codes = self._codes(len(NAMES))
        fact_tokens = max(len(self._listed(*item)) for item in codes.items())
        most = min(len(NAMES), (num_tokens - 1) // (2 * fact_tokens))
        wanted = self._rng.randrange(max(3, most // 4), most + 1)
        codes = dict(list(codes.items())[:wanted])
        document = _begun()
        self._list(document, codes, UNKNOWABLE)
        document.add(self._excerpt(max(0, num_tokens - 2 * len(document) + 1)), FILLER)
        self._list(document, codes, LISTED)
        document.add(self._excerpt(max(0, num_tokens - len(document))), UNKNOWABLE)
        return document.cut(num_tokens)

    def needles(self, num_tokens: int) -> Document:
        """Facts at random places of prose, then questions for some of them."""
        most = min(10, num_tokens // MIN_TOKENS_PER_FACT)
        codes = self._codes(self._rng.randrange(2, max(3, most) + 1))
        asked = self._rng.sample(list(codes), min(len(codes), MAX_QUESTIONS))
        if num_tokens <= 300:
            asked = asked[:4]
        exchanges = [self._phrases.exchange(name, codes[name]) for name in asked]
        facts = [self._phrases.fact(name, code) for name, code in codes.items()]
        rest = sum(_total(parts) for parts in (*exchanges, *facts))
        document = _begun()
        self._scatter(document, facts, self._excerpt(num_tokens - 1 - rest))
        for exchange in exchanges:
            _add_exchange(document, exchange)
        return document.cut(num_tokens)

    def recall_task(self, distance: int, num_distractors: int = 3) -> RecallTask:
        """A fact `distance` tokens before its answer in held-out prose, among other people's.

        Others stand behind it if the distance leaves room, else before it. Raises ValueError if
        the distance does not even hold the question.
        """
        (name, code), *others = self._codes(1 + num_distractors).items()
        question = self._phrases.exchange(name, code).question
        if distance < len(question):
            raise ValueError(f"distance is {distance}, the question alone has {len(question)}")
        distractors = [self._phrases.fact(*other) for other in others]
        room = distance - len(question)
        behind = distractors if room > 3 * sum(map(_total, distractors)) else []
        before = [] if behind else distractors
        document = _begun()
        prose_tokens = self._rng.randrange(24, 56)
        self._scatter(document, before, self._held_out(prose_tokens))
        self._scatter(document, [self._phrases.fact(name, code)], [])
        self._scatter(document, behind, self._held_out(room - sum(map(_total, behind))))
        return RecallTask([*document.token_ids, *question], code, distance)

    def held_out_prose(self, num_tokens: int) -> Ids:
        """Prose that is never trained on, with the token that begins a document."""
        return [BOS_TOKEN_ID, *self._held_out(num_tokens - 1)]

    def _excerpt(self, num_tokens: int) -> Ids:
        return excerpt(self._corpus.books, num_tokens, self._rng)

    def _held_out(self, num_tokens: int) -> Ids:
        return excerpt(self._corpus.held_out, num_tokens, self._rng)

    def _words(self, num_tokens: int) -> Ids:
        first = min(FIRST_WORD, self._vocab_size // 2)
        return [self._rng.randrange(first, self._vocab_size) for _ in range(num_tokens)]

    def _codes(self, number: int) -> dict[str, Ids]:
        """Random people and their codes."""
        return {name: self._phrases.code(self._rng) for name in self._rng.sample(NAMES, number)}

    def _listed(self, name: str, code: Ids) -> Ids:
        return [*self._phrases.encode(f" {name}"), *code, *self._phrases.encode(".")]

    def _list(self, document: Document, codes: Mapping[str, Ids], weight: float) -> None:
        """` Alice 4821.` for everyone, in random order; the codes count `weight`."""
        for name in self._rng.sample(list(codes), len(codes)):
            document.add(self._phrases.encode(f" {name}"), UNKNOWABLE)
            document.add(codes[name], weight)
            document.add(self._phrases.encode("."), FRAME)

    def _scatter(
        self, document: Document, facts: Sequence[tuple[Ids, Ids, Ids]], prose: Ids
    ) -> None:
        """Add prose with facts at random places of it."""
        places = sorted(self._rng.randrange(len(prose) + 1) for _ in facts)
        done = 0
        for place, (frame, code, end) in zip(places, facts, strict=True):
            document.add(prose[done:place], PROSE)
            document.add(frame, FRAME)
            document.add(code, UNKNOWABLE)
            document.add(end, FRAME)
            done = place
        document.add(prose[done:], PROSE)


Kind = Callable[[DocumentMaker, int], Document]


def _begun() -> Document:
    return Document([BOS_TOKEN_ID], [UNKNOWABLE])


def _total(parts: Sequence[Ids]) -> int:
    return sum(len(part) for part in parts)


def _add_exchange(document: Document, exchange: Exchange) -> None:
    document.add(exchange.question, QUESTION)
    document.add(exchange.code, ANSWER)
    document.add(exchange.end, QUESTION)
