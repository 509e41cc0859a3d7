"""A generated stand-in for FineWeb-Edu's sample-10BT, of any size: the files, the schema and the lengths of the documents, and a text whose
words a tokenizer meets as often as those of English prose.

Common words come from the docstrings of the installed packages (read offline), as often as they stand there. Rare ones are invented from
pieces of them: the word of rank r is always the same, and ranks have no end, so that distinct words keep growing with the text. Sentences
mean nothing. The same seed and the same installed packages give the same bytes.
"""

from __future__ import annotations

import argparse
import re
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from scipy.special import ndtri

from depthroute.data import docstring_corpus

SCHEMA = pa.schema(
    [
        ("text", pa.string()), ("id", pa.string()), ("dump", pa.string()), ("url", pa.string()), ("file_path", pa.string()),
        ("language", pa.string()), ("language_score", pa.float64()), ("token_count", pa.int64()), ("score", pa.float64()),
        ("int_score", pa.int64()),
    ]
)  # fmt: skip
ROW_GROUP = 1_000
"""Documents in a row group, as datatrove writes them."""
MEAN_BYTES = 2_274_481_521 / 478_729
"""Of a document in UTF-8: the Role-Decoupled paper's slice of sample-10BT."""
SIGMA, SHORTEST, LONGEST = 1.0, 250, 500_000
"""Of the logarithm of a document's bytes, and where lengths are clipped."""

HEAD = 20_000
TABLE = 2**20
"""Common words are drawn from a table of so many entries, each word as often in it as in the docstrings."""
SHORTER = 0.93
"""Every letter makes a common word so much rarer than in docstrings, whose words are longer than those of other prose."""
TAIL_SHARE, TAIL_EXPONENT = 0.036, 0.5
"""So many of all words are invented, with ranks above HEAD and P(rank > r) = (HEAD / r)^exponent: 2.5 million distinct ones in 2.3 GB."""
NUMBER_SHARE = 0.018
PIECES = 4_096
GAPS = {
    " ": 8_630, ", ": 530, ". ": 440, ".\n": 110, "; ": 14, ": ": 30, "? ": 16, "! ": 8, "-": 70, " (": 40, ") ": 40, "'s ": 25,
    "\u2019s ": 35, " \u2013 ": 16, " - ": 8, " “": 12, "” ": 10, ' "': 15, '" ': 12, "\n- ": 6, "/": 8, "…\n": 1,
}  # fmt: skip
"""What stands behind a word, and how often in 10,000."""
CAPITAL_AFTER = (". ", ".\n", "? ", "! ", "\n- ", "…\n")
FOREIGN = ("café", "Zür", "señor", "élé", "Bjør", "faç", "Καλ", "Моск", "東京", "naïv", "Łód", "Āet")
"""Pieces with letters beyond ASCII."""
DUMPS = tuple(f"CC-MAIN-{year}-{week:02d}" for year in range(2013, 2025) for week in (10, 22, 40, 51))

Ids = NDArray[np.int32]


