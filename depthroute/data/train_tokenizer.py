"""Byte-level BPE (Sennrich et al., 2016) trained on the user's own documents, or on the counts of their words.

The ids 0 to 3 are those of the special tokens; any text can be encoded and comes back exactly.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from itertools import repeat
from pathlib import Path

from depthroute.common.errors import RequestError
from depthroute.data.text_tokenizer import SPECIAL_TOKENS, TextTokenizer
from depthroute.data.word_counts import WORDS, WordCounter, most_frequent

SMALLEST_VOCABULARY = len(SPECIAL_TOKENS) + 256
"""The special tokens and one entry per byte."""
TRAINING_TEXT = 2**16
"""Characters that the library gets at once."""


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> TextTokenizer:
    """Train on `texts`; the same texts give the same tokenizer, whatever their order, the process and the number of threads.

    The vocabulary is smaller than asked for where the texts have too few different pairs to merge. Of more than `word_counts.WORDS`
    different words, the most frequent ones are trained on; words of more than `word_counts.WORD_BYTES` are left out.

    Raises:
        RequestError: `vocabulary` is below 260, the special tokens and the bytes. An error raised by `texts` passes through.
    """
    _check_vocabulary(vocabulary)
    with tempfile.TemporaryDirectory() as folder:
        counter = WordCounter(Path(folder, "words"))
        for text in texts:
            counter.add(text)
        counter.finish()
        return train_from_counts(most_frequent([Path(folder, "words")], WORDS, Path(folder)), vocabulary)


def train_from_counts(words: Iterable[tuple[str, int]], vocabulary: int) -> TextTokenizer:
    """`train_tokenizer` on texts whose words were counted: spelled as in `word_counts`, in any order, each with its count.

    Memory is some 0.8 kB per different word.

    Raises:
        RequestError: `vocabulary` is below 260, the special tokens and the bytes. An error raised by `words` passes through.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    _check_vocabulary(vocabulary)
    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # No character that spells a byte is white space. The words go in as often as they were counted: the library takes no counts.
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.train_from_iterator(_repeated(words), trainer=trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return TextTokenizer(tokenizer)


def _repeated(words: Iterable[tuple[str, int]]) -> Iterator[str]:
    """Every word as often as its count says, in texts of some 64 kB."""
    texts: list[str] = []
    characters = 0
    for word, count in words:
        spaced = word + " "
        whole, rest = divmod(count, max(1, TRAINING_TEXT // len(spaced)))
        if whole:
            longest = spaced * max(1, TRAINING_TEXT // len(spaced))
            yield from repeat(longest, whole)
        texts.append(spaced * rest)
        characters += len(texts[-1])
        if characters >= TRAINING_TEXT:
            yield "".join(texts)
            texts, characters = [], 0
    yield "".join(texts)


def _check_vocabulary(vocabulary: int) -> None:
    if vocabulary < SMALLEST_VOCABULARY:
        raise RequestError(f"vocabulary cannot be {vocabulary}; it takes {SMALLEST_VOCABULARY} (4 special tokens and 256 bytes) or more.")
