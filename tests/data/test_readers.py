from __future__ import annotations

import gzip
import hashlib
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from depthroute.common.errors import DepthrouteError, FailureError, RequestError
from depthroute.data import Document, FileCorpus, Source, json_lines, parquet, rows
from depthroute.data.hub import HubCorpus
from depthroute.data.packed import Lines
from depthroute.data.readers import open_source
from tests.data.preparation import LINE_KINDS, packed

ROWS = [{"id": "a", "text": "First, with ∑."}, {"id": "b", "text": "Second\r\nwith two lines."}, {"id": "c", "text": "Third."}]
EXPECTED = [Document(row["id"], row["text"]) for row in ROWS]


def write(path: Path, rows: Sequence[Any] = ROWS) -> Path:
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=2)
    else:
        packed(path, lines)
    return path


def read(path: Path, skipped: Counter[str] | None = None, **options: Any) -> list[Document]:
    """All documents. Each part is read by a corpus of its own, as in worker processes."""
    skipped = Counter() if skipped is None else skipped
    parts = FileCorpus(path, **options).parts(skipped)
    return [document for part in parts for document in FileCorpus(path, **options).documents(part, skipped)]


KINDS = pytest.mark.parametrize("name", ["d.parquet", "d.jsonl", "d.jsonl.gz", "d.jsonl.zst", "D.JSONL"])


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
    parts = corpus.parts(skipped)
    assert [part.name for part in parts] == ["a.txt", "b/1.txt", "b/2.txt", "b/3.jsonl.gz", "c.txt"]
    assert [document.text for part in parts for document in corpus.documents(part, skipped)] == [
        "a.txt",
        "b/1.txt",
        "b/2.txt",
        "b/3",
        "c.txt",
    ]
    assert corpus.contents == ("a.txt", "b/1.txt", "b/2.txt", "b/3.jsonl.gz", "c.txt")
    kinds = ("files of another kind (.csv)", "files of another kind (.md)", "files of another kind (no suffix)")
    assert skipped == dict.fromkeys(kinds, 1) | {"hidden files and folders": 2}


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
    corpus = FileCorpus(path)
    documents = corpus.documents(corpus.parts(Counter())[0], Counter())
    assert [next(documents).text, next(documents).text] == ["one", "two"]
    with pytest.raises(FailureError, match="row 3"):
        next(documents)


def refusal(path: Path, kind: type[DepthrouteError], **options: Any) -> str:
    with pytest.raises(kind) as caught:
        read(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("name", "where"), [("d.parquet", "d.parquet"), ("d.jsonl", "d.jsonl row 1"), ("d.jsonl.zst", "d.jsonl.zst row 1")]
)
@pytest.mark.parametrize("option", ["text_column", "id_column"])
def test_a_missing_column_is_refused_with_the_nearest(name: str, where: str, option: str, tmp_path: Path) -> None:
    rows = [{"texts": "t", "text": "t", "ident": "i"}]
    wrong = {"text_column": "tekst", "id_column": "idnt"}[option]
    nearest = {"text_column": "text", "id_column": "ident"}[option]
    message = refusal(write(tmp_path / name, rows), RequestError, **{option: wrong})
    assert f"{where}: {option}: unknown column {wrong!r}; perhaps you meant {nearest!r}. Allowed: ident, text, texts." in message


@LINE_KINDS
def test_a_value_that_is_not_text_is_refused(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, [{"text": 3, "id": 1.5}])
    assert "row 1: column 'text' must hold text, not 3" in refusal(path, RequestError)
    for wrong in (1.5, True, ["a"]):
        path = write(tmp_path / name, [{"text": "a", "id": wrong}])
        assert f"row 1: column 'id' must hold text or whole numbers, not {wrong}" in refusal(path, RequestError, id_column="id")


