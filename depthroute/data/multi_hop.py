"""Facts and questions: a synthetic corpus whose answers take a chosen number of look-ups, and whose floor is known.

A document is one random cycle f over n entities. It first states f, one fact for each entity in random order: `fact a b` for f(a) = b,
all of them as often as `statements` says, each time in another order. Then it asks: `3hops x y`, where y = f(f(f(x))). An answer lies two
tokens behind the marker that says how many look-ups it takes, so loss and accuracy can be told apart by hops (`MultiHopCorpus.markers`).

The second statement is there to be learned from: its values can be looked up in the first, which is one hop. Without it, the answers to
one-hop questions would be all that teaches a look-up by itself.

On a cycle f^k(x) is never x for 0 < k < n, and every other entity is equally likely before the facts are read: a guess is right with
probability 1 / (n - 1) for every k. (The image of a random function shrinks with k, and a random permutation has short cycles, so that many
steps would be easier to guess than few.) No document asks the same question twice, so no answer can be copied from an earlier one. The
answer to another question of the same document can still be a start: with f^2(x) known, f^3(x) is one look-up away.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from depthroute.common.config import to_json
from depthroute.common.errors import RequestError
from depthroute.data.corpus import Document, Part
from depthroute.data.tokenizer import SPECIAL_TOKENS, UNK, TextTokenizer

MULTI_HOP = "multi-hop"
FACT = "fact"
ANSWERS = "answers"
DOCUMENTS_PER_PART = 20_000
ANSWER_DISTANCE = 2
"""How many tokens behind its marker an answer lies: the entity that is asked about stands between them."""


@dataclass(frozen=True, kw_only=True)
class MultiHopConfig:
    """How large the cycles are, and what is asked about them.

    Raises:
        RequestError: a value is not allowed.
    """

    entities: int = 8
    """n, the length of the cycle."""
    hops: int = 4
    """Questions take 1 to so many look-ups, each number equally often in expectation."""
    queries: int = 12
    """Questions in a document, all different."""
    statements: int = 2
    """How often a document states all its facts before it asks."""
    documents: int = 40_000
    """In all splits together."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, lowest in (("entities", 3), ("hops", 1), ("queries", 1), ("statements", 1), ("documents", 2), ("seed", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < lowest:
                raise RequestError(f"multi_hop.{name} cannot be {value!r}; it takes a whole number of at least {lowest}.")
        if self.hops >= self.entities:
            raise RequestError(
                f"multi_hop.hops cannot be {self.hops} with {self.entities} entities: so many steps lead back to the start; it takes "
                f"{self.entities - 1} or fewer, or raise multi_hop.entities."
            )
        if self.queries > self.entities * self.hops:
            raise RequestError(
                f"multi_hop.queries cannot be {self.queries}: {self.entities} entities and {self.hops} hops make "
                f"{self.entities * self.hops} different questions; it takes that many or fewer."
            )

    @property
    def document_tokens(self) -> int:
        """Tokens of every document, its EOS included. With a context of so many, every window of a batch is one whole document."""
        return 3 * (self.statements * self.entities + self.queries) + 1

    @property
    def words(self) -> tuple[str, ...]:
        """The vocabulary in the order of the ids: special tokens, the mark of a fact, a marker for each number of hops, the entities."""
        markers = (_marker(hops) for hops in range(1, self.hops + 1))
        return (*SPECIAL_TOKENS, FACT, *markers, *(_entity(number) for number in range(self.entities)))

    @property
    def document_entropy(self) -> float:
        """Nats that nobody can predict in a document: log n! for the order of the facts in each statement, log (n - 1)! for the cycle,
        and the log of (n hops)! / (n hops - queries)! for the questions. Answers and all that is always alike add nothing."""
        questions = self.entities * self.hops
        order, cycle = self.statements * math.lgamma(self.entities + 1), math.lgamma(self.entities)
        return order + cycle + math.lgamma(questions + 1) - math.lgamma(questions - self.queries + 1)

    @property
    def floor(self) -> float:
        """The least mean loss in nats per token, over whole documents: `document_entropy` over `document_tokens`."""
        return self.document_entropy / self.document_tokens


@dataclass(frozen=True, kw_only=True)
class MultiHopCorpus:
    """The corpus of a `MultiHopConfig`: document i is made from the seed and i alone, when it is asked for."""

    config: MultiHopConfig
    name: str = MULTI_HOP
    missing: tuple[str, ...] = ()

    @property
    def contents(self) -> tuple[str, ...]:
        config = self.config
        asked = f"{config.queries} questions of 1 to {config.hops} hops"
        return (f"{config.documents} documents: a cycle of {config.entities} entities and {asked} (seed {config.seed})",)

    def parts(self, skipped: Counter[str]) -> Sequence[Part]:
        documents, bytes_each = self.config.documents, 4 * self.config.document_tokens
        firsts = range(0, documents, DOCUMENTS_PER_PART)
        return [
            Part(self.name, first, end, bytes_each * (end - first))
            for first, end in ((first, min(documents, first + DOCUMENTS_PER_PART)) for first in firsts)
        ]

    def documents(self, part: Part, skipped: Counter[str]) -> Iterator[Document]:
        return (Document(f"{MULTI_HOP} {number}", self._text(number)) for number in range(part.start, part.end))

    def stamp(self) -> Any:
        return to_json(self.config)

    def tokenizer(self) -> TextTokenizer:
        """A token for every word; a word that the corpus does not have is `<unk>`."""
        from tokenizers import Tokenizer, models, pre_tokenizers

        words = self.config.words
        tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[UNK]))
        # It parts "<eos>" into three words, so the text of a special token is never its id.
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
        return TextTokenizer(tokenizer)

    def markers(self) -> dict[str, tuple[int, ...]]:
        """The ids of the markers by the name of the slice of answers: "1 hop", "2 hops", ..., and "answers" for all of them."""
        first = self.config.words.index(_marker(1))
        named = {f"{hops} hop{'s' * (hops > 1)}": (first + hops - 1,) for hops in range(1, self.config.hops + 1)}
        return {**named, ANSWERS: tuple(range(first, first + self.config.hops))}

    def _text(self, number: int) -> str:
        """Raw words are sorted, as for the order of batches: NumPy keeps the streams of bit generators, not what distributions make of
        them."""
        config = self.config
        entities = config.entities
        stream = np.random.Philox(np.random.SeedSequence(config.seed, spawn_key=(number,)))

        def shuffled(size: int) -> list[int]:
            order: list[int] = np.argsort(stream.random_raw(size), kind="stable").tolist()
            return order

        cycle = shuffled(entities)

        def line(word: str, at: int, hops: int) -> str:
            return f"{word} {_entity(cycle[at])} {_entity(cycle[(at + hops) % entities])}"

        facts = [line(FACT, at, 1) for _ in range(config.statements) for at in shuffled(entities)]
        asked = (divmod(question, config.hops) for question in shuffled(entities * config.hops)[: config.queries])
        return " ".join((*facts, *(line(_marker(hops + 1), at, hops + 1) for at, hops in asked)))


def _entity(number: int) -> str:
    return f"e{number}"


def _marker(hops: int) -> str:
    return f"{hops}hop{'s' * (hops > 1)}"
