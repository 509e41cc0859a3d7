"""A preparation that is killed goes on, on one process or several, and comes out the same."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from depthroute.common.config import to_json
from depthroute.common.errors import FailureError, RequestError
from depthroute.data import PrepareConfig, Progress, Source, TokenDataset, fill, groups, journal, json_lines, prepare, rows
from depthroute.data.corpus import Part
from depthroute.data.journal import Journal
from depthroute.data.workers import _Worker, answer, run_jobs
from tests.data.preparation import Writer, config, contents, packed

DRIVER = """
import json, sys
from pathlib import Path
from depthroute.common.config import from_json
from depthroute.data import PrepareConfig, fill, groups, json_lines, prepare, rows
rows.PART_BYTES = groups.GROUP_BYTES = 4096
json_lines.PACKED = 1
fill.JOURNAL_SECONDS = fill.PROGRESS_SECONDS = 0
settings, show = from_json(PrepareConfig, json.loads(sys.argv[1])), lambda moment: print(moment, flush=True)
prepare(settings, Path(sys.argv[2]), workers=int(sys.argv[3]), progress=show)
"""


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many groups of few documents, and a journal of every one."""
    monkeypatch.setattr(rows, "PART_BYTES", 4096)
    monkeypatch.setattr(groups, "GROUP_BYTES", 4096)
    monkeypatch.setattr(json_lines, "PACKED", 1)
    monkeypatch.setattr(fill, "JOURNAL_SECONDS", 0)
    monkeypatch.setattr(fill, "PROGRESS_SECONDS", 0)


def stop_at(moment: int, *stages: str) -> Callable[[Progress], None]:
    """Progress that fails at its call of this number, in these stages."""
    calls = 0

    def show(progress: Progress) -> None:
        nonlocal calls
        calls += not stages or progress.doing in stages
        if calls == moment:
            raise KeyboardInterrupt

    return show


