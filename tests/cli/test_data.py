"""`depthroute data`: its commands, what they print, and how progress is shown."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import depthroute.data
from depthroute.cli import progress as shown_progress
from depthroute.cli.data import COMMANDS
from depthroute.cli.main import main
from depthroute.cli.progress import Lines
from depthroute.data import MultiHopConfig, PrepareConfig, Source
from depthroute.data.statistics import statistics_of
from tests.data.by_hand import alter_manifest, documents, write


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write(tmp_path / "data", {"a.jsonl": documents(60, "a"), "b.jsonl": documents(30, "b")})
    return tmp_path / "data"


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `prepare` is called with; it makes a directory by hand."""
    calls: list[Any] = []

    def prepare(config: PrepareConfig, directory: Path, *, workers: int | None, report: Any, progress: Any) -> None:
        calls.append((config, directory, workers))
        report("a line")
        write(directory, {"a.jsonl": documents(30)})

    monkeypatch.setattr(depthroute.data, "prepare", prepare)
    return calls


def test_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text and about in text for name, about in COMMANDS.items())
    with pytest.raises(SystemExit) as exit:
        main(["data"])
    assert exit.value.code == 2 and capsys.readouterr().out == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepair"], "depthroute data: unknown data command 'prepair'; perhaps you meant 'prepare'"),
        (["out", "--source", "x.jsonl"], "is now `depthroute data prepare SOURCE --out OUT`"),
        (["--source=x.jsonl", "out"], "is now `depthroute data prepare SOURCE --out OUT`"),
        (["verify", "nothing"], "nothing holds no manifest.json"),
        (["show", "nothing"], "nothing holds no manifest.json"),
        (["stats", "nothing"], "nothing holds no manifest.json"),
        (["show", "nothing", "--id", "x", "--split", "test"], "--id finds its documents by itself; leave out --split"),
        (["prepare", "a", "b", "--out", "o", "--weights", "1"], "--weights has 1 values for 2 sources"),
        (["prepare", "a", "b", "--out", "o", "--weights", "1", "-2"], "the weight of b cannot be -2.0"),
        (["prepare", "a", "b", "--out", "o", "--text-column", "x", "y", "z"], "--text-column has 3 values for 2 sources"),
        (["prepare", "a", "b", "c", "--out", "o", "--id-column", "x", "y"], "--id-column has 2 values for 3 sources"),
        (["prepare", "--out", "o", "--hops", "3"], "do not go together"),
    ],
)
def test_a_wrong_request_is_one_sentence_and_exits_with_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["data", *arguments]) == 2
    text = capsys.readouterr()
    assert message in text.err and text.out == "" and text.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_options_of_prepare_become_its_configuration(asked: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert main(["data", "prepare", "--out", out, "--json"]) == 0
    text = capsys.readouterr()
    assert asked == [(PrepareConfig(), Path(out), None)] and text.err == "a line\n" and json.loads(text.out)["vocabulary"] == 300
    words = ["a", "b", "--weights", "0.7", "0.3", "--text-column", "body", "--id-column", "uid", "none", "--workers", "3"]
    assert main(["data", "prepare", *words, "--bad-rows", "skip", "--out", out]) == 0
    sources = (
        Source(path="a", text_column="body", id_column="uid", weight=0.7), Source(path="b", text_column="body", weight=0.3),
    )  # fmt: skip
    assert asked[1] == (PrepareConfig(sources=sources, bad_rows="skip"), Path(out), 3)
    words = ["a", "--tokenizer", "t.json", "--end-of-document", "E", "--begin-of-document", "B", "--salt", "s", "--validation-share", "0.1"]
    assert main(["data", "prepare", *words, "--test-share", "0.2", "--out", out]) == 0
    settings = {"tokenizer": "t.json", "end_of_document": "E", "begin_of_document": "B", "salt": "s"}
    assert asked[2][0] == PrepareConfig.of("a", **settings, validation_share=0.1, test_share=0.2)
    assert main(["data", "prepare", "a", "--vocabulary", "999", "--sample-one-in", "2", "--out", out]) == 0
    assert asked[3][0] == PrepareConfig.of("a", vocabulary=999, sample_one_in=2)
    assert main(["data", "prepare", "multi-hop", "--documents", "100", "--hops", "3", "--out", out]) == 0
    assert asked[4][0] == PrepareConfig.of("multi-hop", multi_hop=MultiHopConfig(documents=100, hops=3))


def test_facts_tell_the_sources_where_there_are_several(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(directory), "--json"]) == 0
    sources = json.loads(capsys.readouterr().out)["sources"]
    assert [source["name"] for source in sources] == ["a.jsonl", "b.jsonl"] and sum(source["train_documents"] for source in sources) == 58


