"""Files that are broken, enormous or odd: refused by name and row, or left out and counted, and never held in memory as a whole."""

from __future__ import annotations

import json
import os
import random
import re
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthroute.common.errors import DepthrouteError, FailureError, RequestError
from depthroute.data import Document, FileCorpus, rows
from depthroute.data.packed import Lines
from tests.data.preparation import LINE_KINDS, packed

NOT_UTF8 = b"caf\xe9"


def stream(path: Path, skipped: Counter[str], **options: Any) -> Iterator[Document]:
    corpus = FileCorpus(path, **options)
    for part in corpus.parts(skipped):
        yield from corpus.documents(part, skipped)


def texts(path: Path, skipped: Counter[str] | None = None, **options: Any) -> list[str]:
    return [document.text for document in stream(path, Counter() if skipped is None else skipped, **options)]


def refusal(path: Path, kind: type[DepthrouteError], **options: Any) -> str:
    with pytest.raises(kind) as caught:
        texts(path, **options)
    return str(caught.value)


def plan_refusal(path: Path, kind: type[DepthrouteError], **options: Any) -> str:
    """What `parts` alone refuses."""
    with pytest.raises(kind) as caught:
        FileCorpus(path, **options).parts(Counter())
    return str(caught.value)


BAD_LINES = (
    (b'{"text": "caf\xe9", "id": "x"}', FailureError, "is not valid UTF-8 (byte 0xe9)", "rows that are not UTF-8"),
    (b"\0\0\0", FailureError, "is not valid JSON", "rows that are not JSON"),
    (b'\xef\xbb\xbf{"text": "a", "id": "b"}', FailureError, "is not valid JSON", "rows that are not JSON"),
    (b'{"text": "a", "id": "b"', FailureError, "is not valid JSON", "rows that are not JSON"),
    (b"[" * 200_000, FailureError, "is nested deeper than the 200 levels that are allowed", "rows that are nested too deep"),
    (b'{"text": "a", "id": 1' + b"0" * 5000 + b"}", FailureError, "is not valid JSON", "rows that are not JSON"),
    (b'"text"', FailureError, "must be a JSON object with a key for the text, not 'text'", "rows that are not JSON objects"),
    (b'{"text": "a\\udc00", "id": "b"}', FailureError, "holds half a surrogate pair (\\udc00)", "rows that hold half a surrogate pair"),
    (b'{"text": "a", "id": "\\ud83d"}', FailureError, "holds half a surrogate pair (\\ud83d)", "rows that hold half a surrogate pair"),
    (b'{"text": ["a"], "id": "b"}', RequestError, "column 'text' must hold text, not ['a']", "rows whose text or id is not text"),
    (b'{"text": "a", "id": {}}', RequestError, "column 'id' must hold text or whole numbers, not {}", "rows whose text or id is not text"),
    (b'{"id": "b"}', RequestError, "lacks the text column 'text'", "rows without the text column"),
    (b'{"text": "a"}', RequestError, "lacks the id column 'id'", "rows without the id column"),
)