def test_a_parquet_column_that_is_not_text_is_refused_before_reading(tmp_path: Path) -> None:
    path = write(tmp_path / "d.parquet", [{"text": 3, "id": 1.5, "other": "t", "inner": {"x": "t"}}])
    for options, message in (
        ({}, "column 'text' must hold text, not int64; choose another text_column"),
        ({"text_column": "inner"}, "column 'inner' must hold text, not columns of its own"),
        ({"text_column": "other", "id_column": "id"}, "column 'id' must hold text or whole numbers, not double; choose another id_column"),
    ):
        with pytest.raises(RequestError, match=f"d.parquet: {message}"):
            FileCorpus(path, **options).parts(Counter())


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
    assert "a.jsonl row 1 must be a JSON object with a key for the text, not ['t']" in refusal(tmp_path / "a.jsonl", FailureError)
    for kind, suffix in (("gzip", "gz"), ("zstd", "zst")):
        packed = write(tmp_path / f"a.jsonl.{suffix}", [{"text": hashlib.sha512(bytes([i])).hexdigest()} for i in range(100)])
        whole = packed.read_bytes()
        packed.write_bytes(whole[:-20])
        assert f"a.jsonl.{suffix} is not a whole {kind} file: reading stopped after row" in refusal(packed, FailureError)
        packed.write_bytes(b'{"text": "not compressed"}\n')
        assert f"a.jsonl.{suffix} is not a whole {kind} file: reading stopped after row 0" in refusal(packed, FailureError)
        packed.write_bytes(b"")
        assert f"a.jsonl.{suffix} is not a whole {kind} file: it is empty" in refusal(packed, FailureError)
    table = write(tmp_path / "a.parquet", [{"text": "t" * 100}])
    whole = table.read_bytes()
    for damaged in (whole[:-30], b"", b"PAR1 and nothing else"):
        table.write_bytes(damaged)
        assert "a.parquet is not a whole parquet file" in refusal(table, FailureError)
    table.write_bytes(whole[:4] + b"\xff" * 40 + whole[44:])
    assert "a.parquet is not a whole parquet file: reading row 1 failed" in refusal(table, FailureError)


def test_sources_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"the source '.*nothing' does not exist"):
        FileCorpus(tmp_path / "nothing").parts(Counter())
    with pytest.raises(RequestError, match="holds no file that can be read"):
        FileCorpus(tmp_path).parts(Counter())
    (tmp_path / "a.csv").write_text("text\nt\n", encoding="utf-8")
    with pytest.raises(
        RequestError, match=r"a\.csv is not of a kind that can be read; allowed: \.parquet, \.jsonl, \.jsonl\.gz, \.jsonl\.zst, \.txt"
    ):
        FileCorpus(tmp_path / "a.csv").parts(Counter())


# Line ends of both kinds, blank lines, characters of two and more bytes, a byte order mark, and no end of the last line.
LINES = (
    b'\xef\xbb\xbf{"text": "one \xc3\xa9", "id": "1"}\n\r\n  \n'
    b'{"text": "two \xe2\x88\x91\xf0\x9f\x98\x80", "id": "2"}\r\n\n{"id": "3", "text": "three"}\n{"id": "4", "text": "f\xc3\xb6ur"}'
)


