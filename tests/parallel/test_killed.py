"""Processes of a run that are killed, or signalled: how the others end, and how the run goes on."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from depthroute.cli.main import main
from depthroute.common.config import to_json
from depthroute.common.errors import FailureError
from depthroute.common.files import write_json
from depthroute.data import TokenDataset
from depthroute.parallel.layout import parse_layout
from depthroute.train import RunConfig, loop, train
from depthroute.train import checkpoint as checkpoints
from depthroute.train.on_many import OnMany
from depthroute.train.run_folder import FORMAT, RunFolder
from tests.parallel.runs import assert_identical, lines, prepare_tokens, tensors_of, tiny
from tests.parallel.world import World, free_port

MINUTE = 60.0
STEP = 5  # in which it happens; the last checkpoint is that of step 3
SCRIPT = """
import sys
from pathlib import Path
from tests.parallel.test_killed import doomed, main

doomed("step", 1, {number}, Path(sys.argv[1]))
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_tokens(tmp_path_factory.mktemp("data"))


def doomed(moment: str, rank: int, number: int, run: Path) -> None:
    """Let a signal reach one rank, or all (-1): in a step, while a shard is written, or when all are and the checkpoint is not there yet.

    Or, of the moment "metrics", let a line of a step fail to be written. After an elastic restart nothing happens any more. A step waits
    for the last checkpoint: it is written in the background, and a slow disk may have it behind this step.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    if rank not in (-1, int(os.environ["RANK"])) or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return
    owner, name = {
        "step": (OnMany, "accumulate"), "metrics": (RunFolder, "add_metrics"), "shard": (HuggingFaceStorageWriter, "write_data"),
        "state": (checkpoints, "write_state"),
    }[moment]  # fmt: skip
    real, calls = getattr(owner, name), 0

    def reached(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == (STEP if moment in ("step", "metrics") else 2):  # the second checkpoint is that of step 6
            if moment in ("step", "metrics"):
                _wait_for(run / "checkpoints" / "step-00000003")
            if moment == "metrics":
                raise FailureError("the disk is full")
            if moment != "step":
                time.sleep(0.5)  # the training goes on
            os.kill(os.getpid(), number)
        return real(*arguments, **options)

    setattr(owner, name, reached)


def _wait_for(folder: Path) -> None:
    until = time.monotonic() + MINUTE
    while not folder.exists():
        assert time.monotonic() < until, f"{folder.name} does not come"
        time.sleep(0.02)


def process(place: dict[str, str], run: Path, layout: str, output: Path, doom: tuple[str, int, int] | None) -> None:
    """One process of a run as the command line starts it; it ends with the command's exit code."""
    os.environ |= place
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    if doom is not None:
        doomed(*doom, run)
    sys.exit(main(["train", str(run), "--parallel", layout]))


