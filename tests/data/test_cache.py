"""One preparation of the default corpus for all studies, and what may happen to it."""

from __future__ import annotations

import importlib
import json
import os
import threading
from pathlib import Path

import pytest

from depthroute.common.errors import RequestError
from depthroute.data import ContentHash, DocstringCorpus, Document, PrepareConfig, TokenDataset
from depthroute.data import cache as data_cache
from depthroute.data.cache import prepare_shared
from depthroute.data.corpus import document_digest

CONFIG = PrepareConfig(vocabulary=300, sample_one_in=1, validation_share=0.2, test_share=0.0)


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small file in place of the docstrings of installed packages; what it holds decides which corpus it is."""
    path = tmp_path / "corpus.jsonl"
    write_corpus(path, "the sum of")

    def small(report: object = None) -> DocstringCorpus:
        content = ContentHash()
        for line in path.read_text().splitlines():
            content.add(document_digest(Document(**json.loads(line))))
        return DocstringCorpus(path=path, content_hash=content.hexdigest(), contents=(), missing=(), skipped={})

    for module in ("cache", "work"):
        monkeypatch.setattr(importlib.import_module(f"depthroute.data.{module}"), "docstring_corpus", small)
    return path


def write_corpus(path: Path, text: str) -> None:
    path.write_text("".join(json.dumps({"id": f"m{i}", "text": f"{text} {i} sources, read by site {i % 7}"}) + "\n" for i in range(60)))


def prepared(told: list[str]) -> int:
    return sum(line.startswith("training a tokenizer") for line in told)


def test_the_second_study_gets_the_same_files_without_work(corpus: Path, tmp_path: Path) -> None:
    told: list[str] = []
    cache = tmp_path / "cache"
    first = prepare_shared(CONFIG, tmp_path / "a/data", cache=cache, report=told.append)
    second = prepare_shared(CONFIG, tmp_path / "b/data", cache=cache, report=told.append)
    assert prepared(told) == 1
    assert first.fingerprint == second.fingerprint
    assert (tmp_path / "a/data/train.bin").samefile(tmp_path / "b/data/train.bin")
    assert not os.access(tmp_path / "a/data/train.bin", os.X_OK)
    assert (tmp_path / "a/data/train.bin").stat().st_mode & 0o222 == 0
    moved = (tmp_path / "b").rename(tmp_path / "moved")
    assert len(TokenDataset.open(moved / "data").tokens("train")) > 0
    prepare_shared(CONFIG, tmp_path / "a/data", cache=cache, report=told.append)  # what is there is looked at and kept
    assert prepared(told) == 1


def test_another_corpus_or_configuration_is_prepared_by_itself(corpus: Path, tmp_path: Path) -> None:
    told: list[str] = []
    cache = tmp_path / "cache"
    first = prepare_shared(CONFIG, tmp_path / "a", cache=cache, report=told.append)
    other = PrepareConfig(vocabulary=310, sample_one_in=1, validation_share=0.2, test_share=0.0)
    assert prepare_shared(other, tmp_path / "b", cache=cache, report=told.append).vocabulary == 310
    write_corpus(corpus, "the mean of")
    assert prepare_shared(CONFIG, tmp_path / "c", cache=cache, report=told.append).fingerprint != first.fingerprint
    assert prepared(told) == 3
    with pytest.raises(RequestError, match="prepared from another corpus"):
        prepare_shared(CONFIG, tmp_path / "a", cache=cache)


def test_a_damaged_cache_is_made_again(corpus: Path, tmp_path: Path) -> None:
    told: list[str] = []
    cache = tmp_path / "cache"
    first = prepare_shared(CONFIG, tmp_path / "a", cache=cache, report=told.append)
    [shard] = cache.glob("*/train.bin")
    content = bytearray(shard.read_bytes())
    content[5] ^= 1
    shard.chmod(0o644)
    shard.write_bytes(content)
    second = prepare_shared(CONFIG, tmp_path / "b", cache=cache, report=told.append)
    assert any("is damaged and is made again" in line for line in told)
    assert prepared(told) == 2
    assert second.fingerprint == first.fingerprint
    assert (tmp_path / "b/train.bin").read_bytes() != bytes(content)


def test_where_there_are_no_hard_links_files_are_copied(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    cache = tmp_path / "cache"
    prepare_shared(CONFIG, tmp_path / "a", cache=cache)
    [shard] = cache.glob("*/train.bin")
    assert not (tmp_path / "a/train.bin").samefile(shard)
    assert (tmp_path / "a/train.bin").read_bytes() == shard.read_bytes()


def test_a_cache_that_cannot_be_written_is_done_without(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told: list[str] = []
    manifest = prepare_shared(CONFIG, tmp_path / "a", cache=tmp_path / "file" / "cache", report=told.append)
    assert told[0].startswith("the cache of prepared data is not used")
    assert TokenDataset.open(tmp_path / "a").fingerprint == manifest.fingerprint


def test_two_at_once_prepare_once(corpus: Path, tmp_path: Path) -> None:
    told: list[str] = []
    threads = [
        threading.Thread(target=prepare_shared, args=(CONFIG, tmp_path / name), kwargs={"cache": tmp_path / "cache", "report": told.append})
        for name in ("a", "b", "b")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert prepared(told) == 1
    assert TokenDataset.open(tmp_path / "a").fingerprint == TokenDataset.open(tmp_path / "b").fingerprint
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_death_on_the_way_leaves_a_folder_that_the_next_call_fills(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linked: list[str] = []

    def die(source: Path, target: Path) -> None:
        linked.append(target.name)
        if len(linked) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(data_cache, "_link_file", die)
        with pytest.raises(KeyboardInterrupt):
            prepare_shared(CONFIG, tmp_path / "a", cache=tmp_path / "cache")
    assert not (tmp_path / "a").exists()
    told: list[str] = []
    prepare_shared(CONFIG, tmp_path / "a", cache=tmp_path / "cache", report=told.append)
    assert prepared(told) == 0


def test_a_folder_with_something_in_it_and_other_sources_are_left_to_prepare(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/mine.txt").write_text("")
    with pytest.raises(RequestError, match="is not empty and holds no prepared data"):
        prepare_shared(CONFIG, tmp_path / "a", cache=tmp_path / "cache")
    source = PrepareConfig.of(str(corpus), vocabulary=300, sample_one_in=1, validation_share=0.2, test_share=0.0)
    prepare_shared(source, tmp_path / "b", cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
