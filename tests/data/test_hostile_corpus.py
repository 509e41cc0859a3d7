"""Hostile documents through the whole preparation: each is in the shards as it was, or counted, or refused with its place."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from depthroute.common.errors import FailureError, RequestError
from depthroute.data import SPLITS, PrepareConfig, TokenDataset, prepare
from depthroute.data.statistics import statistics_of
from depthroute.data.text_tokenizer import TextTokenizer
from depthroute.data.verify import verify

PLAIN = [{"id": f"plain {i}", "text": f"a plain document, number {i}, of some words"} for i in range(60)]
KEPT: list[dict[str, Any]] = [
    {"id": "nul", "text": "a \0 b\0"},
    {"id": "controls", "text": "\x01\x1c\x7f\x85\u2028\ufeff"},
    {"id": "special", "text": "<eos> <pad><bos> <unk><eos>"},
    {"id": "signs", "text": "e\u0301 👩\u200d👩\u200d👧 \U0010ffff ﷽"},
    {"id": "twice", "text": "the first of an id"},
    {"id": "twice", "text": "the second of an id"},
    {"id": None, "text": "without an id"},
    {"id": 17, "text": "a number as id"},
    {"id": "long", "text": "many words and no end " * 30_000},
    {"id": "no-space", "text": "x" * 100_000},
    {"id": "one", "text": "."},
]
BLANK = [{"id": "empty", "text": ""}, {"id": "blank", "text": " \n\t\u3000"}]
NULL = [{"id": "null", "text": None}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The same rows as JSON lines and as parquet, whose id is text, and a file of another kind."""
    source = tmp_path / "hostile"
    source.mkdir()
    rows = PLAIN + KEPT + BLANK + NULL
    (source / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    other = [{"id": None if row["id"] is None else f"parquet {row['id']}", "text": row["text"], "score": 1} for row in rows]
    pq.write_table(pa.Table.from_pylist(other), source / "b.parquet")
    (source / "c.bin").write_bytes(b"\xff")
    return source


def settings(source: Path, **changes: Any) -> PrepareConfig:
    given: dict[str, Any] = {"id_column": "id", "vocabulary": 300, "sample_one_in": 1, "validation_share": 0.2, "test_share": 0.1}
    return PrepareConfig.of(str(source), **given | changes)


def test_each_is_kept_as_it_was_or_counted(folder: Path, tmp_path: Path) -> None:
    manifest = prepare(settings(folder), tmp_path / "data")
    assert {entry.reason: entry.count for entry in manifest.skipped} == {
        "documents whose text is empty or blank": 2 * len(BLANK),
        "rows whose text is null": 2 * len(NULL),
        "files of another kind (.bin)": 1,
    }
    data = TokenDataset.open(tmp_path / "data")
    tokenizer, found = data.tokenizer(), Counter[str]()
    for split in SPLITS:
        tokens, edges = data.tokens(split), data.boundaries(split)
        assert np.flatnonzero(tokens == data.end).tolist() == (edges[1:] - 1).tolist()
        assert not np.isin(tokens, [0, 1, 2]).any()
        found.update(tokenizer.decode(tokens[start : end - 1].tolist()) for start, end in itertools.pairwise(edges))
    assert found == Counter(row["text"] for row in (PLAIN + KEPT) * 2)
    assert verify(tmp_path / "data").ok
    counted = statistics_of(tmp_path / "data")
    assert sum(one.duplicate_ids or 0 for one in counted.splits) == 3, "`twice` in both files, and the two without an id"
    assert counted.ids_in_several_splits == 0


def test_an_id_that_is_missing_is_the_hash_of_the_text(folder: Path, tmp_path: Path) -> None:
    prepare(settings(folder), tmp_path / "data")
    data = TokenDataset.open(tmp_path / "data")
    given = hashlib.sha256(b"without an id").hexdigest()
    expected = int.from_bytes(hashlib.blake2b(b"depthroute/split\0" + given.encode(), digest_size=8).digest(), "big")
    hashes = np.concatenate([np.fromfile(tmp_path / "data" / f"{split}.ids.bin", dtype="<u8") for split in SPLITS])
    assert (hashes == expected).sum() == 2 and len(hashes) == sum(data.manifest.split(split).documents for split in SPLITS)


def test_a_token_id_beyond_its_type_is_refused_with_the_document(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer that gives ids it does not have."""
    prepare(settings(folder), tmp_path / "whole")
    monkeypatch.setattr(TextTokenizer, "vocabulary", property(lambda _: 200))
    with pytest.raises(FailureError, match=r"a\.jsonl, the document .*: the tokenizer gives the id \d+, which is not below its vocabulary"):
        prepare(settings(folder), tmp_path / "data")
    assert not (tmp_path / "data" / "manifest.json").exists()


def test_a_document_that_cannot_be_cut_is_refused_with_its_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("depthroute.data.long_documents.PIECE", 1_000)
    monkeypatch.setattr("depthroute.data.text_tokenizer.PIECE", 1_000)
    monkeypatch.setattr("depthroute.data.long_documents.WHOLE", 2_000)
    with pytest.raises(RequestError, match=r"a\.jsonl, the document no-space: the 2000 characters from character 0 on have no place"):
        prepare(settings(folder), tmp_path / "data")


def test_bad_rows_are_skipped_where_that_is_asked_for(folder: Path, tmp_path: Path) -> None:
    with (folder / "a.jsonl").open("ab") as file:
        file.write(b'{"id": "x", "text": "\xff"}\n{"id": "y", "text": 3}\nno json\n{"id": "z"}\n')
    with pytest.raises(FailureError, match=r"a\.jsonl row 75 is not valid UTF-8"):
        prepare(settings(folder), tmp_path / "refused")
    manifest = prepare(settings(folder, bad_rows="skip"), tmp_path / "data")
    skipped = {entry.reason: entry.count for entry in manifest.skipped}
    assert sum(count for reason, count in skipped.items() if reason.startswith("rows ") and "null" not in reason) == 4