def test_verify_prints_every_check_and_fails_where_one_does(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "verify", str(directory), "--sample", "10"]) == 0
    text = capsys.readouterr()
    lines = text.out.splitlines()
    assert text.err == "" and len(lines) > 20 and all(line.startswith("ok ") for line in lines)
    assert "10 documents, all the same" in lines[-1]
    path = directory / "train.bin"
    path.write_bytes(path.read_bytes()[:-2])
    assert main(["data", "verify", str(directory), "--json"]) == 1
    text = capsys.readouterr()
    found = json.loads(text.out)
    wrong = [check for check in found["checks"] if check["ok"] is False]
    assert not found["ok"] and wrong[0]["name"] == "train.bin"
    assert text.err.startswith(f"depthroute data: {directory} is not what its manifest says. train.bin: {wrong[0]['found']}; train: counts")
    assert text.err.count("\n") == 1
    assert main(["data", "verify", str(directory)]) == 1
    assert "FAILS  train.bin" in capsys.readouterr().out


@pytest.mark.parametrize("stdout", ["pipe", "disk"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_failed_verification_is_told_whatever_becomes_of_the_list(directory: Path, stdout: str, unbuffered: str) -> None:
    if stdout == "disk" and not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    alter_manifest(directory, lambda manifest: manifest.update(bytes_per_token=1.5))
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    code = "import sys; from depthroute.cli.main import main; sys.exit(main(['data', 'verify', sys.argv[1]]))"
    reads, output = os.pipe() if stdout == "pipe" else (None, os.open("/dev/full", os.O_WRONLY))
    if reads is not None:
        os.close(reads)
    with os.fdopen(output, "wb") as unread:
        command = [sys.executable, "-c", code, str(directory)]
        found = subprocess.run(command, env=environment, stdout=unread, stderr=subprocess.PIPE, text=True)
    assert found.returncode == 1
    assert found.stderr.startswith(f"depthroute data: {directory} is not what its manifest says. manifest: bytes_per_token is 1.5")
    assert found.stderr.count("\n") == 1


def test_a_verification_without_a_standard_output(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout", None)
    assert main(["data", "verify", str(directory)]) == 0
    alter_manifest(directory, lambda manifest: manifest.update(bytes_per_token=1.5))
    assert main(["data", "verify", str(directory)]) == 1 and "bytes_per_token is 1.5" in capsys.readouterr().err


def test_a_verification_goes_on_where_its_progress_is_not_read(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unread(self: Lines, state: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(Lines, "progress", unread)
    alter_manifest(directory, lambda manifest: manifest.update(bytes_per_token=1.5))
    assert main(["data", "verify", str(directory)]) == 1 and "FAILS  manifest" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["show"], ["show", "--tokens"], ["stats"], ["verify"]])
def test_a_terminal_without_the_characters(directory: Path, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def named(manifest: dict[str, Any]) -> None:
        manifest["sources"][0].update(name="größe")
        manifest["sources"][0]["splits"]["train"]["documents"] += command == ["verify"]
        manifest["sources"][1]["splits"]["train"]["documents"] -= command == ["verify"]

    alter_manifest(directory, named)
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main(["data", command[0], str(directory), *command[1:]]) == (command == ["verify"])
    assert b"gr\\xf6\\xdfe" in written.getvalue()


def test_show_prints_documents(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["data", "show", str(directory), "--split", "validation", "--document", "-2", "--count", "2"]) == 0
    first, second = capsys.readouterr().out.split("\n\n")
    assert first.startswith("validation document 21: ") and second.startswith("validation document 22: ") and "·<eos>" in second
    assert main(["data", "show", str(directory), "--id", "b 3", "--json"]) == 0
    (document,) = json.loads(capsys.readouterr().out)
    assert document["text"] == documents(30, "b")[3].text and document["source"] == "b.jsonl"
    assert main(["data", "show", str(directory), "--tokens"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].startswith("train document 0: ") and table[1].split() == ["id", "bytes", "text"]
    assert table[-1].split() == ["3", "0", "<eos>"] and any(row.split()[2].startswith("␠") for row in table[2:])
    assert main(["data", "show", str(directory), "--document", "58"]) == 2
    assert "it takes 0 to 57, or -1 to -58 from the end" in capsys.readouterr().err
    assert main(["data", "show", str(directory), "--id", "\udcff"]) == 2
    assert capsys.readouterr().err.startswith(r"depthroute data: the id '\udcff' is no UTF-8")


def test_show_colours_a_terminal_alone(directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    command = ["data", "show", str(directory)]
    assert main(command) == 0 and "\033" not in capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(command) == 0 and "\033[30;46m" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(command) == 0 and "\033" not in capsys.readouterr().out


def test_stats_prints_what_the_library_finds(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = statistics_of(directory)
    assert main(["data", "stats", str(directory), "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert [split["all"]["tokens"] for split in written["splits"]] == [split.all.tokens for split in found.splits]
    assert main(["data", "stats", str(directory)]) == 0
    text = capsys.readouterr().out
    lines = {line[:28].strip(): line[28:].split() for line in text.splitlines()}
    train = found.splits[0].all
    assert lines["tokens"] and f"{train.tokens:,}" in text and f"{train.entropy_nats:,.3f}" in text and "train: by source" in text
    assert lines["texts of training documents"] == ["-", "0", "0"] and lines["ids again in the split"] == ["0", "0", "0"]
    assert "ids in more than one split: 0" in text and "#" * 40 in text
    write(directory, {"a.jsonl": documents(3, "c")}, recorded=False)
    assert main(["data", "stats", str(directory)]) == 0
    text = capsys.readouterr().out
    assert "ids of documents are not recorded" in text and "by source" not in text and "test: " not in text


def test_sources_of_one_name_are_all_in_the_table(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alter_manifest(directory, lambda manifest: manifest["sources"][1].update(name="a.jsonl"))
    assert main(["data", "stats", str(directory)]) == 0
    text = capsys.readouterr().out
    assert text.count("by source") == 3
    for table in text.split("by source\n")[1:]:
        assert table.splitlines()[0].split() == ["a.jsonl", "a.jsonl"] and len(table.splitlines()[1].split()) == 3


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def at(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> list[float]:
    """Standard error and the clock; the clock is set by its only entry."""
    now = [0.0]
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(shown_progress.time, "monotonic", lambda: now[0])
    return now


def test_progress_in_a_log_file_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    now = at(monkeypatch, log)
    with Lines() as lines:
        for second in range(70):
            now[0] = float(second)
            lines.progress(f"{second} done")
        lines.report("the end")
    assert log.getvalue() == "30 done\n60 done\nthe end\n"


def test_progress_on_a_terminal_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    now = at(monkeypatch, terminal)
    monkeypatch.setenv("COLUMNS", "20")
    with Lines() as lines:
        lines.progress("1 done")
        now[0] = 0.01
        lines.progress("too soon")
        lines.report("a line")
        now[0] = 5.0
        lines.progress("a text that is longer than the line")
    assert terminal.getvalue() == "\r\033[K1 done\r\033[Ka line\n\r\033[Ka text that is long\r\033[K"
