"""Every check of `verify` against a directory that is damaged in that one way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from depthroute.common.errors import RequestError
from depthroute.data import MultiHopConfig, MultiHopCorpus, TextTokenizer, long_documents, ready_tokenizer, text_tokenizer
from depthroute.data import scan as scans
from depthroute.data.progress import Progress
from depthroute.data.shards import DTYPES, IDS_DTYPE, INDEX_DTYPE
from depthroute.data.split import threshold
from depthroute.data.verify import NOT_RECORDED, Verification, verify
from tests.data.by_hand import TEST_SHARE, VALIDATION_SHARE, alter, alter_manifest, documents, seal, write

TOKENS = DTYPES["uint16"]
ROUND_TRIP = "decoded and encoded again"
VALIDATION_END, TEST_START = threshold(VALIDATION_SHARE), 2**64 - threshold(TEST_SHARE)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write(tmp_path / "data", {"a.jsonl": documents(60, "a"), "b.jsonl": documents(30, "b")})
    return tmp_path / "data"


def failed(found: Verification) -> list[str]:
    return [check.name for check in found.failures]


def finding(found: Verification, name: str) -> str:
    return next(check.found for check in found.checks if check.name == name)


def their_tokenizer(folder: Path, *, lower: bool = False, words: bool = True) -> TextTokenizer:
    """A byte-level tokenizer from elsewhere with a begin, which may make all letters small, or take a text for one word."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words), decoders.ByteLevel()
    if lower:
        made.normalizer = normalizers.Lowercase()
    made.add_special_tokens(["<|begin|>", "<|end|>"])
    made.save(str(folder / "theirs.json"))
    return ready_tokenizer(folder / "theirs.json", "<|end|>", "<|begin|>")


def test_a_whole_directory_passes_every_check(directory: Path) -> None:
    found = verify(directory)
    assert found.ok and found.failures == () and all(check.ok for check in found.checks)
    names = [check.name for check in found.checks]
    assert len(names) == len(set(names)) == 1 + 10 + 2 + 3 * 6 + 2
    assert finding(found, ROUND_TRIP) == "90 documents, all the same"
    assert finding(verify(directory, sample=7), ROUND_TRIP) == "7 documents, all the same"
    assert ROUND_TRIP not in [check.name for check in verify(directory, sample=0).checks]