class WordSource:
    """Draws words. All strings of a text are pieces of one table, so that a text is a gather from it.

    Args:
        texts: common words and the pieces of invented ones are learnt from the lines of prose in them.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        counts = Counter(word for text in texts for line in text.splitlines() if _is_prose(line) for word in _WORD.findall(line.lower()))
        common = counts.most_common(HEAD)
        if len(common) < 1_000:
            raise ValueError(f"the texts have {len(common)} distinct words in lines of prose; it takes 1,000 or more.")
        words = [word for word, _ in common]
        generator = np.random.default_rng(0)
        long = sorted(word for word in counts if len(word) >= 7 and word.isalpha())
        cut = [[long[i] for i in generator.integers(len(long), size=PIECES)] for _ in range(3)]
        cuts = generator.integers(2, 5, size=(3, PIECES)).tolist()
        fronts = [word[:n] for word, n in zip(cut[0], cuts[0], strict=True)]
        fronts[: len(FOREIGN)] = FOREIGN
        middles = [word[2 : 1 + n] for word, n in zip(cut[1], cuts[1], strict=True)]
        ends = [word[-n:] for word, n in zip(cut[2], cuts[2], strict=True)]
        pieces: list[str] = []

        def placed(strings: Iterable[str]) -> int:
            start = len(pieces)
            pieces.extend(strings)
            return start

        self._capital = placed(words) + placed(word.capitalize() for word in words)  # from a common word to its capitalised form
        self._fronts, self._middles, self._ends = placed(fronts), placed(middles), placed(ends)
        placed(word[:1].upper() + word[1:] for word in fronts)
        self._capital_front = len(pieces) - PIECES - self._fronts
        self._numbers = placed(_numbers(generator))
        self._hosts, self._domains = placed(["https://www.", "http://", "www."]), placed([".org", ".com/", ".edu/index.html", ".gov"])
        self._gaps = placed(GAPS)
        self._capital_after = np.array([gap in CAPITAL_AFTER for gap in GAPS])
        self._last = self._gaps + list(GAPS).index(". ")
        self._pieces = pa.array([*pieces, "."])
        self._full_stop = len(pieces)
        self._head = _table(np.array([count * SHORTER ** len(word) for word, count in common]), TABLE)
        self._gap = _table(np.array(list(GAPS.values())), 10_000)
        self._bytes_per_word = 1.0
        sample = self.texts(np.random.default_rng(0), np.array([500_000.0]))  # of so many words
        self._bytes_per_word = len(sample[0].as_buffer()) / 500_000

    def texts(self, generator: np.random.Generator, lengths: NDArray[np.float64]) -> pa.StringArray:
        """Documents, one for each of `lengths`, which are their bytes in UTF-8, more or less."""
        words = np.maximum(1, np.rint(lengths / self._bytes_per_word)).astype(np.int64)
        ends = np.cumsum(words)
        total = int(ends[-1])
        chosen = self._head[generator.integers(TABLE, size=total, dtype=np.int32)]
        gap = self._gap[generator.integers(10_000, size=total, dtype=np.int32)]
        first = np.empty(total, bool)  # of a sentence
        first[0], first[1:] = True, self._capital_after[gap[:-1]]
        first[ends[:-1]] = True
        chosen += first * np.int32(self._capital)
        gap += self._gaps
        gap[ends - 1] = self._full_stop
        kind = generator.random(total, dtype=np.float32)
        number = np.flatnonzero(kind > 1 - NUMBER_SHARE)
        chosen[number] = self._numbers + generator.integers(PIECES, size=number.size, dtype=np.int32)
        tail = np.flatnonzero(kind < TAIL_SHARE)
        front, middle, end = self._invented(generator, tail.size, first[tail])
        counts = np.full(total, 2, np.int64)
        counts[tail] = 4
        behind = np.cumsum(counts)
        ids = np.empty(int(behind[-1]), np.int32)
        ids[behind - counts], ids[behind - 1] = chosen, gap
        start = behind[tail] - 4
        ids[start], ids[start + 1], ids[start + 2] = front, middle, end
        text = self._pieces.take(pa.array(ids))
        offsets = np.frombuffer(text.buffers()[1], np.int32)[np.concatenate([[0], behind[ends - 1]])]
        return pa.StringArray.from_buffers(len(words), pa.py_buffer(offsets), text.buffers()[2])

    def _invented(self, generator: np.random.Generator, size: int, first: NDArray[np.bool_]) -> tuple[Ids, Ids, Ids]:
        """Three pieces for each invented word, decided by its rank alone, except that it is capitalised at the start of a sentence."""
        share = 1 - generator.random(size)
        rank = np.minimum(HEAD * share ** (-1 / TAIL_EXPONENT), 2.0**62).astype(np.uint64)
        mixed = rank * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(32)

        def bits(at: int, below: int) -> Ids:
            return ((mixed >> np.uint64(at)) % np.uint64(below)).astype(np.int32)

        front, middle, end = (start + bits(at, PIECES) for start, at in ((self._fronts, 0), (self._middles, 12), (self._ends, 24)))
        front += (first | (bits(36, 8) < 3)) * np.int32(self._capital_front)  # names
        address = bits(40, 256) == 0
        front[address], end[address] = self._hosts + bits(48, 3)[address], self._domains + bits(50, 4)[address]
        return front, middle, end


_WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")
_NO_PROSE = re.compile(r"[^A-Za-z ,.;:'()-]|::|^\s*(?:[-=]{3}|\.\.|:)")


def _is_prose(line: str) -> bool:
    return line.count(" ") >= 5 and not _NO_PROSE.search(line)


def _table(counts: NDArray[Any], size: int) -> Ids:
    """`size` indices, each as often as its count says."""
    ends = np.rint(np.cumsum(counts) * (size / counts.sum())).astype(np.int64)
    return np.repeat(np.arange(len(counts), dtype=np.int32), np.diff(ends, prepend=0))


def _numbers(generator: np.random.Generator) -> list[str]:
    """Small numbers, years, larger ones with and without commas, decimals."""
    found = [str(int(10 ** (3 * u))) for u in generator.random(PIECES // 2)]
    found += [str(year) for year in generator.integers(1750, 2025, size=PIECES // 4)]
    found += [f"{int(10 ** (3 + 4 * u)):,}" for u in generator.random(PIECES // 8)]
    return found + [f"{value:.{1 + i % 2}f}" for i, value in enumerate(generator.random(PIECES // 8) * 100)]


def lengths_of(generator: np.random.Generator, documents: int) -> NDArray[np.float64]:
    """Bytes of documents: lognormal with mean MEAN_BYTES, clipped, in random order. One comes from each of `documents` equal shares of the
    distribution, so that few documents have nearly the mean of many."""
    quantiles = (generator.permutation(documents) + generator.random(documents)) / documents
    found: NDArray[np.float64] = np.clip(MEAN_BYTES * np.exp(SIGMA * ndtri(quantiles) - SIGMA**2 / 2), SHORTEST, LONGEST)
    return found


def row_group(source: WordSource, generator: np.random.Generator, documents: int) -> pa.Table:
    """`documents` rows of SCHEMA."""
    texts = source.texts(generator, lengths_of(generator, documents))
    sizes = np.diff(np.frombuffer(texts.buffers()[1], np.int32))
    ids = [uuid.UUID(bytes=generator.bytes(16), version=4) for _ in range(documents)]
    dumps = [DUMPS[i] for i in generator.integers(len(DUMPS), size=documents)]
    score = np.round(2.515625 + 2.4 * generator.beta(1, 3, size=documents), 6)
    warc = "s3://commoncrawl/crawl-data/{0}/segments/13686{1:08d}/warc/{0}-{1:05d}-ip-10-60-113-184.ec2.internal.warc.gz"
    columns = [
        texts,
        [f"<urn:uuid:{value}>" for value in ids],
        dumps,
        [f"http://www.{value.hex[:7]}.org/{value.hex[7:15]}/{value.hex[15:22]}.html" for value in ids],
        [warc.format(dump, value) for dump, value in zip(dumps, generator.integers(100_000, size=documents).tolist(), strict=True)],
        ["en"] * documents,
        np.round(0.65 + 0.35 * generator.beta(6, 1, size=documents), 6),
        np.maximum(1, sizes / 4.7).astype(np.int64),
        score,
        np.rint(score).astype(np.int64),
    ]
    return pa.table([pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)


def groups_of(source: WordSource, *, seed: int, file: int, documents: int) -> Iterator[pa.Table]:
    """The row groups of one file, one after the other."""
    for group, start in enumerate(range(0, documents, ROW_GROUP)):
        yield row_group(source, np.random.default_rng([seed, file, group]), min(ROW_GROUP, documents - start))


@dataclass(frozen=True, kw_only=True)
class Made:
    """What was written: documents, bytes of their texts in UTF-8, bytes of the files."""

    documents: int
    text_bytes: int
    file_bytes: int


def default_source() -> WordSource:
    """Words learnt from the docstrings of the installed packages."""
    corpus, skipped = docstring_corpus(), Counter[str]()
    return WordSource(document.text for part in corpus.parts(skipped) for document in corpus.documents(part, skipped))


def write_standin(folder: Path, *, text_bytes: float, files: int = 14, seed: int = 0, source: WordSource | None = None) -> Made:
    """Write `000_00000.parquet`, `001_00000.parquet`, ... into `folder`, in flat memory.

    Args:
        text_bytes: of all texts in UTF-8 together, in expectation.
        source: where words come from; None: `default_source`.
    """
    source = source or default_source()
    folder.mkdir(parents=True, exist_ok=True)
    documents, bytes_of_texts, bytes_of_files = max(files, round(text_bytes / MEAN_BYTES)), 0, 0
    for file in range(files):
        path = folder / f"{file:03d}_00000.parquet"
        share = documents * (file + 1) // files - documents * file // files
        with pq.ParquetWriter(path, SCHEMA, compression="snappy") as writer:
            for table in groups_of(source, seed=seed, file=file, documents=share):
                writer.write_table(table, row_group_size=ROW_GROUP)
                offsets = np.frombuffer(table["text"].chunk(0).buffers()[1], np.int32)
                bytes_of_texts += int(offsets[-1] - offsets[0])
        bytes_of_files += path.stat().st_size
    return Made(documents=documents, text_bytes=bytes_of_texts, file_bytes=bytes_of_files)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("out", type=Path, help="folder for the files")
    options.add_argument("--gigabytes", type=float, default=2.0, help="10^9 bytes of text in UTF-8; the files are smaller")
    options.add_argument("--files", type=int, default=14)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    started = time.perf_counter()
    made = write_standin(given.out, text_bytes=given.gigabytes * 1e9, files=given.files, seed=given.seed)
    seconds = time.perf_counter() - started
    print(f"{made.documents} documents, {made.text_bytes} bytes of text ({made.text_bytes / made.documents:.0f} a document)")
    print(f"{given.files} files of {made.file_bytes} bytes in all, in {seconds:.1f} s")
    texts = pq.ParquetFile(given.out / "000_00000.parquet").read_row_group(0, columns=["text"])["text"].to_pylist()
    words = Counter(word for text in texts for word in text.split())
    print(f"distinct words in the first {sum(len(text.encode()) for text in texts)} bytes: {len(words)} of {words.total()}")


if __name__ == "__main__":
    main()
