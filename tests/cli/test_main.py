"""The command line: what it prints, its exit status, how soon it answers."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from depthroute import __version__
from depthroute.cli import main as command_line
from depthroute.cli.main import COMMANDS, main
from depthroute.common.errors import FailureError

ROOT = Path(__file__).parents[2]


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "depthroute", *arguments], cwd=ROOT, capture_output=True, text=True)


def test_it_runs_from_the_repository_root() -> None:
    found = start("--version")
    assert (found.returncode, found.stdout, found.stderr) == (0, f"{__version__}\n", "")


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS)], ids=" ".join)
def test_help_answers_in_half_a_second(arguments: list[str]) -> None:
    """By the processor's time: what else runs on the machine is not the command's."""
    seconds = []
    for _ in range(5):
        before = os.times()
        found = start(*arguments)
        after = os.times()
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
        assert found.returncode == 0 and found.stderr == "" and "usage:" in found.stdout
        if seconds[-1] < 0.5:
            return
    pytest.fail(f"the best of five took {min(seconds):.2f} s")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_needs_no_torch(name: str) -> None:
    code = f"import sys\nfrom depthroute.cli.main import main\ntry:\n    main([{name!r}, '--help'])\nexcept SystemExit:\n    pass\n"
    code += "print('torch' in sys.modules, 'numpy' in sys.modules, file=sys.stderr)"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stderr.strip() == "False False"


def test_every_command_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text and about in text for name, about in COMMANDS.items())
    files = {path.stem for path in (ROOT / "depthroute" / "cli").glob("*.py")}
    assert set(COMMANDS) <= files
    assert main([]) == 2 and capsys.readouterr().out == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "unknown command 'trian'; perhaps you meant 'train'"),
        (["info", "rds"], "depthroute info: unknown recipe 'rds'; perhaps you meant 'rd-s'"),
        (["info", "rd-s", "--set", "model.widht=3"], "depthroute info: model.widht: unknown field 'widht'; perhaps you meant 'width'"),
        (["info", "rd-s", "--set", "model.width"], "it takes FIELD=VALUE"),
        (["info", "rd-s", "--residual", "blok"], "unknown residual method 'blok'; perhaps you meant 'block'"),
        (["info", "rd-s", "--residual", "block:99"], "block = 99 is not allowed; it takes 1 to 32 for 32 sub-layers"),
        (["train", "out", "--data", "nothing"], "depthroute train: nothing"),
        (["sample", "nothing", "--prompt", "x"], "depthroute sample: nothing"),
        (["report", "nothing"], "depthroute report: nothing"),
        (["info", str(ROOT / "docs")], "is neither a run folder (config.json) nor token shards (manifest.json)"),
    ],
)
def test_a_wrong_request_is_one_sentence_and_exits_with_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    text = capsys.readouterr()
    assert message in text.err and "Traceback" not in text.err and text.out == "" and text.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["train", "--dta", "x"], ["info"], ["sample", "run", "--tokens", "many"]], ids=" ".join)
def test_a_wrong_option_is_explained_and_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    text = capsys.readouterr()
    assert "Traceback" not in text.err + text.out and text.err + text.out


def failing(error: BaseException) -> object:
    class Command:
        @staticmethod
        def main(arguments: list[str]) -> None:
            raise error

    return Command


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (FailureError("the shard is cut short."), 1, "depthroute info: the shard is cut short.\n"),
        (OSError(errno.EIO, "Input/output error", "x.bin"), 1, "depthroute info: [Errno 5] Input/output error: 'x.bin'\n"),
        (KeyboardInterrupt(), 130, "depthroute info: interrupted.\n"),
        (KeyboardInterrupt("stopped at step 3."), 130, "stopped at step 3.\n"),
        (BrokenPipeError(), 0, ""),
    ],
)
def test_failures_exit_with_1_and_interruptions_with_130(
    error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_line.importlib, "import_module", lambda name: failing(error))
    assert main(["info", "rd-s"]) == code
    assert capsys.readouterr().err == message


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (FailureError("cut."), OSError("odd")):
        monkeypatch.setattr(command_line.importlib, "import_module", lambda name, error=error: failing(error))
        with pytest.raises(type(error)):
            main(["info", "rd-s", "--debug"])
    found = start("info", "rds", "--debug")
    assert found.returncode == 1 and "Traceback" in found.stderr and "unknown recipe" in found.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_output_that_cannot_be_written() -> None:
    command = [sys.executable, "-m", "depthroute", "recipes"]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # it fails when it is flushed, at the end
    with open("/dev/full", "w") as full:
        found = subprocess.run(command, cwd=ROOT, env=buffered, stdout=full, stderr=subprocess.PIPE, text=True)
    assert found.returncode == 1 and found.stderr == "depthroute recipes: [Errno 28] No space left on device\n"
    read, write = os.pipe()
    os.close(read)  # nobody reads
    found = subprocess.run(command, cwd=ROOT, env=buffered, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (found.returncode, found.stderr) == (0, "")


def test_info_of_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "rd-s", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 119_800_512
    assert main(["info", "rd-s", "--residual", "block"]) == 0
    assert "parameters             119,791,296" in capsys.readouterr().out
    assert main(["info", "small", "--set", "model.width=48", "--set", "model.layers=4", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["width"], facts["layers"]) == (48, 4)


def test_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert main(["recipes", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert [*whole["runs"], *whole["studies"]] == names
    assert whole["runs"]["rd-m"]["model"]["residual"]["roles"] == "decoupled" and "role-decoupled" in whole["studies"]
