"""The examples run as they stand. Those for GPUs and clusters are read: the shell takes them, and so does the command line."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from torch import distributed

from depthroute.cli.options import changes, read
from depthroute.cli.train import Options
from depthroute.parallel.layout import parse_layout
from depthroute.parallel.tensor import check_tensor
from depthroute.recipes import recipe, run_of

ROOT = Path(__file__).parents[1]
PARALLEL = ROOT / "examples" / "parallel"


SAYS = {"own_model.py": "nats", "custom_residual.py": "a = 0: PreNorm: holds", "adopted_llama.py": "route queries have moved"}
PROCESSES = {"laptop.sh": 2, "one_machine.sh": 8, "slurm.sbatch": 32}


def test_every_example_is_run() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(SAYS)
    assert {path.name for path in PARALLEL.iterdir() if path.is_file()} == {*PROCESSES, "own_pipeline.py"}


@pytest.mark.parametrize("name", SAYS)
def test_the_example_runs(name: str) -> None:
    path = ROOT / "examples" / name
    program = f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); runpy.run_path({str(path)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert SAYS[name] in done.stdout


def launched(*command: str) -> str:
    """What a command prints, with this environment's programs and this tree in front."""
    if not distributed.is_gloo_available():
        pytest.skip("torch has no gloo")
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_pipeline_that_keeps_the_depth_memory_sends_less_for_the_same_loss() -> None:
    """Of blocks of one layer in four chunks 3 + 5 + 7 sources are sent, or 3 + 2 + 2, each way."""
    said = launched("torchrun", "--standalone", "--nproc-per-node", "2", str(PARALLEL / "own_pipeline.py"))
    lines = re.findall(r"keeps=(\w+): loss ([\d.]+) .* ([\d,]+) bytes", said)
    found = {keeps: (loss, int(sent.replace(",", ""))) for keeps, loss, sent in lines}
    assert found["none"][0] == found["all"][0]
    assert found["none"][1] * 7 == found["all"][1] * 15 > 0


def test_the_rehearsal_on_a_laptop(tmp_path: Path) -> None:
    said = launched("bash", str(PARALLEL / "laptop.sh"), str(tmp_path))
    assert "complete: validation NLL" in said and "model.safetensors and optimizer.safetensors" in said
    assert (tmp_path / "run" / "result.json").exists()


@pytest.mark.parametrize("name", PROCESSES)
def test_a_script_is_one_that_shell_and_command_line_take(name: str) -> None:
    path = PARALLEL / name
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True).returncode == 0
    lines = path.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    assert "set -euo pipefail" in lines
    trained = 0
    for line in lines:
        words = shlex.split(line, comments=True)
        if "depthroute" not in words:
            continue
        command, *arguments = words[words.index("depthroute") + 1 :]
        module = importlib.import_module(f"depthroute.cli.{command}")
        if command == "data":
            assert arguments.pop(0) == "prepare"
        options = read(module.Prepare if command == "data" else module.Options, command, arguments)
        if not isinstance(options, Options):
            continue
        run = run_of(recipe(options.recipe or "small"), Path(), residual=options.residual, settings=changes(options.set))
        assert options.parallel is not None
        layout = parse_layout(options.parallel).fitted(PROCESSES[name])
        check_tensor(run.model, layout.tp)
        assert layout.rows(run.train.sequences) >= 1
        trained += 1
    assert trained == 1