@pytest.mark.parametrize("size", [4, 64, 1000])
def test_the_size_of_the_pieces_changes_nothing(directory: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    alter(directory, "train.bin", TOKENS, lambda tokens: tokens.__setitem__(slice(5, None, 31), 3))
    whole = verify(directory)
    assert not whole.ok
    monkeypatch.setattr(scans, "CHUNK_BYTES", size)
    monkeypatch.setattr(scans, "CHUNK_ITEMS", size // 4)
    assert verify(directory) == whole


@pytest.mark.parametrize("place", range(1, 12))
def test_an_index_that_does_not_rise_between_two_pieces(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scans, "CHUNK_ITEMS", 4)
    index = np.arange(12)
    assert scans.first_not_rising(index) is None
    index[place] = index[place - 1]
    assert scans.first_not_rising(index) == place


def test_directories_from_before_ids_and_sources_were_recorded(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": documents(40)}, recorded=False)
    found = verify(tmp_path)
    assert found.ok
    missing = [check.name for check in found.checks if check.ok is None]
    assert missing == ["train: document ids", "validation: document ids", "test: document ids", "sources"]
    assert finding(found, "sources") == finding(found, "test: document ids") == NOT_RECORDED


def test_a_split_without_documents_is_whole(tmp_path: Path) -> None:
    manifest = write(tmp_path, {"a.jsonl": documents(3, "c")})
    assert manifest.splits.test.documents == 0
    assert verify(tmp_path).ok


def test_what_is_no_data_directory_is_refused(tmp_path: Path, directory: Path) -> None:
    with pytest.raises(RequestError, match=r"holds no manifest\.json"):
        verify(tmp_path)
    with pytest.raises(RequestError, match="sample cannot be -1"):
        verify(directory, sample=-1)


def test_a_broken_manifest_is_the_only_finding(directory: Path) -> None:
    (directory / "manifest.json").write_text("{", encoding="utf-8")
    found = verify(directory)
    assert failed(found) == ["manifest"] and len(found.checks) == 1 and "not valid JSON" in finding(found, "manifest")


def test_a_manifest_that_leaves_out_files(directory: Path) -> None:
    def leave_out(manifest: dict[str, Any]) -> None:
        manifest["files"] = [file for file in manifest["files"] if file["name"] not in ("test.bin", "test.ids.bin")]

    alter_manifest(directory, leave_out)
    found = verify(directory)
    assert failed(found) == ["manifest"] and finding(found, "manifest") == "it does not name test.bin, test.ids.bin"


FILES = ["tokenizer.json", *(f"{split}{kind}" for split in ("train", "validation", "test") for kind in (".bin", ".index.bin", ".ids.bin"))]


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_cut_or_altered_is_named(directory: Path, name: str) -> None:
    path = directory / name
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    found = verify(directory)
    assert name in failed(found) and finding(found, name) == f"{len(data) - 1:,} bytes, recorded are {len(data):,}"
    path.write_bytes(data + b"\n")
    found = verify(directory)
    assert failed(found)[0] == name and finding(found, name) == f"{len(data) + 1:,} bytes, recorded are {len(data):,}"
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    found = verify(directory)
    assert name in failed(found) and finding(found, name).startswith("SHA-256")
    path.unlink()
    found = verify(directory)
    assert name in failed(found) and finding(found, name) == "missing"


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="no /proc")
def test_a_file_that_cannot_be_read_is_named(directory: Path) -> None:
    (directory / "test.bin").unlink()
    (directory / "test.bin").symlink_to("/proc/self/mem")  # its first byte cannot be read, whoever asks
    found = verify(directory)
    assert "test.bin" in failed(found) and finding(found, "test.bin").startswith("it cannot be read")


def set_at(position: int, value: int) -> Callable[[np.ndarray], None]:
    return lambda values: values.__setitem__(position, value)


@pytest.mark.parametrize(
    ("name", "dtype", "change", "check", "says"),
    [
        ("train.bin", TOKENS, set_at(7, 301), "train: tokens below the vocabulary", "the largest is 301 of 300"),
        ("train.bin", TOKENS, set_at(-1, 60), "train: documents end", "1 of 58 do not end with 3, the first: 57"),
        ("test.bin", TOKENS, set_at(2, 3), "test: end inside documents", "1 times"),
        ("train.index.bin", INDEX_DTYPE, set_at(4, 10), "train: index", "document 3 ends at 10, not behind its start at "),
        ("train.index.bin", INDEX_DTYPE, set_at(0, 1), "train: index", "it starts at 1, not at 0"),
        ("train.index.bin", INDEX_DTYPE, set_at(-1, 10**6), "train: index", "it ends at 1000000, the file has "),
        ("train.index.bin", INDEX_DTYPE, lambda index: index.__setitem__(4, index[3]), "train: index", "document 3 ends at "),
        ("train.ids.bin", IDS_DTYPE, set_at(5, TEST_START), "train: document ids", "1 hashes belong to another split"),
        ("test.ids.bin", IDS_DTYPE, set_at(5, TEST_START - 1), "test: document ids", "1 hashes belong to another split"),
        ("validation.ids.bin", IDS_DTYPE, set_at(5, VALIDATION_END), "validation: document ids", "1 hashes belong to another split"),
        ("train.ids.bin", IDS_DTYPE, set_at(5, VALIDATION_END - 1), "train: document ids", "1 hashes belong to another split"),
        ("train.ids.bin", IDS_DTYPE, set_at(5, 12), "train: document ids", "1 hashes belong to another split, the first is of document 5"),
        ("train.ids.bin", IDS_DTYPE, set_at(5, 2**64 - 1), "train: document ids", "1 hashes belong to another split"),
        ("validation.ids.bin", IDS_DTYPE, set_at(1, 2**63), "validation: document ids", "1 hashes belong to another split"),
        ("test.ids.bin", IDS_DTYPE, set_at(0, 2**63), "test: document ids", "1 hashes belong to another split"),
    ],
)
def test_contents_are_checked_beside_the_hashes(
    directory: Path, name: str, dtype: np.dtype[Any], change: Callable[[np.ndarray], None], check: str, says: str
) -> None:
    alter(directory, name, dtype, change)
    seal(directory)
    found = verify(directory, sample=0)
    assert failed(found) == [check] and finding(found, check).startswith(says)


def test_documents_that_do_not_begin_as_recorded(tmp_path: Path) -> None:
    ready = their_tokenizer(tmp_path)
    directory = tmp_path / "data"
    write(directory, {"a.jsonl": documents(40)}, made=ready, tokenizer="theirs.json")
    assert verify(directory).ok
    alter(directory, "train.bin", TOKENS, set_at(0, 60))
    seal(directory)
    found = verify(directory, sample=0)
    assert failed(found) == ["train: documents begin"]
    assert finding(found, "train: documents begin").endswith("do not begin with 256, the first: 0")


def test_a_document_that_is_too_long_to_be_encoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long documents are cut, and where the tokenizer has no place to cut that is told."""
    for module in (long_documents, text_tokenizer):
        monkeypatch.setattr(module, "PIECE", 150)
    monkeypatch.setattr(long_documents, "WHOLE", 300)
    given = [*documents(20, words=5), *documents(10, "long", words=100)]
    write(tmp_path / "words", {"a.jsonl": given}, made=their_tokenizer(tmp_path), tokenizer="theirs.json")
    assert finding(verify(tmp_path / "words"), ROUND_TRIP) == "30 documents, all the same"
    write(tmp_path / "data", {"a.jsonl": given}, made=their_tokenizer(tmp_path, words=False), tokenizer="theirs.json")
    found = verify(tmp_path / "data")
    assert found.ok and finding(found, ROUND_TRIP).startswith(
        "20 documents, all the same; 10 cannot be cut and are too long to be encoded whole, the first is "
    )
    write(tmp_path / "long", {"a.jsonl": given[20:]}, made=their_tokenizer(tmp_path, words=False), tokenizer="theirs.json")
    found = verify(tmp_path / "long")
    assert found.ok and [check.name for check in found.checks if check.ok is None] == [ROUND_TRIP]


@pytest.mark.parametrize(
    ("change", "check", "says"),
    [
        (lambda it: it.update(bytes_per_token=4.5), "manifest", "bytes_per_token is 4.5, the counts of train give "),
        (lambda it: it["tokenizer"].update(sha256="1" * 64), "manifest", "tokenizer.sha256 is 111111111111..., that of tokenizer.json "),
        (lambda it: it["files"].append(it["files"][3]), "manifest", "it names train.ids.bin 2 times"),
        (lambda it: it["skipped"].append({"reason": "empty", "count": -1}), "manifest", "skipped.0.count is -1, below 0"),
        (lambda it: it["tokenizer"].update(training_bytes=-1), "manifest", "tokenizer.training_bytes is -1, below 0"),
        (lambda it: it["prepare"]["sources"].append({"path": "c.jsonl"}), "sources", "2 recorded, 3 prepared"),
        (lambda it: it["prepare"]["sources"].pop(), "sources", "2 recorded, 1 prepared"),
        (lambda it: it.update(sources=[]), "sources", "0 recorded, 2 prepared"),
    ],
)
def test_a_manifest_that_cannot_be(directory: Path, change: Callable[[dict[str, Any]], None], check: str, says: str) -> None:
    alter_manifest(directory, change)
    found = verify(directory)
    assert failed(found) == [check] and finding(found, check).startswith(says)


def test_a_single_source_with_a_weight_was_recorded(directory: Path) -> None:
    def weighted(manifest: dict[str, Any]) -> None:
        manifest.update(sources=[])
        manifest["prepare"]["sources"] = [{"path": "a.jsonl", "weight": 1.0}]

    alter_manifest(directory, weighted)
    assert failed(verify(directory)) == ["sources"]


def test_a_source_with_less_than_no_documents(directory: Path) -> None:
    """Counts that add up, and lie on an end of a document when it is counted from the last."""
    index = np.frombuffer((directory / "test.index.bin").read_bytes(), dtype=INDEX_DTYPE)

    def below(manifest: dict[str, Any]) -> None:
        first, second = (source["splits"]["test"] for source in manifest["sources"])
        documents, tokens = first["documents"] + second["documents"], first["tokens"] + second["tokens"]
        first.update(documents=-2, tokens=int(index[-2]))
        second.update(documents=documents + 2, tokens=tokens - int(index[-2]))

    alter_manifest(directory, below)
    found = verify(directory)
    assert failed(found) == ["manifest", "sources"] and finding(found, "manifest") == "sources.0.splits.test.documents is -2, below 0"


def test_counts_of_the_manifest(directory: Path) -> None:
    alter_manifest(directory, lambda manifest: manifest["splits"]["validation"].update(tokens=7))
    found = verify(directory)
    assert failed(found) == ["validation: counts", "sources"] and finding(found, "validation: counts").endswith("recorded are 23 and 7")
    alter_manifest(directory, lambda manifest: manifest.update(dtype="uint32"))
    assert "dtype" in failed(verify(directory))


def test_the_number_of_ids(directory: Path) -> None:
    path = directory / "test.ids.bin"
    path.write_bytes(path.read_bytes()[:-8])
    seal(directory)
    found = verify(directory)
    assert failed(found) == ["test: document ids"] and finding(found, "test: document ids") == "8 hashes for 9 documents"


def test_stretches_of_sources(directory: Path) -> None:
    def shift(manifest: dict[str, Any]) -> None:
        first, second = (source["splits"]["train"] for source in manifest["sources"])
        first["tokens"], second["tokens"] = first["tokens"] + 1, second["tokens"] - 1

    alter_manifest(directory, shift)
    found = verify(directory)
    assert failed(found) == ["sources"] and "the documents of a.jsonl in train do not end at token" in finding(found, "sources")
    alter_manifest(directory, lambda manifest: manifest["sources"][1]["splits"]["test"].update(bytes=1))
    assert failed(verify(directory)) == ["sources"]


def test_a_tokenizer_that_is_not_the_one_recorded(directory: Path) -> None:
    alter_manifest(directory, lambda manifest: manifest.update(vocabulary=301))
    found = verify(directory)
    assert failed(found) == ["tokenizer"] and finding(found, "tokenizer") == "300 entries, recorded are 301"
    alter_manifest(directory, lambda manifest: manifest.update(vocabulary=300, end=2))
    found = verify(directory, sample=0)
    assert "tokenizer" in failed(found) and finding(found, "tokenizer") == "documents end with 3, recorded is 2"
    (directory / "tokenizer.json").write_text("{}", encoding="utf-8")
    seal(directory)
    found = verify(directory)
    assert "tokenizer" in failed(found) and "is not a tokenizer" in finding(found, "tokenizer")


def test_ids_that_no_text_has(directory: Path) -> None:
    """A `<pad>` inside of a document: a valid id, and no text is encoded to it."""
    alter(directory, "train.bin", TOKENS, set_at(1, 0))
    seal(directory)
    found = verify(directory)
    assert failed(found) == [ROUND_TRIP]
    assert finding(found, ROUND_TRIP) == "1 of 90 documents have other ids then, the first is train document 0"


def test_a_ready_tokenizer_may_change_a_text(tmp_path: Path) -> None:
    """Ids of large letters, and a tokenizer that makes them small before it encodes."""
    plain = their_tokenizer(tmp_path)
    texts = [document._replace(text=document.text.upper()) for document in documents(20)]
    write(tmp_path / "data", {"a.jsonl": texts}, made=plain, tokenizer="theirs.json")
    their_tokenizer(tmp_path, lower=True).save(tmp_path / "data" / "tokenizer.json")
    seal(tmp_path / "data")
    found = verify(tmp_path / "data")
    assert found.ok and finding(found, ROUND_TRIP).startswith("20 of 20 documents have other ids then")


def test_a_vocabulary_of_words_comes_back_as_well(tmp_path: Path) -> None:
    corpus = MultiHopCorpus(config=MultiHopConfig(documents=30))
    given = list(corpus.documents(corpus.parts({})[0], {}))
    write(tmp_path, {"multi-hop": given}, made=corpus.tokenizer(), multi_hop=corpus.config)
    found = verify(tmp_path)
    assert found.ok and finding(found, ROUND_TRIP) == "30 documents, all the same"


def test_progress_ends_with_everything_read(directory: Path) -> None:
    seen: list[Progress] = []
    verify(directory, progress=seen.append)
    total = sum((directory / name).stat().st_size for name in FILES)
    assert seen[-1].done == seen[-1].total == total and [one.done for one in seen] == sorted(one.done for one in seen)