@LINE_KINDS
@pytest.mark.parametrize(("line", "kind", "message", "reason"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_is_refused_or_left_out(
    name: str, line: bytes, kind: type[DepthrouteError], message: str, reason: str, tmp_path: Path
) -> None:
    path = packed(tmp_path / name, b'{"text": "one", "id": 1}\n\n' + line + b'\n{"text": "two", "id": 2}\n')
    refused = refusal(path, kind, id_column="id")
    assert f"{name} row 3" in refused and message in refused and "set bad_rows to skip" in refused
    skipped: Counter[str] = Counter()
    assert texts(path, skipped, id_column="id", bad_rows="skip") == ["one", "two"]
    assert skipped == {reason: 1}


@LINE_KINDS
def test_a_bad_first_line_does_not_decide_about_the_columns(name: str, tmp_path: Path) -> None:
    path = packed(tmp_path / name, b'not JSON\n{"content": "one", "score": 1}\n')
    assert f"{name} row 1 is not valid JSON" in plan_refusal(path, FailureError)
    assert texts(path, bad_rows="skip") == ["one"]
    packed(path, b"not JSON\n")
    skipped: Counter[str] = Counter()
    assert texts(path, skipped, bad_rows="skip") == []
    assert skipped == {"rows that are not JSON": 1}
    packed(path, b'{"body": "one"}\n{"text": "two"}\n')
    assert f"{name} row 1: text_column: unknown column 'text'. Allowed: body." in plan_refusal(path, RequestError)
    skipped.clear()
    assert texts(path, skipped, bad_rows="skip") == ["two"] and skipped == {"rows without the text column": 1}
    packed(path, b'{"body": "one"}\n{"title": "two"}\n')
    assert f"{name} row 1: text_column: unknown column 'text'. Allowed: body." in plan_refusal(path, RequestError, bad_rows="skip")


@pytest.mark.parametrize("kind", ["string", "view", "coded"])
def test_bad_rows_of_parquet_are_refused_or_left_out(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    damaged = pa.array([b"one", NOT_UTF8, b"two", b"three"]).view(pa.string())
    damaged = {"string": damaged, "view": damaged.cast(pa.string_view()), "coded": damaged.dictionary_encode()}[kind]
    ids = pa.array([b"1", b"2", NOT_UTF8, b"4"]).view(pa.string())
    pq.write_table(pa.table({"text": damaged, "id": ids}), path)
    assert "d.parquet row 2 is not valid UTF-8" in refusal(path, FailureError)
    skipped: Counter[str] = Counter()
    assert texts(path, skipped, id_column="id", bad_rows="skip") == ["one", "three"]
    assert skipped == {"rows that are not UTF-8": 2}


def test_a_bad_text_file_is_refused_or_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(NOT_UTF8)
    (tmp_path / "b.txt").write_bytes("wide".encode("utf-16"))
    (tmp_path / "c.txt").write_bytes(b"")
    (tmp_path / "d.txt").write_bytes(b"one")
    skipped: Counter[str] = Counter()
    assert texts(tmp_path, skipped, bad_rows="skip") == ["one"]
    assert skipped == {"rows that are not UTF-8": 2, "documents whose text is empty or blank": 1}


def test_how_deep_a_row_may_be_nested_does_not_depend_on_who_reads_it(tmp_path: Path) -> None:
    """Nor do brackets in the text count."""
    rows = [{"text": f"{depth} " + "[{" * 300, "x": json.loads("[" * depth + "]" * depth)} for depth in (198, 199, 200)]
    path = packed(tmp_path / "d.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())

    def read_from(frames: int) -> list[str]:
        return texts(path, bad_rows="skip") if frames == 0 else read_from(frames - 1)

    assert [text.split()[0] for text in read_from(0)] == ["198", "199"]
    assert read_from(0) == read_from(300)


def test_rows_that_are_skipped_are_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To name a row is to count those before it: of each of a million it takes hours."""
    named: list[int] = []
    monkeypatch.setattr(Lines, "row", lambda self, position: named.append(position) or 0)
    path = packed(tmp_path / "d.jsonl", b'{"body": "one"}\n' * 50 + b'{"text": "two"}\n')
    assert texts(path, bad_rows="skip") == ["two"]
    assert len(named) <= 1


@pytest.mark.parametrize(("suffix", "kind"), [(".gz", "gzip"), (".zst", "zstd")])
def test_a_compressed_file_whose_name_does_not_say_so(suffix: str, kind: str, tmp_path: Path) -> None:
    path = packed(tmp_path / f"d.jsonl{suffix}", b'{"text": "one"}\n').rename(tmp_path / "d.jsonl")
    assert f"d.jsonl is compressed ({kind}); rename it so that it ends in {suffix}." in plan_refusal(path, RequestError)


def test_a_file_that_is_replaced_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    pq.write_table(pa.table({"text": ["one"] * 40}), path, row_group_size=10)
    corpus = FileCorpus(path)
    (part,) = corpus.parts(Counter())
    pq.write_table(pa.table({"text": ["one"] * 10}), path)
    with pytest.raises(FailureError, match=r"d\.parquet is not a whole parquet file"):
        list(corpus.documents(part, Counter()))
    path = packed(tmp_path / "d.jsonl.gz", b'{"text": "one"}\n' * 5000 + b"rubbish\n")
    corpus = FileCorpus(path)
    (part,) = corpus.parts(Counter())
    documents = corpus.documents(part, Counter())
    next(documents)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(FailureError, match=r"d\.jsonl\.gz is not a whole gzip file"):
        list(documents)


@pytest.mark.parametrize("name", ["d.jsonl.gz", "d.jsonl.zst"])
def test_the_lost_rest_of_a_file_is_never_skipped(name: str, tmp_path: Path) -> None:
    noise = random.Random(0)
    lines = [json.dumps({"text": f"{i} {noise.randbytes(99).hex()}"}).encode() + b"\n" for i in range(4000)]
    path = packed(tmp_path / name, b"".join(lines))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    message = plan_refusal(path, FailureError, bad_rows="skip")
    found = re.search(rf"{name} is not a whole g?z\w+ file: reading stopped after row (\d+) ", message)
    assert found is not None and 0 < int(found[1]) < 3000
    path.write_bytes(whole + b"rubbish")
    assert "reading stopped after row 39" in plan_refusal(path, FailureError, bad_rows="skip")
    # and a file that is damaged after it was found whole
    path.write_bytes(whole)
    corpus = FileCorpus(path, bad_rows="skip")
    (part,) = corpus.parts(Counter())
    path.write_bytes(whole[: len(whole) // 2])
    read: list[Document] = []
    with pytest.raises(FailureError, match=rf"{name} is not a whole g?z\w+ file: reading stopped after byte \d+ ") as error:
        read.extend(corpus.documents(part, Counter()))
    assert f"after byte {sum(map(len, lines[: len(read)]))} " in str(error.value)


def test_damaged_pages_of_parquet_are_never_skipped(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    table = pa.table({"text": [f"{i} " + "word " * 50 for i in range(400)]})
    pq.write_table(table, path, row_group_size=100, write_page_checksum=True, compression="none", use_dictionary=False)
    whole = bytearray(path.read_bytes())
    at = whole.index(b"250 word") + 20
    whole[at] ^= 1  # still text: only the checksum tells
    path.write_bytes(whole)
    found: list[str] = []
    with pytest.raises(FailureError, match=r"d\.parquet is not a whole parquet file: reading row 201 failed"):
        found.extend(document.text for document in stream(path, Counter(), bad_rows="skip"))
    for cut in (0, 3, 8, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert "d.parquet is not a whole parquet file" in plan_refusal(path, FailureError, bad_rows="skip")
    pq.write_table(pa.table({"text": ["a"], "other": ["b"]}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"other", b"oth\xe9r"))
    assert "d.parquet is not a whole parquet file" in plan_refusal(path, FailureError)


def test_a_parquet_file_with_fewer_rows_than_it_says_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    pq.write_table(pa.table({"text": ["word"] * 100}), path, use_dictionary=False, compression="none")
    data = path.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    path.write_bytes(data[:footer] + data[footer:].replace(b"\xc8\x01", b"\xca\x01"))  # 100 and 101, as Thrift writes them
    assert pq.read_metadata(path).num_rows == 101
    assert "d.parquet is not a whole parquet file: row group 1 ends after row 100, not 101." in refusal(path, FailureError)


@pytest.mark.parametrize("part_bytes", [64, 10**6])
@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.gz", "d.jsonl.zst", "d.parquet", "d.txt"])
def test_a_document_that_is_too_large_is_a_bad_row(name: str, part_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "LARGEST_DOCUMENT", 1000)
    monkeypatch.setattr(rows, "PART_BYTES", part_bytes)
    path = tmp_path / name
    given = ["fits", "é" * 501, "a" * 985, "fits too"]  # 1002 and 985 bytes of UTF-8; with the key, 997 of JSON
    row = 2
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": given}), path)
    elif path.suffix == ".txt":
        path.write_bytes(given[1].encode())
        given, row = [given[1]], 1
    else:
        packed(path, "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in given).encode())
    assert f"{name} row {row} has 100" in (message := refusal(path, RequestError))
    assert "above the 1000 that are allowed; cut it into smaller documents." in message
    skipped: Counter[str] = Counter()
    assert texts(path, skipped, bad_rows="skip") == [text for text in given if len(text.encode()) <= 1000]
    assert skipped == {"rows that are too large": 1}


@LINE_KINDS
def test_a_line_may_be_as_long_as_the_largest_document(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "LARGEST_DOCUMENT", 1000)
    lines = [json.dumps({"text": "a" * (length - 13)}) + "\n" for length in (1000, 1001, 1002)]
    assert [len(line) for line in lines] == [1000, 1001, 1002]
    path = packed(tmp_path / name, "".join([*lines, '{"text": "next"}\n']).encode())
    skipped: Counter[str] = Counter()
    assert texts(path, skipped, bad_rows="skip") == ["a" * 987, "next"]
    assert skipped == {"rows that are too large": 2}


@LINE_KINDS
def test_an_endless_line_is_not_held_in_memory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "LARGEST_DOCUMENT", 1000)
    monkeypatch.setattr(rows, "PART_BYTES", 2**22)
    path = packed(tmp_path / name, b'{"text": "one"}\n{"text": "' + b"a" * 2**24 + b'"}\n{"text": "two"}\n')
    skipped: Counter[str] = Counter()
    tracemalloc.start()
    try:
        assert texts(path, skipped, bad_rows="skip") == ["one", "two"]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert skipped == {"rows that are too large": 1}
    assert peak < 2**23


def test_a_row_group_is_not_held_in_memory(tmp_path: Path) -> None:
    """64 MiB of text that hardly compresses, in one row group, with under 8 MiB of Arrow's memory."""
    path = tmp_path / "d.parquet"
    text = random.Random(0).randbytes(2**22).hex()
    table = pa.table({"text": [text[i : i + 2**18] + str(i) for i in range(0, 2**22, 2**14)], "other": [text[:2000]] * 256})
    # A page, about 1 MiB here, is the least that can be read.
    pq.write_table(table, path, row_group_size=10**6, use_dictionary=False, write_batch_size=1)
    size = table.nbytes
    del table
    before = pa.total_allocated_bytes()
    peak, count = 0, 0
    for document in stream(path, Counter()):
        count += len(document.text)
        peak = max(peak, pa.total_allocated_bytes() - before)
    assert size > 2**26 and count > 2**26
    assert peak < 2**23


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=8),
    st.sampled_from([b"\n", b"\r\n", b"\n\n"]),
    st.booleans(),
    st.integers(1, 50),
)
def test_lines_are_read_the_same_however_they_are_cut(
    tmp_path_factory: pytest.TempPathFactory, given: list[str], between: bytes, ended: bool, part_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "d.jsonl"
    lines = (json.dumps({"text": text}, ensure_ascii=len(text) % 2 == 0).encode() for text in given)
    path.write_bytes(between.join(lines) + (between if ended else b""))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "PART_BYTES", part_bytes)
        assert texts(path) == [text for text in given if text.strip()]


def test_odd_entries_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("one", encoding="utf-8")
    (tmp_path / "in" / "b.txt").symlink_to(tmp_path / "in" / "a.txt")
    (tmp_path / "in" / "again").symlink_to(tmp_path / "in")
    skipped: Counter[str] = Counter()
    assert texts(tmp_path / "in", skipped) == ["one", "one"]  # the same text has the same id, and is there twice
    assert skipped == {"folders that are links": 1}
    (tmp_path / "in" / "c.txt").symlink_to(tmp_path / "nowhere")
    assert "c.txt cannot be read (No such file" in plan_refusal(tmp_path / "in", RequestError)
    with pytest.raises(RequestError, match=r"c\.txt cannot be read"):
        FileCorpus(tmp_path / "in").stamp()
    (tmp_path / "in" / "c.txt").unlink()
    os.mkfifo(tmp_path / "in" / "d.jsonl")
    assert "d.jsonl is not a regular file" in plan_refusal(tmp_path / "in", RequestError)
    assert "d.jsonl is not a regular file" in plan_refusal(tmp_path / "in" / "d.jsonl", RequestError)


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    strange = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt"))
    try:
        strange.write_bytes(b"one")
    except OSError:
        pytest.skip("this file system takes names in UTF-8 only")
    assert "caf\\udce9.txt' is not UTF-8; rename it." in plan_refusal(tmp_path, RequestError)


@pytest.mark.parametrize("name", ["d.parquet", "d.jsonl", "d.jsonl.gz", "d.jsonl.zst", "d.txt"])
def test_what_may_not_be_read_is_refused_before_reading(name: str, tmp_path: Path) -> None:
    path = tmp_path / "in" / name
    path.parent.mkdir()
    path.write_bytes(b"x")
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    assert f"{name} cannot be read (Permission denied)" in plan_refusal(tmp_path, RequestError)
    path.parent.chmod(0)
    try:
        assert "in cannot be read (Permission denied)" in plan_refusal(tmp_path, RequestError)
    finally:
        path.parent.chmod(0o700)


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    pq.write_table(pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), path)
    assert "text_column: there are several columns 'text'" in plan_refusal(path, RequestError)


def test_equal_ids_are_kept(tmp_path: Path) -> None:
    path = packed(tmp_path / "d.jsonl", b'{"text": "one", "id": "a"}\n{"text": "two", "id": "a"}\n')
    assert list(stream(path, Counter(), id_column="id")) == [Document("a", "one"), Document("a", "two")]


def test_files_without_rows_have_no_documents(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"")
    packed(tmp_path / "b.jsonl", b"\n\r\n")
    packed(tmp_path / "c.jsonl.gz", b"")
    packed(tmp_path / "d.jsonl.zst", b"")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "e.parquet")
    skipped: Counter[str] = Counter()
    assert texts(tmp_path, skipped) == [] and not skipped
