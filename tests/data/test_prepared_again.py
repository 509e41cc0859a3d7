from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from depthroute.common.errors import FailureError, RequestError
from depthroute.data import (
    FileCorpus,
    Manifest,
    Source,
    TokenDataset,
    prepare,
    read_manifest,
)
from tests.data.preparation import Writer, config, contents, run_prepare


def test_a_new_process_writes_the_same_bytes(write_jsonl: Writer, tmp_path: Path) -> None:
    """Also with other hash seeds and another number of threads, and when the files lie somewhere else."""
    source = write_jsonl(300)
    prepare(config(source), tmp_path / "one")
    moved = tmp_path / "moved.jsonl"
    source.rename(moved)
    environment = {"PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    assert run_prepare(config(moved), tmp_path / "two", **environment) == 0
    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    for name in one.keys() - {"manifest.json", "source.json"}:
        assert one[name] == two[name], name
    assert read_manifest(tmp_path / "one").fingerprint == read_manifest(tmp_path / "two").fingerprint
    assert read_manifest(tmp_path / "one").corpus.content_hash == read_manifest(tmp_path / "two").corpus.content_hash


def test_a_second_call_returns_at_once(write_jsonl: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(100)
    manifest = prepare(config(source), tmp_path / "data")
    before = contents(tmp_path / "data")
    monkeypatch.setattr(FileCorpus, "documents", lambda *_: pytest.fail("the documents were read again"))
    assert prepare(config(source), tmp_path / "data") == manifest
    assert contents(tmp_path / "data") == before


def test_files_that_were_only_touched_or_moved_are_the_same_corpus(write_jsonl: Writer, tmp_path: Path) -> None:
    source = write_jsonl(100)
    manifest = prepare(config(source), tmp_path / "data")
    os.utime(source, ns=(1, 1))
    lines: list[str] = []
    assert prepare(config(source), tmp_path / "data", report=lines.append) == manifest
    assert len(lines) == 1 and "comparing their content" in lines[0]
    moved = source.rename(tmp_path / "moved.jsonl")
    assert prepare(config(moved), tmp_path / "data") == manifest
    assert prepare(config(moved), tmp_path / "data", report=lambda line: pytest.fail(line)) == manifest  # the stamp was renewed


def test_another_corpus_or_configuration_is_refused(write_jsonl: Writer, tmp_path: Path) -> None:
    source = write_jsonl(100)
    prepare(config(source), tmp_path / "data")
    before = contents(tmp_path / "data")
    with pytest.raises(RequestError, match="was prepared with vocabulary 300, not 310; give another directory"):
        prepare(config(source, vocabulary=310), tmp_path / "data")
    with pytest.raises(RequestError, match="was prepared from another corpus"):
        prepare(config(write_jsonl(101)), tmp_path / "data")
    assert contents(tmp_path / "data") == before


def test_a_document_that_moved_to_the_next_source_is_noticed(write_jsonl: Writer, tmp_path: Path) -> None:
    """The documents and their order are the same, and the mixture is not."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    for number, place in enumerate(("one/a", "one/b", "two/c")):
        write_jsonl(40 + number, "documents.jsonl").rename(tmp_path / f"{place}.jsonl")
    sources = tuple(Source(path=str(tmp_path / name), id_column="id", weight=1.0) for name in ("one", "two"))
    settings = dataclasses.replace(config(tmp_path), sources=sources)
    prepare(settings, tmp_path / "data")
    (tmp_path / "one" / "b.jsonl").rename(tmp_path / "two" / "b.jsonl")
    with pytest.raises(RequestError, match="was prepared from another corpus"):
        prepare(settings, tmp_path / "data")
    only = dataclasses.replace(settings, sources=(dataclasses.replace(sources[0], weight=None),))
    prepare(only, tmp_path / "single")
    with pytest.raises(RequestError, match=r"was prepared with sources\[1\]\.path None, not"):
        prepare(dataclasses.replace(only, sources=(*only.sources, dataclasses.replace(sources[1], weight=None))), tmp_path / "single")


def test_a_directory_of_somebody_else_is_refused(write_jsonl: Writer, tmp_path: Path) -> None:
    source = write_jsonl(100)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "train.bin").write_bytes(b"precious")
    with pytest.raises(RequestError, match="is not empty and holds no prepared data"):
        prepare(config(source), tmp_path / "theirs")
    assert (tmp_path / "theirs" / "train.bin").read_bytes() == b"precious"
    (tmp_path / "theirs" / "source.json").write_text('{"mine": 1}', encoding="utf-8")
    with pytest.raises(RequestError, match="is not empty and holds no prepared data"):
        prepare(config(source), tmp_path / "theirs")
    with pytest.raises(RequestError, match="is a file; give the path of a directory"):
        prepare(config(source), source)


KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("before", "report"),
    [
        ("", f"lambda line: {KILL} if line.startswith('training') else None"),
        ("", f"lambda line: {KILL} if line.startswith('tokenizing') else None"),
        (f"from depthroute.data.shards import ShardWriter\nShardWriter.finish = lambda self: {KILL}", "None"),
        (f"Manifest.write = lambda self, directory: {KILL}", "None"),
    ],
    ids=["while training the tokenizer", "before the shards", "with shards half flushed", "before the manifest"],
)
def test_a_killed_preparation_is_finished_by_the_next_call(before: str, report: str, write_jsonl: Writer, tmp_path: Path) -> None:
    settings = config(write_jsonl(200))
    assert run_prepare(settings, tmp_path / "killed", before=before, report=report) == -signal.SIGKILL
    with pytest.raises(RequestError, match=r"holds no manifest\.json"):
        TokenDataset.open(tmp_path / "killed")
    prepare(settings, tmp_path / "killed")
    prepare(settings, tmp_path / "whole")
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_what_a_call_left_between_its_manifest_and_its_end_is_removed(write_jsonl: Writer, tmp_path: Path) -> None:
    settings = config(write_jsonl(100))
    manifest = prepare(settings, tmp_path / "data")
    (tmp_path / "data" / ".work" / "words").mkdir(parents=True)
    assert prepare(settings, tmp_path / "data") == manifest
    assert not (tmp_path / "data" / ".work").exists()


def test_a_file_that_joins_a_folder_while_it_is_read_is_noticed(write_jsonl: Writer, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write_jsonl(100).rename(folder / "a.jsonl")

    def join(line: str) -> None:
        if line.startswith("tokenizing"):
            write_jsonl(10).rename(folder / "b.jsonl")

    with pytest.raises(FailureError, match="changed while it was being read"):
        prepare(config(folder), tmp_path / "data", report=join)


def test_two_processes_may_prepare_at_once(write_jsonl: Writer, tmp_path: Path) -> None:
    """The second waits while the first is held in its report, then finds the work done."""
    settings = config(write_jsonl(100))
    working, waiting = threading.Event(), threading.Event()
    told: dict[str, list[str]] = {"first": [], "second": []}

    def first(line: str) -> None:
        told["first"].append(line)
        working.set()
        assert waiting.wait(30)

    def second(line: str) -> None:
        told["second"].append(line)
        waiting.set()

    results: dict[str, Manifest] = {}
    one = threading.Thread(target=lambda: results.update(first=prepare(settings, tmp_path / "data", report=first)))
    one.start()
    assert working.wait(30)
    results["second"] = prepare(settings, tmp_path / "data", report=second)
    one.join(30)
    assert results["first"] == results["second"]
    assert len(told["second"]) == 1 and "waiting" in told["second"][0]


@pytest.mark.parametrize("name", ["train.bin", "validation.index.bin", "tokenizer.json"])
def test_damaged_files_are_named(name: str, write_jsonl: Writer, tmp_path: Path) -> None:
    settings, directory = config(write_jsonl(100)), tmp_path / "data"
    prepare(settings, directory)
    whole = (directory / name).read_bytes()
    (directory / name).write_bytes(whole[:-2])
    for opening in (lambda: TokenDataset.open(directory), lambda: prepare(settings, directory)):
        with pytest.raises(FailureError, match=f"{name} has {len(whole) - 2} bytes and the manifest says {len(whole)}"):
            opening()
    (directory / name).write_bytes(whole[:-2] + bytes([whole[-2] ^ 1, whole[-1]]))
    TokenDataset.open(directory)
    with pytest.raises(FailureError, match=f"{name} does not have the SHA-256 that the manifest says"):
        TokenDataset.open(directory, verify=True)
    (directory / name).unlink()
    with pytest.raises(FailureError, match=f"{name} is missing"):
        TokenDataset.open(directory)


def test_damaged_manifests_are_named(write_jsonl: Writer, tmp_path: Path) -> None:
    prepare(config(write_jsonl(100)), tmp_path / "data")
    path = tmp_path / "data" / "manifest.json"
    whole = path.read_text(encoding="utf-8")
    for damaged, message in (
        (whole[:200], "is not valid JSON"),
        (whole.replace('"format": 1', '"format": 2'), "has the format 2, this version reads 1"),
        (whole.replace('"bytes_per_token"', '"bytes_a_token"'), "is not a whole manifest: .*unknown field 'bytes_a_token'"),
    ):
        path.write_text(damaged, encoding="utf-8")
        with pytest.raises(FailureError, match=message):
            TokenDataset.open(tmp_path / "data")


def test_a_corpus_that_changes_while_it_is_read_is_refused(write_jsonl: Writer, tmp_path: Path) -> None:
    source = write_jsonl(100)

    def change(line: str) -> None:
        if line.startswith("tokenizing"):
            write_jsonl(99)

    with pytest.raises(FailureError, match="changed while it was being read"):
        prepare(config(source), tmp_path / "data", report=change)
    assert not (tmp_path / "data" / "manifest.json").exists()


def test_a_full_disk_is_one_sentence(write_jsonl: Writer, tmp_path: Path) -> None:
    """`/dev/full` refuses every byte as a full disk does."""
    settings, directory = config(write_jsonl(100)), tmp_path / "data"
    (directory / ".work").mkdir(parents=True)
    (directory / ".work" / "plan.json").write_text("{}", encoding="utf-8")
    (directory / "train.bin").symlink_to("/dev/full")
    with pytest.raises(FailureError, match=r"the disk is full while writing .*train\.bin; free some space"):
        prepare(settings, directory)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from /proc")
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    """Preparing 18 MB of text peaks less than 8 MB above preparing 3 MB. (`ru_maxrss` would start with the peak of this process.)"""
    code = (
        "import sys; from pathlib import Path; from depthroute.data import PrepareConfig, prepare\n"
        "prepare(PrepareConfig.of(sys.argv[1], vocabulary=300, sample_one_in=1), Path(sys.argv[2]))\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    one_heap = os.environ | {"RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}  # the heaps of threads fragment, and hide what is measured
    peaks = []
    for megabytes in (3, 18):
        source = tmp_path / f"{megabytes}.jsonl"
        with source.open("w", encoding="utf-8") as file:
            for i in range(megabytes * 100):
                file.write(json.dumps({"text": f"the residual stream {i} of a network " * 280}) + "\n")
        command = [sys.executable, "-c", code, str(source), str(tmp_path / str(megabytes))]
        peaks.append(int(subprocess.run(command, capture_output=True, text=True, check=True, env=one_heap).stdout))
    assert peaks[1] - peaks[0] < 8 * 1024, peaks
