from __future__ import annotations

import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from depthroute.common.errors import DepthrouteError, FailureError, RequestError
from depthroute.data import Document, FileCorpus

ROWS = [{"id": "a", "text": "First, with ∑."}, {"id": "b", "text": "Second\r\nwith two lines."}, {"id": "c", "text": "Third."}]
EXPECTED = [Document(row["id"], row["text"]) for row in ROWS]


def write(path: Path, rows: Sequence[Any] = ROWS) -> Path:
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=2)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines))
    else:
        path.write_bytes(lines)
    return path


def read(path: Path, skipped: Counter[str] | None = None, **options: Any) -> list[Document]:
    return list(FileCorpus(path, **options).documents(Counter() if skipped is None else skipped))


KINDS = pytest.mark.parametrize("name", ["d.parquet", "d.jsonl", "d.jsonl.gz", "D.JSONL"])


@KINDS
def test_every_kind_gives_the_same_documents(name: str, tmp_path: Path) -> None:
    assert read(write(tmp_path / name), id_column="id") == EXPECTED


@KINDS
def test_without_an_id_the_text_is_hashed(name: str, tmp_path: Path) -> None:
    hashes = [hashlib.sha256(row["text"].encode()).hexdigest() for row in ROWS]
    assert [document.id for document in read(write(tmp_path / name))] == hashes
    rows = [{"id": None, "text": ROWS[0]["text"]}, {"id": "x", "text": "other"}]
    assert [document.id for document in read(write(tmp_path / name, rows), id_column="id")] == [hashes[0], "x"]


@KINDS
def test_whole_numbers_are_ids(name: str, tmp_path: Path) -> None:
    assert read(write(tmp_path / name, [{"id": 7, "text": "t"}]), id_column="id") == [Document("7", "t")]


@KINDS
def test_columns_are_chosen_by_name(name: str, tmp_path: Path) -> None:
    rows = [{"body": "t", "key": "k", "text": "not this"}]
    assert read(write(tmp_path / name, rows), text_column="body", id_column="key") == [Document("k", "t")]
    assert read(write(tmp_path / name, rows), text_column="body", id_column="body") == [Document("t", "t")]


@KINDS
def test_null_and_blank_texts_are_counted(name: str, tmp_path: Path) -> None:
    skipped: Counter[str] = Counter()
    rows = [{"text": None}, {"text": "t"}, {"text": " \n"}, {"text": None}]
    assert [document.text for document in read(write(tmp_path / name, rows), skipped)] == ["t"]
    assert skipped == {"rows whose text is null": 2, "documents whose text is empty or blank": 1}