def ended(run: Path, layout: str, doom: tuple[str, int, int] | None = None) -> list[tuple[int | None, str]]:
    """How each of two processes ended, and what it printed; they have a minute after the first one has."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torch.distributed.checkpoint", "depthroute.train.loop", "pytest"])
    places = [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for port in [str(free_port())] for rank in range(2)
    ]
    outputs = [run.parent / f"output {place['MASTER_PORT']} {place['RANK']}" for place in places]
    arguments = [(place, run, layout, output, doom) for place, output in zip(places, outputs, strict=True)]
    processes: list[BaseProcess] = [context.Process(target=process, args=given) for given in arguments]
    for one in processes:
        one.start()
    try:
        _wait(processes, any, 3 * MINUTE)
        _wait(processes, all, MINUTE)
        return [(one.exitcode, output.read_text()) for one, output in zip(processes, outputs, strict=True)]
    finally:
        for one in processes:
            one.kill()
            one.join()


def _wait(processes: list[BaseProcess], which: Any, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not which(not one.is_alive() for one in processes):
        assert time.monotonic() < until, "a process hangs"
        time.sleep(0.02)


def begun(config: RunConfig, run: Path) -> None:
    """A folder in which `depthroute train RUN` goes on with a run: it has its configuration, and no step."""
    config = loop.resolve(config)
    if not config.data_fingerprint:
        config = loop.for_data(config, TokenDataset.open(Path(config.data)))
    write_json(run / "config.json", {"format": FORMAT, **to_json(config)})


def whole(config: RunConfig, run: Path, layout: str) -> None:
    train(config, run, console=False, layout=parse_layout(layout))


@pytest.mark.parametrize(
    ("moment", "rank", "layout"), [("step", 0, "pp"), ("step", 1, "fsdp"), ("shard", 0, "fsdp"), ("shard", 1, "ddp"), ("state", 0, "tp")]
)
def test_a_killed_process_ends_the_others_and_the_run_goes_on(
    tmp_path: Path, data: Path, world: World, moment: str, rank: int, layout: str
) -> None:
    config, run = tiny(data), tmp_path / "run"
    begun(config, run)
    found = ended(run, layout, (moment, rank, signal.SIGKILL))
    killed, (code, said) = found[rank], found[1 - rank]
    assert killed[0] == -signal.SIGKILL
    assert code == 1, said
    errors = [line for line in said.splitlines() if line.startswith("depthroute train: ")]
    assert len(errors) == 1 and "another process of this run has ended" in errors[0] and "Traceback" not in said
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-00000003"]
    tensors_of(run)  # it is whole
    assert [code for code, _ in ended(run, layout)] == [0, 0]
    assert "continuing after step 3\n" in (run / "log.txt").read_text()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000008"]  # nothing that the kill left
    world.run(2, whole, config, tmp_path / "whole", layout, grouped=False)
    assert_identical(run, tmp_path / "whole")


def test_a_failure_of_the_first_process_alone_ends_the_others(tmp_path: Path, data: Path) -> None:
    run = tmp_path / "run"
    begun(tiny(data), run)
    (first, failed), (second, lost) = ended(run, "pp", ("metrics", 0, 0))
    assert first == second == 1
    assert "depthroute train: the disk is full\n" in failed and "another process of this run has ended" in lost
    assert [code for code, _ in ended(run, "tp")] == [0, 0]
    assert "continuing after step 3\n" in (run / "log.txt").read_text()


@pytest.mark.parametrize(("number", "rank"), [(signal.SIGTERM, 1), (signal.SIGINT, -1)])
def test_interrupted_processes_end_with_130(tmp_path: Path, data: Path, number: int, rank: int) -> None:
    run = tmp_path / "run"
    begun(tiny(data), run)
    found = ended(run, "fsdp", ("step", rank, number))
    assert [code for code, _ in found] == [130, 130]
    assert f"interrupted after step {STEP}; run the same command again to continue in {run}" in found[0][1]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000005"]


def test_a_wrong_request_ends_every_process_with_2(tmp_path: Path, data: Path) -> None:
    run = tmp_path / "run"
    begun(dataclasses.replace(tiny(data), data_fingerprint="another"), run)
    assert [code for code, _ in ended(run, "fsdp")] == [2, 2]
    assert sorted(path.name for path in run.iterdir()) == ["config.json"]


def test_torchrun_starts_a_run_again_that_lost_a_process(tmp_path: Path, data: Path, world: World) -> None:
    config, run = tiny(data), tmp_path / "run"
    begun(config, run)
    script = tmp_path / "killed.py"
    script.write_text(SCRIPT.format(number=int(signal.SIGKILL)))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.1",
        "--master-addr", "127.0.0.1", "--master-port", str(free_port()), str(script), str(run), "--parallel", "ddp",
    ]  # fmt: skip
    root = str(Path(__file__).resolve().parents[2])
    outcome = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200, check=False
    )
    assert outcome.returncode == 0, outcome.stderr
    assert "continuing after step 3\n" in (run / "log.txt").read_text()
    world.run(2, whole, config, tmp_path / "whole", "ddp", grouped=False)
    assert lines(run, "metrics.jsonl") == lines(tmp_path / "whole", "metrics.jsonl")
    assert_identical(run, tmp_path / "whole")
