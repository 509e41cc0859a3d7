"""The stand-in for FineWeb-Edu that the benchmarks of the data generate."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks.fineweb import MEAN_BYTES, WordSource, lengths_of, write_standin
from depthroute.data import FileCorpus, docstring_corpus

COLUMNS = {
    "text": "string", "id": "string", "dump": "string", "url": "string", "file_path": "string", "language": "string",
    "language_score": "double", "token_count": "int64", "score": "double", "int_score": "int64",
}  # fmt: skip
"""Of sample-10BT, in their order."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> WordSource:
    corpus = docstring_corpus((), cache=tmp_path_factory.mktemp("cache"))  # the standard library alone is read in a second
    return WordSource(document.text for part in corpus.parts(Counter()) for document in corpus.documents(part, Counter()))


def write(folder: Path, source: WordSource, *, files: int = 2, text_bytes: float = 2e6, seed: int = 0) -> dict[str, bytes]:
    write_standin(folder, text_bytes=text_bytes, files=files, seed=seed, source=source)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_the_files_are_like_those_of_sample_10bt(source: WordSource, tmp_path: Path) -> None:
    made = write_standin(tmp_path, text_bytes=12e6, files=2, source=source)
    paths = sorted(tmp_path.iterdir())
    assert [path.name for path in paths] == ["000_00000.parquet", "001_00000.parquet"]
    documents, ids, text_bytes = 0, set[str](), 0
    for path in paths:
        file = pq.ParquetFile(path)
        assert {field.name: str(field.type) for field in file.schema_arrow} == COLUMNS
        assert list(file.schema_arrow.names) == list(COLUMNS)
        assert file.metadata.row_group(0).column(0).compression == "SNAPPY"
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
        assert set(sizes[:-1]) == {1_000}
        documents += sum(sizes)
        table = file.read()
        ids.update(table["id"].to_pylist())
        text_bytes += sum(len(text.encode()) for text in table["text"].to_pylist())
    assert all(re.fullmatch(r"<urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}>", value) for value in ids)
    assert len(ids) == documents == made.documents
    assert made.text_bytes == text_bytes == pytest.approx(12e6, rel=0.05)


def test_a_seed_gives_the_same_bytes_every_time(source: WordSource, tmp_path: Path) -> None:
    first = write(tmp_path / "first", source)
    assert write(tmp_path / "again", source) == first
    other = write(tmp_path / "other", source, seed=1)
    assert all(other[name] != first[name] for name in first)
    texts = [pq.read_table(tmp_path / "first" / name)["text"][0].as_py() for name in first]
    assert texts[0] != texts[1]  # files differ as well


def test_lengths_are_those_of_the_paper(source: WordSource) -> None:
    generator = np.random.default_rng(0)
    asked = lengths_of(generator, 3_000)
    lengths = np.array([len(text.encode()) for text in source.texts(generator, asked).to_pylist()])
    assert lengths.mean() == pytest.approx(MEAN_BYTES, rel=0.03)
    assert np.median(lengths) < 0.75 * lengths.mean()  # a long tail
    assert lengths.max() > 15 * np.median(lengths)
    assert np.corrcoef(asked, lengths)[0, 1] > 0.99  # each document has its own length, not only all of them together


def test_distinct_words_keep_growing_as_in_prose(source: WordSource) -> None:
    """Heaps' law: with n words, k n^b distinct ones, b between 0.5 and 0.75, far from used up."""
    texts = source.texts(np.random.default_rng(1), np.full(200, 40_000.0)).to_pylist()
    words = [word for text in texts for word in re.findall(r"\w+", text)]
    parts = [len(set(words[: len(words) // share])) for share in (4, 1)]
    assert 0.5 < np.log(parts[1] / parts[0]) / np.log(4) < 0.75
    common = Counter(words)
    assert common["the"] / len(words) > 0.03
    assert any(not word.isascii() for word in common) and any(word.isdigit() for word in common)


def test_it_is_read_as_fineweb(source: WordSource, tmp_path: Path) -> None:
    write(tmp_path, source, files=1, text_bytes=1e5)
    corpus = FileCorpus(tmp_path)
    parts = corpus.parts(Counter())
    assert {part.columns for part in parts} == {("text", "id")}
    rows = pq.read_table(tmp_path / "000_00000.parquet").select(["id", "text"]).to_pylist()
    assert [document._asdict() for part in parts for document in corpus.documents(part, Counter())] == rows


def test_texts_without_prose_are_refused() -> None:
    with pytest.raises(ValueError, match="3 distinct words"):
        WordSource(["one two three one two three one"])