def test_text_files_are_one_document_each(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    assert [document.text for document in read(tmp_path / "a.txt")] == ["one\r\ntwo\n"]
    with pytest.raises(RequestError, match=r"a\.txt is a text file and has no column 'id'"):
        read(tmp_path / "a.txt", id_column="id")


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    for name in ("b/2.txt", "a.txt", "b/1.txt", "c.txt", ".hidden.txt", ".git/x.txt", "notes.md", "b/table.csv", "LICENSE"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name, encoding="utf-8")
    write(tmp_path / "b" / "3.jsonl.gz", [{"text": "b/3"}])
    skipped: Counter[str] = Counter()
    corpus = FileCorpus(tmp_path)
    assert [document.text for document in corpus.documents(skipped)] == ["a.txt", "b/1.txt", "b/2.txt", "b/3", "c.txt"]
    assert corpus.contents == ("a.txt", "b/1.txt", "b/2.txt", "b/3.jsonl.gz", "c.txt")
    kinds = ("files of another kind (.csv)", "files of another kind (.md)", "files of another kind (no suffix)")
    assert skipped == dict.fromkeys(kinds, 1)


def test_the_stamp_changes_with_the_files(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl")
    before = FileCorpus(tmp_path).stamp()
    assert FileCorpus(tmp_path).stamp() == before
    path.write_bytes(path.read_bytes() + b"\n")
    assert FileCorpus(tmp_path).stamp() != before


def test_documents_are_streamed(tmp_path: Path) -> None:
    """The first rows arrive although a later one is broken, so they were not read together."""
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"text": "one"}\n{"text": "two"}\nnot JSON\n')
    documents = FileCorpus(path).documents(Counter())
    assert [next(documents).text, next(documents).text] == ["one", "two"]
    with pytest.raises(FailureError, match="row 3"):
        next(documents)


def refusal(path: Path, kind: type[DepthrouteError], **options: Any) -> str:
    with pytest.raises(kind) as caught:
        read(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(("name", "where"), [("d.parquet", "d.parquet"), ("d.jsonl", "d.jsonl row 1"), ("d.jsonl.gz", "d.jsonl.gz row 1")])
@pytest.mark.parametrize("option", ["text_column", "id_column"])
def test_a_missing_column_is_refused_with_the_nearest(name: str, where: str, option: str, tmp_path: Path) -> None:
    rows = [{"texts": "t", "text": "t", "ident": "i"}]
    wrong = {"text_column": "tekst", "id_column": "idnt"}[option]
    nearest = {"text_column": "text", "id_column": "ident"}[option]
    message = refusal(write(tmp_path / name, rows), RequestError, **{option: wrong})
    assert f"{where}: {option}: unknown column {wrong!r}; perhaps you meant {nearest!r}. Allowed: ident, text, texts." in message


@KINDS
def test_a_column_that_is_not_text_is_refused(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, [{"text": 3, "id": 1.5}])
    assert "row 1: column 'text' must hold text, not 3" in refusal(path, RequestError)
    path = write(tmp_path / name, [{"text": "a", "id": 1.5}])
    assert "row 1: column 'id' must hold text or whole numbers, not 1.5" in refusal(path, RequestError, id_column="id")


def test_bytes_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 au lait")
    assert "a.txt row 1 is not valid UTF-8 (byte 0xe9)" in refusal(tmp_path / "a.txt", FailureError)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "t"}\n\n{"text": "caf\xe9"}\n')
    assert "a.jsonl row 3 is not valid UTF-8 (byte 0xe9)" in refusal(tmp_path / "a.jsonl", FailureError)
    not_text = pa.array([b"fine", b"caf\xe9"]).view(pa.string())  # Arrow does not check
    pq.write_table(pa.table({"text": not_text}), tmp_path / "a.parquet")
    assert "a.parquet row 2 is not valid UTF-8 (byte 0xe9)" in refusal(tmp_path / "a.parquet", FailureError)


def test_half_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "t"}\n{"text": "\\ud83d"}\n')
    assert "a.jsonl row 2 holds half a surrogate pair (\\ud83d)" in refusal(tmp_path / "a.jsonl", FailureError)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "t"}\n{"text": "t"\n')
    assert "a.jsonl row 2 is not valid JSON" in refusal(tmp_path / "a.jsonl", FailureError)
    (tmp_path / "a.jsonl").write_bytes(b'["t"]\n')
    assert "a.jsonl row 1 must be a JSON object with the key 'text', not ['t']" in refusal(tmp_path / "a.jsonl", FailureError)
    packed = write(tmp_path / "a.jsonl.gz", [{"text": str(i) * 50} for i in range(100)])
    packed.write_bytes(packed.read_bytes()[:-20])
    assert "a.jsonl.gz is not a whole gzip file: reading stopped after row" in refusal(packed, FailureError)
    packed.write_bytes(b'{"text": "not compressed"}\n')
    assert "a.jsonl.gz is not a whole gzip file: reading stopped after row 0" in refusal(packed, FailureError)
    table = write(tmp_path / "a.parquet", [{"text": "t" * 100}])
    whole = table.read_bytes()
    for damaged in (whole[:-30], b"", b"PAR1 and nothing else"):
        table.write_bytes(damaged)
        assert "a.parquet is not a whole parquet file" in refusal(table, FailureError)
    table.write_bytes(whole[:4] + b"\xff" * 40 + whole[44:])
    assert "a.parquet is not a whole parquet file: reading row 1 failed" in refusal(table, FailureError)


def test_sources_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"the source '.*nothing' does not exist"):
        FileCorpus(tmp_path / "nothing")
    with pytest.raises(RequestError, match="holds no file that can be read"):
        FileCorpus(tmp_path)
    (tmp_path / "a.csv").write_text("text\nt\n", encoding="utf-8")
    with pytest.raises(RequestError, match=r"a\.csv is not of a kind that can be read; allowed: \.parquet, \.jsonl, \.jsonl\.gz, \.txt"):
        FileCorpus(tmp_path / "a.csv")