@LINE_KINDS
@pytest.mark.parametrize("part_bytes", [1, 2, 7, 40, 10**6])
def test_documents_do_not_depend_on_the_cut_of_a_file_of_lines(
    part_bytes: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "PART_BYTES", part_bytes)
    monkeypatch.setattr(json_lines, "PACKED", 1)
    path = tmp_path / name
    for lines in (LINES, LINES + b"\n", LINES + b"\r\n\r\n"):
        packed(path, lines)
        assert len(FileCorpus(path).parts(Counter())) == -(-len(lines) // part_bytes)
        assert read(path, id_column="id") == [
            Document("1", "one é"),
            Document("2", "two ∑😀"),
            Document("3", "three"),
            Document("4", "föur"),
        ]


@LINE_KINDS
def test_the_parts_of_a_file_of_lines_are_read_in_any_order_and_in_order_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second part too, as each of two workers may get them."""
    monkeypatch.setattr(rows, "PART_BYTES", 500)
    monkeypatch.setattr(json_lines, "PACKED", 1)
    given = [{"text": f"{i} " + "word " * (i % 7 * 40)} for i in range(60)]
    path = write(tmp_path / name, given)
    said: list[str] = []
    parts = FileCorpus(path, report=said.append).parts(Counter())
    assert len(parts) > 50
    assert said == ([] if name == "d.jsonl" else ["unpacking 1 compressed file once, to know that nothing is missing"])

    opened, unpack = [], Lines._unpack
    monkeypatch.setattr(Lines, "_unpack", lambda self: (opened.append(self.path), unpack(self))[1])

    def of_parts(order: Sequence[int], corpus: FileCorpus) -> list[str]:
        texts = {number: [document.text for document in corpus.documents(parts[number], Counter())] for number in order}
        return [text for number in sorted(texts) for text in texts[number]]

    expected = [row["text"] for row in given]
    numbers = range(len(parts))
    for order in (numbers, numbers[::2], numbers[1::2], numbers[::7]):
        opened.clear()
        found = of_parts(order, FileCorpus(path))
        assert opened == [path] and (found == expected or order != numbers)
    one = FileCorpus(path)
    assert of_parts(numbers[::-1], one) == of_parts(random.Random(0).sample(numbers, len(numbers)), one) == expected
    halves = FileCorpus(path), FileCorpus(path)
    assert sorted(of_parts(numbers[::2], halves[0]) + of_parts(numbers[1::2], halves[1])) == sorted(expected)
    # one that is left in the middle spoils none of the others
    next(one.documents(parts[0], Counter()))
    assert of_parts(numbers, one) == expected


@LINE_KINDS
@pytest.mark.parametrize("part_bytes", [1, 30, 10**6])
def test_rows_are_counted_in_the_whole_file(part_bytes: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "PART_BYTES", part_bytes)
    packed(tmp_path / name, LINES + b"\nnot JSON\n")
    assert f"{name} row 8 is not valid JSON" in refusal(tmp_path / name, FailureError)


@pytest.mark.parametrize("part_bytes", [1, 30, 10**6])
def test_rows_are_counted_in_the_whole_parquet_file(part_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "PART_BYTES", part_bytes)
    not_text = pa.array([b"1", b"2", b"3", b"4", b"caf\xe9"]).view(pa.string())
    pq.write_table(pa.table({"text": not_text}), tmp_path / "d.parquet", row_group_size=2)
    assert "d.parquet row 5 is not valid UTF-8" in refusal(tmp_path / "d.parquet", FailureError)


@pytest.mark.parametrize(
    ("share", "ranges"), [(0, [(i, i + 1) for i in range(5)]), (0.7, [(0, 3), (3, 5)]), (1, [(0, 5)])], ids=["each", "some", "all"]
)
@pytest.mark.parametrize("batch_rows", [1, 3])
def test_documents_do_not_depend_on_the_cut_of_a_parquet_file(
    share: float, ranges: list[tuple[int, int]], batch_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [{"text": f"text {i}", "id": i} for i in range(9)]
    path = write(tmp_path / "d.parquet", given)
    monkeypatch.setattr(rows, "PART_BYTES", int(share * path.stat().st_size))
    monkeypatch.setattr(parquet, "BATCH_ROWS", batch_rows)
    parts = FileCorpus(path).parts(Counter())
    assert [(part.start, part.end) for part in parts] == ranges
    assert 0.9 < sum(part.bytes for part in parts) / path.stat().st_size <= 1
    assert read(path, id_column="id") == [Document(str(row["id"]), row["text"]) for row in given]


def test_several_compressed_pieces_are_one_file(tmp_path: Path) -> None:
    lines = [(json.dumps(row) + "\n").encode() for row in ROWS]
    (tmp_path / "d.jsonl.gz").write_bytes(b"".join(map(gzip.compress, lines)))
    (tmp_path / "d.jsonl.zst").write_bytes(b"".join(pa.compress(line, codec="zstd", asbytes=True) for line in lines))
    for name in ("d.jsonl.gz", "d.jsonl.zst"):
        assert read(tmp_path / name, id_column="id") == EXPECTED


@KINDS
def test_dots_lead_into_nested_columns(name: str, tmp_path: Path) -> None:
    given = [{"body": {"text": "a", "meta": {"id": 1}}, "x.y": "own", "x": {"y": "inner"}}, {"body": None, "x.y": "own", "x": None}]
    skipped: Counter[str] = Counter()
    assert read(write(tmp_path / name, given), skipped, text_column="body.text", id_column="body.meta.id") == [Document("1", "a")]
    assert skipped == {"rows whose text is null": 1}
    assert [document.text for document in read(tmp_path / name, text_column="x.y")] == ["own", "own"]
    message = refusal(tmp_path / name, RequestError, text_column="body.tekst")
    assert "perhaps you meant 'body.text'. Allowed: body.meta.id, body.text, x.y, x.y." in message


@KINDS
def test_known_schemas_are_found_by_their_columns(name: str, tmp_path: Path) -> None:
    edu = {"text": "t", "id": "<urn:1>", "dump": "CC", "url": "http://", "score": 3.5}
    ultra = {"content": "u", "score": 0.9, "source": "web"}
    hashed = hashlib.sha256(b"t").hexdigest()
    for row, columns, options in (
        (edu, ("text", "id"), {}),
        (edu, ("text", "id"), {"text_column": "text"}),
        (edu, ("url", None), {"text_column": "url"}),
        (edu, ("text", "dump"), {"id_column": "dump"}),
        (ultra, ("content", None), {}),
        ({**ultra, "text": "t"}, ("text", None), {}),
        ({"text": "t", "id": "a"}, ("text", None), {}),
    ):
        (part,) = FileCorpus(write(tmp_path / name, [row]), **options).parts(Counter())
        assert part.columns == columns
    assert read(tmp_path / name) == [Document(hashed, "t")]


def test_shards_of_known_schemas_may_differ_and_an_unknown_one_is_named(tmp_path: Path) -> None:
    write(tmp_path / "1.parquet", [{"text": "t", "id": "i", "dump": "CC", "url": "http://"}])
    write(tmp_path / "2.jsonl", [{"content": "u", "score": 1.0}])
    assert [document.text for document in read(tmp_path)] == ["t", "u"]
    message = refusal(tmp_path, RequestError, text_column="content")
    assert "1.parquet: text_column: unknown column 'content'" in message
    write(tmp_path / "3.parquet", [{"body": "t", "id": "i"}])
    assert "3.parquet: text_column: unknown column 'text'. Allowed: body, id." in refusal(tmp_path, RequestError)


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())],
    ids=["string", "large", "view", "coded"],
)
def test_every_arrow_type_of_text_is_read(kind: pa.DataType, tmp_path: Path) -> None:
    texts = pa.array(["é", None, "∑", "é"])
    coded = texts.dictionary_encode() if pa.types.is_dictionary(kind) else texts.cast(kind)
    path = tmp_path / "d.parquet"
    pq.write_table(pa.table({"text": coded, "id": coded}), path)
    assert pq.read_schema(path).field("text").type == kind
    assert read(path, id_column="id") == [Document("é", "é"), Document("∑", "∑"), Document("é", "é")]


def test_zero_characters_are_text(tmp_path: Path) -> None:
    for name in ("d.parquet", "d.jsonl"):
        assert [document.text for document in read(write(tmp_path / name, [{"text": "a\0b"}, {"text": "\0"}]))] == ["a\0b", "\0"]


def test_building_a_corpus_looks_at_nothing(tmp_path: Path) -> None:
    """So that a worker that reads one part of a large folder does not search it."""
    path = write(tmp_path / "d.jsonl")
    part = FileCorpus(tmp_path).parts(Counter())[0]
    (tmp_path / "z.parquet").write_bytes(b"damaged")
    assert len(list(FileCorpus(tmp_path).documents(part, Counter()))) == 3
    path.unlink()
    with pytest.raises(RequestError, match=r"d\.jsonl cannot be read \(No such file"):
        list(FileCorpus(tmp_path).documents(part, Counter()))


def test_sources_are_opened_by_their_paths(tmp_path: Path) -> None:
    write(tmp_path / "d.jsonl", [{"body": "t", "key": "k"}, {"key": "l"}])
    skipped: Counter[str] = Counter()
    corpus = open_source(Source(path=str(tmp_path), text_column="body", id_column="key"), "skip")
    assert [d for part in corpus.parts(skipped) for d in corpus.documents(part, skipped)] == [Document("k", "t")]
    assert skipped == {"rows without the text column": 1}
    assert isinstance(open_source(Source(path="hf:some/name"), "refuse"), HubCorpus)
