"""How often each word occurs in many documents, in bounded memory: what byte-level BPE is trained from.

A word is what GPT-2's expression makes of a text, spelled as `ByteLevel(add_prefix_space=False, use_regex=True)` of the `tokenizers`
library spells it: one character per byte, none of them white space. A file of counts has a line `WORD COUNT` per word, in UTF-8, sorted by
the bytes of the words. Equal texts give equal counts, whatever their order and however they are spread over files.
"""

from __future__ import annotations

import heapq
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from depthroute.common.errors import FailureError, RequestError
from depthroute.common.files import explain_os_errors, replaced

WORDS = 1_000_000
"""As many words are trained from, the most frequent ones: it holds the training below 1 GB. In text, those beyond it occur a few times."""
WORD_BYTES = 1024
"""Longer words (rules, data in letters) are left out: one merge after the other would make tokens of them that nothing else needs."""
STRETCH = 2**16
"""Characters. What is longer than this, without white space and without a punctuation mark before a letter in it, is left out unread."""
HELD = 500_000
"""Different units, and different words, that a `WordCounter` holds before it folds or writes them."""
HELD_CHARACTERS = 2**25
"""The same bound for their length."""
PIECE = 2**20
"""Characters of a document that are looked at together."""
OPEN_FILES = 64

# `\s` of Python has the characters 1C to 1F too, which GPT-2's expression takes for punctuation.
_SPACE, _OTHER = r"[^\S\x1c-\x1f]", r"[\S\x1c-\x1f]"
# A word never goes from another character into white space, and of several white characters at most the last belongs to what follows. So
# these are whole words, one or more, and have fewer kinds than the runs between spaces.
_UNIT = re.compile(f"{_SPACE}?{_OTHER}+|{_SPACE}+(?!{_OTHER})")
_BORDER = re.compile(f"(?<={_OTHER})(?={_SPACE})")
# Punctuation without the apostrophe, and letters: a word ends between them.
_INNER_BORDER = re.compile("(?<=[!-&(-/:-@[-`{-~、。，；：？！])(?=[A-Za-zぁ-ゖァ-ヺ一-鿯])")  # noqa: RUF001
# GPT-2's expression for text in ASCII, twice as fast as the library.
_ASCII_WORD = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", re.ASCII)
# A byte that is no visible character in Latin-1 is spelled by the next character from U+0100 on.
_SPARE = [*range(ord("!")), *range(0x7F, ord("¡")), 0xAD]
_SPELLING = {byte: 0x100 + rank for rank, byte in enumerate(_SPARE)}


class WordCounter:
    """Counts the words of texts; some 300 MB at most, beside the longest text.

    Args:
        path: where `finish` puts the counts. Files beside it with its name behind a point hold what does not fit in memory, until then.
    """

    def __init__(self, path: Path) -> None:
        from tokenizers import pre_tokenizers

        self._path, self._parts = path, list[Path]()
        self._library = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        self._units, self._unit_characters = Counter[str](), 0
        self._words: dict[str, int] = {}
        self.left_out = 0
        """Words of more than `WORD_BYTES`, and longer stretches that were not read (`STRETCH`), up to the last `finish`."""

    def add(self, text: str) -> None:
        """Count the words of one text."""
        if len(text) <= PIECE:
            self._add(text)
            return
        start = 0
        while start < len(text):
            border = _BORDER.search(text, start + PIECE)
            end = border.start() if border else len(text)
            self._add(text[start:end])
            start = end

    def finish(self) -> None:
        """Write the counts to `path`, atomically, and forget them.

        Raises:
            FailureError: the disk is full, or the folder cannot be written.
        """
        self._fold()
        if self._parts:
            self._spill()
            write_counts(self._path, merge_counts(self._parts))
            for part in self._parts:
                part.unlink()
            self._parts = []
        else:
            self._write_words(self._path)

    def _add(self, text: str) -> None:
        self._units.update(_UNIT.findall(text))
        self._unit_characters += len(text)
        if len(self._units) > HELD or self._unit_characters > HELD_CHARACTERS:
            self._fold()
            if len(self._words) > HELD or sum(map(len, self._words)) > HELD_CHARACTERS:
                self._spill()

    def _fold(self) -> None:
        """Turn units into words, which are spelled when they are written."""
        words = self._words
        for unit, count in self._units.items():
            if len(unit) > WORD_BYTES or not unit.isascii():
                self._count(unit, count)
                continue
            for word in _ASCII_WORD.findall(unit):
                words[word] = words.get(word, 0) + count
        self._units.clear()
        self._unit_characters = 0

    def _count(self, unit: str, count: int) -> None:
        for text in _INNER_BORDER.split(unit) if len(unit) > STRETCH else [unit]:
            if len(text) > STRETCH:
                self.left_out += count
                continue
            for spelled, (start, end) in self._library.pre_tokenize_str(text):
                if len(spelled) > WORD_BYTES:
                    self.left_out += count
                else:
                    word = text[start:end]
                    self._words[word] = self._words.get(word, 0) + count

    def _spill(self) -> None:
        part = self._path.with_name(f".{self._path.name}.{len(self._parts)}")
        self._write_words(part)
        self._parts.append(part)

    def _write_words(self, path: Path) -> None:
        write_counts(path, sorted((_spelled(word), count) for word, count in self._words.items()))
        self._words.clear()