@pytest.mark.parametrize("workers", [1, 2])
def test_the_cut_into_groups_and_the_processes_change_nothing(
    workers: int, write_jsonl: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    settings = config(write_jsonl(120))
    prepare(settings, tmp_path / "whole")
    request.getfixturevalue("small_groups")
    prepare(settings, tmp_path / "cut", workers=workers)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    assert not (tmp_path / "cut" / ".work").exists()


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_what_is_done_is_not_done_again(suffix: str, write_jsonl: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the first pass nor in the second: a call that is stopped after every third group needs no group twice."""
    lines = write_jsonl(120)
    settings = config(packed(lines.with_name(lines.name + suffix), lines.read_bytes()))
    prepare(settings, tmp_path / "whole", workers=1)
    jobs: list[tuple[str, Any]] = []
    work = fill.work
    monkeypatch.setattr(fill, "work", lambda job, corpora: (jobs.append((job["kind"], job.get("parts"))), work(job, corpora))[1])
    prepare(settings, tmp_path / "counted", workers=1)
    needed = jobs.copy()
    jobs.clear()
    stops = 0
    while True:
        try:
            prepare(settings, tmp_path / "stopped", workers=1, progress=stop_at(3))
        except KeyboardInterrupt:
            stops += 1
        else:
            break
    assert stops > 4 and jobs == needed
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")


@pytest.mark.parametrize("workers", ["1", "2"])
def test_sigkill_at_any_moment(workers: str, write_jsonl: Writer, tmp_path: Path) -> None:
    """All processes at once, at random moments, until it comes to its end."""
    lines = write_jsonl(300)
    settings = config(packed(lines.with_name("d.jsonl.gz"), lines.read_bytes()))
    command = [sys.executable, "-c", DRIVER, json.dumps(dataclasses.asdict(settings)), str(tmp_path / "killed"), workers]
    moments, kills = random.Random(1), 0
    while True:
        with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for _ in range(moments.randint(5, 15)):  # so many groups are done, or it is at its end
                process.stdout.readline()
            time.sleep(moments.random() * 0.01)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if process.wait() == 0:
                break
            kills += 1
    assert kills > 0
    prepare(settings, tmp_path / "whole")
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


@pytest.mark.usefixtures("small_groups")
def test_what_a_killed_call_had_not_noted_is_cut_off(write_jsonl: Writer, tmp_path: Path) -> None:
    settings, directory = config(write_jsonl(120)), tmp_path / "data"
    with pytest.raises(KeyboardInterrupt):
        prepare(settings, directory, workers=1, progress=stop_at(5, "tokenizing"))
    assert (directory / ".work" / "journal.json").exists()
    for path in directory.glob("*.bin"):
        with path.open("ab") as file:
            file.write(b"half of a group")
    prepare(settings, directory, workers=1)
    prepare(settings, tmp_path / "whole", workers=1)
    assert contents(directory) == contents(tmp_path / "whole")


@pytest.mark.usefixtures("small_groups")
def test_shards_that_lost_what_was_noted_are_named(write_jsonl: Writer, tmp_path: Path) -> None:
    settings, directory = config(write_jsonl(120)), tmp_path / "data"
    with pytest.raises(KeyboardInterrupt):
        prepare(settings, directory, workers=1, progress=stop_at(5, "tokenizing"))
    (directory / "train.bin").write_bytes(b"")
    with pytest.raises(FailureError, match=r"train\.bin is shorter than what was written to it; delete"):
        prepare(settings, directory, workers=1)


@pytest.mark.usefixtures("small_groups")
def test_what_is_made_in_the_folder_of_the_source_is_none_of_it(write_jsonl: Writer, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    source = write_jsonl(120, "in/documents.jsonl").parent
    prepare(config(source), tmp_path / "whole", workers=1)
    for stops in (2, 12):
        with pytest.raises(KeyboardInterrupt):
            prepare(config(source), source / "out", workers=1, progress=stop_at(stops))
    manifest = prepare(config(source), source / "out", workers=1)
    assert contents(source / "out") == contents(tmp_path / "whole")
    assert prepare(config(source), source / "out", workers=1) == manifest


@pytest.mark.usefixtures("small_groups")
def test_a_kill_while_another_plan_starts_over(write_jsonl: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves a folder with which either goes on."""
    source, directory = write_jsonl(120), tmp_path / "data"
    with pytest.raises(KeyboardInterrupt):
        prepare(config(source, vocabulary=310), directory, workers=1, progress=stop_at(5, "tokenizing"))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    for settings in (config(source), config(source, vocabulary=310)):
        with monkeypatch.context() as patch:
            patch.setattr(journal, "write_json", killed)
            with pytest.raises(KeyboardInterrupt):
                prepare(config(source), directory, workers=1)
        prepare(settings, tmp_path / "again", workers=1)
        shutil.copytree(directory, tmp_path / "copy")
        prepare(settings, tmp_path / "copy", workers=1)
        assert contents(tmp_path / "copy") == contents(tmp_path / "again")
        shutil.rmtree(tmp_path / "copy")
        shutil.rmtree(tmp_path / "again")


@pytest.mark.usefixtures("small_groups")
def test_a_journal_whose_plan_is_lost_is_not_believed(write_jsonl: Writer, tmp_path: Path) -> None:
    source, directory = write_jsonl(120), tmp_path / "data"
    prepare(config(source), tmp_path / "first", workers=1)
    settings = PrepareConfig.of(str(source), id_column="id", tokenizer=str(tmp_path / "first/tokenizer.json"), validation_share=0.1)
    with pytest.raises(KeyboardInterrupt):
        prepare(settings, directory, workers=1, progress=stop_at(5, "tokenizing"))
    for path in (directory / ".work/plan.json", *(path for path in directory.iterdir() if not path.name.startswith("."))):
        path.unlink()
    assert (directory / ".work/journal.json").exists()
    assert prepare(settings, directory, workers=1).splits == prepare(settings, tmp_path / "whole", workers=1).splits


@pytest.mark.usefixtures("small_groups")
def test_a_source_that_changes_is_noticed_before_the_tokens(write_jsonl: Writer, tmp_path: Path) -> None:
    source = write_jsonl(120)
    seen: list[str] = []

    def show(moment: Progress) -> None:
        seen.append(moment.doing)
        os.utime(source, ns=(0, 0))

    with pytest.raises(FailureError, match="changed while it was being read"):
        prepare(config(source), tmp_path / "data", workers=1, progress=show)
    assert set(seen) == {"counting words"}


def test_a_worker_ends_with_its_parent_in_the_middle_of_a_job(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "d.txt")  # who opens it waits
    job = {
        "kind": "words", "config": to_json(config(tmp_path / "d.txt", id_column=None)), "source": 0,
        "parts": [Part("d.txt", 0, 1, 1)], "out": str(tmp_path / "words"),
    }  # fmt: skip
    worker = _Worker(threads=False)
    assert worker._process.stdin is not None
    worker._process.stdin.write(answer(job))
    worker.close()
    assert worker._process.wait(timeout=60) == 0


@pytest.mark.usefixtures("small_groups")
def test_shards_that_were_altered_or_lost_while_it_stood_still_are_named(write_jsonl: Writer, tmp_path: Path) -> None:
    settings, directory = config(write_jsonl(120)), tmp_path / "data"
    with pytest.raises(KeyboardInterrupt):
        prepare(settings, directory, workers=1, progress=stop_at(5, "tokenizing"))
    tokens = (directory / "train.bin").read_bytes()
    for altered in (b"\x11" + tokens[1:], b"\xff\xff" + tokens[2:]):  # the second is no id of the vocabulary
        (directory / "train.bin").write_bytes(altered)
        with pytest.raises(FailureError, match=r"train\.bin is not what was written to it; delete"):
            prepare(settings, directory, workers=1)
    (directory / "train.bin").unlink()
    with pytest.raises(FailureError, match=r"train\.bin is shorter than what was written to it"):
        prepare(settings, directory, workers=1)


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("left", [None, b"{}"], ids=["lost", "altered"])
def test_a_tokenizer_that_is_not_the_one_that_was_trained_starts_over(left: bytes | None, write_jsonl: Writer, tmp_path: Path) -> None:
    settings, directory = config(write_jsonl(120)), tmp_path / "data"
    with pytest.raises(KeyboardInterrupt):
        prepare(settings, directory, workers=1, progress=stop_at(5, "tokenizing"))
    (directory / "tokenizer.json").unlink()
    if left is not None:
        (directory / "tokenizer.json").write_bytes(left)
    prepare(settings, directory, workers=1)
    prepare(settings, tmp_path / "whole", workers=1)
    assert contents(directory) == contents(tmp_path / "whole")


@pytest.mark.usefixtures("small_groups")
def test_another_end_of_documents_starts_over(write_jsonl: Writer, tmp_path: Path) -> None:
    """The tokenizer's file is the same, and what it says beside it is not."""
    source = write_jsonl(120)
    prepare(config(source), tmp_path / "first", workers=1)
    tokenizer = tmp_path / "first" / "tokenizer.json"
    beside = tokenizer.with_name("tokenizer_config.json")
    settings = PrepareConfig.of(str(source), id_column="id", tokenizer=str(tokenizer), validation_share=0.1)
    beside.write_text('{"eos_token": "<eos>"}', encoding="utf-8")
    with pytest.raises(KeyboardInterrupt):
        prepare(settings, tmp_path / "data", workers=1, progress=stop_at(5))
    beside.write_text('{"eos_token": "<bos>"}', encoding="utf-8")
    manifest = prepare(settings, tmp_path / "data", workers=1)
    tokens = TokenDataset.open(tmp_path / "data").tokens("train")
    assert manifest.end == 2 and (tokens == 2).sum() == manifest.splits.train.documents and not (tokens == 3).any()


@pytest.mark.usefixtures("small_groups")
def test_a_worker_that_outlives_its_call_writes_nothing_of_the_next(write_jsonl: Writer, tmp_path: Path) -> None:
    """All jobs write into a folder that goes with their call."""
    seen: list[Path] = []
    work = fill.work
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fill, "work", lambda job, corpora: (seen.append(Path(job["out"])), work(job, corpora))[1])
        prepare(config(write_jsonl(120)), tmp_path / "data", workers=1)
    assert len({path.parent for path in seen}) == 1 and seen[0].parent.parent == tmp_path / "data" / ".work"
    assert not seen[0].parent.exists()


@pytest.mark.usefixtures("small_groups")
def test_another_plan_starts_over(write_jsonl: Writer, tmp_path: Path) -> None:
    source, directory = write_jsonl(120), tmp_path / "data"
    with pytest.raises(KeyboardInterrupt):
        prepare(config(source, vocabulary=310), directory, workers=1, progress=stop_at(5, "tokenizing"))
    prepare(config(source), directory, workers=1)
    prepare(config(source), tmp_path / "whole", workers=1)
    assert contents(directory) == contents(tmp_path / "whole")


@pytest.mark.usefixtures("small_groups")
def test_a_refusal_in_a_worker_is_that_of_one_process(write_jsonl: Writer, tmp_path: Path) -> None:
    source = write_jsonl(120)
    lines = source.read_text(encoding="utf-8").splitlines()
    lines[77] = '{"id": 7, "text": ["no text"]}'
    source.write_text("\n".join(lines), encoding="utf-8")
    for workers in (1, 2):
        with pytest.raises(RequestError, match=r"documents\.jsonl row 78.*text"):
            prepare(config(source), tmp_path / str(workers), workers=workers)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("kill -9 $$", "was killed by signal 9, perhaps for want of memory: with fewer --workers it needs less. The same command goes on"),
        ("exit 3", "ended with status 3; what it printed says why"),
    ],
)
def test_a_worker_that_ends_is_named(script: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(FailureError, match=message):
        list(run_jobs([{}], lambda job: {}, processes=2))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(FailureError, match=r"no process could be started with .*nothing"):
        list(run_jobs([{}], lambda job: {}, processes=2))


def test_what_a_worker_prints_is_no_answer(write_jsonl: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a module of another one's name stand in the way: the path of a worker is its own."""
    (tmp_path / "sitecustomize.py").write_text("print('hello')", encoding="utf-8")
    (tmp_path / "json.py").write_text("", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FailureError, match="unexpected KeyError"):
        list(run_jobs([{}], lambda job: {}, processes=2))
    (tmp_path / "json.py").unlink()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(FailureError, match="unexpected KeyError"):
        list(run_jobs([{}], lambda job: {}, processes=2))


def test_an_error_that_nobody_expected_is_a_failure_with_its_name() -> None:
    with pytest.raises(FailureError, match="unexpected KeyError: 'kind'"):
        list(run_jobs([{}], lambda job: {}, processes=2))


@pytest.mark.usefixtures("small_groups")
def test_progress_counts_the_bytes_of_the_input(write_jsonl: Writer, tmp_path: Path) -> None:
    source = write_jsonl(120)
    size = source.stat().st_size
    seen: list[Progress] = []
    prepare(config(source), tmp_path / "data", workers=1, progress=seen.append)
    for doing in ("counting words", "tokenizing"):
        moments = [moment for moment in seen if moment.doing == doing]
        assert [moment.done for moment in moments] == sorted({moment.done for moment in moments})
        assert moments[-1].done == moments[-1].total == size and moments[0].found == 0
        assert moments[-1].remaining == 0.0


def test_a_line_of_progress() -> None:
    moment = Progress(doing="tokenizing", done=3_000_000_000, total=9_000_000_000, found=1_000_000_000, seconds=1000.0)
    assert (moment.rate, moment.remaining) == (2_000_000.0, 3000.0)
    assert str(moment) == "tokenizing: 3.0 GB of 9.0 GB (33 %), 2.0 MB/s, 50m 00s left"
    assert str(dataclasses.replace(moment, done=1_000_000_000)) == "tokenizing: 1.0 GB of 9.0 GB (11 %)"
    assert str(dataclasses.replace(moment, total=30_000_000_000)).endswith(", 3h 45m left")
    assert str(dataclasses.replace(moment, done=8_990_000_000)).endswith(", 1s left")


@pytest.mark.usefixtures("small_groups")
def test_several_sources_follow_each_other_in_every_split(write_jsonl: Writer, tmp_path: Path) -> None:
    one, two = write_jsonl(90, "one.jsonl"), write_jsonl(60, "two.jsonl")
    first, second = (Source(path=str(path), id_column="id", weight=weight) for path, weight in ((one, 3.0), (two, 1.0)))
    settings = dataclasses.replace(config(one), sources=(first, second))
    manifest = prepare(settings, tmp_path / "both", workers=2)
    assert manifest.prepare.weights == (Fraction(3, 4), Fraction(1, 4)) and manifest.corpus.name == "one.jsonl + two.jsonl"
    assert [source.name for source in manifest.sources] == ["one.jsonl", "two.jsonl"]
    assert manifest.sources[0].columns == ("text, id: id",)
    both = TokenDataset.open(tmp_path / "both", verify=True)
    for name in ("train", "validation", "test"):
        at = 0
        for source, path in zip(manifest.sources, (one, two), strict=True):
            folder = tmp_path / f"{path.stem}-alone"
            ready = dataclasses.replace(config(path), vocabulary=2048, sample_one_in=4, tokenizer=str(tmp_path / "both" / "tokenizer.json"))
            ready = dataclasses.replace(ready, end_of_document="<eos>")
            alone = TokenDataset.open(tmp_path / folder) if folder.exists() else None
            if alone is None:
                prepare(ready, folder, workers=1)
                alone = TokenDataset.open(folder)
            tokens = getattr(source.splits, name).tokens
            assert both.tokens(name)[at : at + tokens].tolist() == alone.tokens(name).tolist()
            assert getattr(source.splits, name) == alone.manifest.split(name)
            at += tokens
        assert at == len(both.tokens(name))
    unweighted = dataclasses.replace(manifest, prepare=dataclasses.replace(settings, sources=(Source(path="a"), Source(path="b"))))
    assert unweighted.fingerprint != manifest.fingerprint


def test_no_workers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="workers cannot be 0; it takes 1 or more"):
        prepare(PrepareConfig(), tmp_path / "data", workers=0)


def test_a_folder_that_cannot_be_written_is_one_sentence(write_jsonl: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("depthroute.data.journal.tempfile.mkdtemp", refuse)
    with pytest.raises(FailureError, match=r"no permission while writing .*\.work; choose a folder you can write to"):
        Journal(tmp_path, {})