def _spelled(word: str) -> str:
    return word.encode().decode("latin-1").translate(_SPELLING)


def write_counts(path: Path, counts: Iterable[tuple[str, int]]) -> None:
    """Write words and their counts, given in the order of the words, atomically.

    Raises:
        FailureError: the disk is full, or the folder cannot be written.
    """
    _write(path, (f"{word} {count}\n".encode() for word, count in counts))


def merge_counts(paths: Sequence[Path]) -> Iterator[tuple[str, int]]:
    """The words of all files in their order, each once with the sum of its counts. Memory and open files are bounded however many files
    there are; where they are many, a folder beside the first holds files in between until the iterator ends.

    Raises:
        FailureError: a file is damaged, or the disk is full.
    """
    with ExitStack() as stack:
        if len(paths) > OPEN_FILES:
            with explain_os_errors(paths[0], "merging"):
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=paths[0].parent, prefix=".merge-")))
        made = 0
        while len(paths) > OPEN_FILES:
            merged = []
            for at in range(0, len(paths), OPEN_FILES):
                merged.append(folder / str(made))
                made += 1
                _write(merged[-1], (b"%b %d\n" % pair for pair in _merged(paths[at : at + OPEN_FILES])))
            for path in paths:
                if path.parent == folder:
                    path.unlink()
            paths = merged
        for word, count in _merged(paths):
            yield word.decode(), count


def most_frequent(paths: Sequence[Path], limit: int, folder: Path) -> Iterator[tuple[str, int]]:
    """The `limit` most frequent words of all files, or all where they are fewer, in the order of the words. Of words with equal counts the
    first ones are taken.

    Args:
        folder: holds one file while the iterator is used.

    Raises:
        RequestError: `limit` is below 1.
        FailureError: a file is damaged, or the disk is full.
    """
    if limit < 1:
        raise RequestError(f"the number of words cannot be {limit}; it takes 1 or more.")
    with explain_os_errors(folder, "writing"), tempfile.TemporaryDirectory(dir=folder, prefix=".merged-") as inside:
        merged = Path(inside, "words")
        kinds: Counter[int] = Counter()  # words by their count: few, since counts of n different values add up to n² / 2

        def counted() -> Iterator[tuple[str, int]]:
            for word, count in merge_counts(paths):
                kinds[count] += 1
                yield word, count

        write_counts(merged, counted())
        threshold, room = 0, limit  # words above the threshold are taken, and the first `room` of those that have it
        for count in sorted(kinds, reverse=True):
            if kinds[count] > room:
                threshold = count
                break
            room -= kinds[count]
        for raw, count in _merged([merged]):
            if count > threshold or (count == threshold and room > 0):
                room -= count == threshold
                yield raw.decode(), count


def _merged(paths: Sequence[Path]) -> Iterator[tuple[bytes, int]]:
    """The sums of the counts of sorted files. Lines have the order of their words: a space is below every character of a word."""
    with ExitStack() as stack:
        files: list[IO[bytes]] = []
        for path in paths:
            with explain_os_errors(path, "reading"):
                files.append(stack.enter_context(path.open("rb")))
        lines = heapq.merge(*files) if len(files) > 1 else iter(files[0] if files else ())
        word, total = b"", 0
        for line in lines:
            try:
                found, number = line.split(b" ")
                count = int(number)
            except ValueError as error:
                raise FailureError(f"one of {', '.join(map(str, paths[:3]))} ... is no file of word counts: {line[:80]!r}.") from error
            if found == word:
                total += count
                continue
            if total:
                yield word, total
            word, total = found, count
        if total:
            yield word, total


def _write(path: Path, lines: Iterable[bytes]) -> None:
    with replaced(path) as file:
        file.writelines(lines)
