"""The same run on any layout: what it writes, how it goes on elsewhere, how it is interrupted and refused."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

from depthroute.cli.main import main
from depthroute.common.errors import DepthrouteError, FailureError, RequestError
from depthroute.parallel.layout import Layout, parse_layout
from depthroute.parallel.world import _meeting, joined
from depthroute.residual import parse_residual
from depthroute.train import RunConfig, load_trained, loop, train
from depthroute.train import checkpoint as checkpoints
from depthroute.train.branch import branch_run
from depthroute.train.on_many import OnMany
from depthroute.train.on_one import OnOne
from depthroute.train.run_folder import RunFolder
from tests.parallel.runs import assert_close, assert_identical, lines, prepare_tokens, tensors_of, tiny
from tests.parallel.world import World

TWO = ("ddp", "fsdp", "pp", "pp,virtual=2", "tp")
INSIDE = "value-residual"
FOUR = ("ddp:2,fsdp:2", "pp:2,fsdp:2")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_tokens(tmp_path_factory.mktemp("data"))


def trained(config: RunConfig, run: Path, layout: str, **options: Any) -> dict[str, Any]:
    return train(config, run, console=False, layout=None if layout == "one" else parse_layout(layout), **options)


def train_each(jobs: list[tuple[RunConfig, Path, str]]) -> None:
    for job in jobs:
        trained(*job)


# Measured, of the losses and of the norms: 1e-7 and 2e-7 with AdamW; 1e-6 and 3e-5 with Muon, whose orthogonal matrices have the digits of
# the small singular values; 9e-5 and 5e-3 in bf16, where tensor parallelism rounds the sums of the processes as well.
@pytest.mark.parametrize(
    ("fields", "layouts", "losses", "norms"),
    [
        ({}, {2: TWO, 4: FOUR}, 1e-6, 2e-6),
        pytest.param({"optimiser": "muon", "microbatch": 2}, {2: TWO[1:], 4: FOUR[:1]}, 4e-6, 1e-4, marks=pytest.mark.slow),
        ({"precision": "bf16"}, {2: ("ddp", "pp,virtual=2", "tp"), 4: FOUR[:1]}, 3e-4, 2e-2),
    ],
    ids=["adamw", "muon", "bf16"],
)
def test_a_run_is_the_same_on_any_layout(
    tmp_path: Path, data: Path, world: World, fields: dict[str, Any], layouts: dict[int, tuple[str, ...]], losses: float, norms: float
) -> None:
    config = tiny(data, **fields)
    trained(config, tmp_path / "one", "one")
    for ranks, some in layouts.items():
        world.run(ranks, train_each, [(config, tmp_path / layout, layout) for layout in some], grouped=False)
    assert any(line["gradient_norm"] > 0.5 for line in lines(tmp_path / "one", "metrics.jsonl"))  # it clips
    for layout in itertools.chain(*layouts.values()):
        assert_close(tmp_path / layout, tmp_path / "one", losses, norms)


def interrupted(number: int, step: int, rank: int) -> Any:
    """While entered, a signal reaches one rank, or all (-1), in a step."""
    real = loop.learning_rate

    def rate(before: int, settings: Any) -> float:
        if before == step - 1 and rank in (-1, int(os.environ.get("RANK", "0"))):
            for _ in range(2 if number == signal.SIGTERM and "RANK" in os.environ else 1):  # torchrun passes on what all have had
                signal.raise_signal(number)
        return real(before, settings)

    return mock.patch.object(loop, "learning_rate", rate)


def train_until(config: RunConfig, run: Path, layout: str, step: int, number: int = signal.SIGTERM, rank: int = -1) -> str:
    """What the interruption says."""
    with interrupted(number, step, rank), pytest.raises(KeyboardInterrupt) as caught:
        trained(config, run, layout)
    return str(caught.value)


@contextlib.contextmanager
def loads_compared() -> Iterator[list[str]]:
    """While entered, what a run has loaded must be what was saved, bit for bit; gives the names that this process has compared."""
    compared: list[str] = []

    def compare(found: Path, named: Any, state: Any) -> None:
        saved = tensors_of(found)
        for name, tensor in (*named, *state.items()):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert torch.equal(whole.detach(), saved[name]), name
            compared.append(name)

    def load(kind: Any) -> Any:
        real = kind.load

        def compared_load(workers: Any, found: Path) -> Any:
            state = real(workers, found)
            named = workers.network.named if kind is OnMany else list(workers.network.named_parameters())
            compare(found, named, workers.optimiser.state_tensors(named))
            return state

        return mock.patch.object(kind, "load", compared_load)

    with load(OnMany), load(OnOne):
        yield compared


def go_on_until(config: RunConfig, run: Path, layout: str, step: int | None) -> list[str]:
    with loads_compared() as compared:
        if step is None:
            trained(config, run, layout)
        else:
            train_until(config, run, layout, step)
    return compared


@pytest.mark.parametrize("optimiser", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_a_run_goes_on_in_another_layout(tmp_path: Path, data: Path, world: World, optimiser: str) -> None:
    config = tiny(data, optimiser=optimiser, checkpoint_every=0)
    trained(config, tmp_path / "whole", "one")
    run = tmp_path / "run"
    assert "interrupted after step 2;" in train_until(config, run, "one", 2)
    for ranks, layout, step in ((2, "fsdp", 3), (2, "pp,virtual=2", 4), (4, "pp:2,fsdp:2", 5), (2, "tp", 6), (2, "ddp", 7)):
        compared = world.run(ranks, go_on_until, config, run, layout, step, grouped=False)
        assert {name for names in compared for name in names} == tensors_of(run).keys()
    assert set(go_on_until(config, run, "one", None)) == tensors_of(run).keys()
    assert_close(run, tmp_path / "whole", 4e-6, 1e-4)
    log = (run / "log.txt").read_text()
    assert all(f"continuing after step {step}\n" in log for step in range(2, 8))
    assert "parallel was one process and is fsdp:2 on 2 processes: the last bits of the losses may differ" in log


def interrupt_and_go_on(jobs: list[tuple[RunConfig, Path, str]], number: int, rank: int) -> list[str]:
    found = []
    for config, run, layout in jobs:
        found.append(train_until(config, run, layout, 5, number, rank))
        trained(config, run, layout)
        trained(config, run.with_name(f"{run.name} whole"), layout)
    return found


@pytest.mark.parametrize(
    ("number", "rank", "layouts"),
    [(signal.SIGINT, 1, ("ddp", "pp,virtual=2", "tp")), (signal.SIGTERM, 0, ("fsdp",)), (signal.SIGTERM, -1, ("pp",))],
)
def test_a_signal_to_one_process_stops_all_and_they_go_on_bit_for_bit(
    tmp_path: Path, data: Path, world: World, number: int, rank: int, layouts: tuple[str, ...]
) -> None:
    jobs = [(tiny(data), tmp_path / layout, layout) for layout in layouts]
    for said in world.run(2, interrupt_and_go_on, jobs, number, rank, grouped=False):
        assert all("interrupted after step 5; run the same command again" in text for text in said)
    for _, run, _ in jobs:
        assert "continuing after step 5\n" in (run / "log.txt").read_text()
        assert_identical(run, run.with_name(f"{run.name} whole"))


def interrupt_evaluations(config: RunConfig, run: Path) -> None:
    real, calls = loop.evaluate, 0

    def evaluate(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (1, 3) and os.environ["RANK"] == "1":  # that of step 4, which the second start does again, and that of step 8
            signal.raise_signal(signal.SIGTERM)
        return real(*arguments, **options)

    with mock.patch.object(loop, "evaluate", evaluate):
        for step in (4, 8):
            with pytest.raises(KeyboardInterrupt, match=f"interrupted after step {step};"):
                trained(config, run, "fsdp")
        trained(config, run, "fsdp")
    trained(config, run.with_name("whole"), "fsdp")


def test_an_interrupted_evaluation_is_caught_up_on(tmp_path: Path, data: Path, world: World) -> None:
    world.run(2, interrupt_evaluations, tiny(data), tmp_path / "run", grouped=False)
    assert_identical(tmp_path / "run", tmp_path / "whole")


def refused(config: RunConfig, run: Path, layout: str) -> tuple[int, str]:
    """The exit code and the sentence that a request or a failure ends with."""
    with pytest.raises(DepthrouteError) as caught:
        trained(config, run, layout)
    return caught.value.exit_code, str(caught.value)


def refuse_each(jobs: list[tuple[RunConfig, Path, str]]) -> list[tuple[int, str]]:
    return [refused(*job) for job in jobs]


def test_what_does_not_fit_is_refused_by_every_process_and_leaves_nothing(tmp_path: Path, data: Path, world: World) -> None:
    usual = tiny(data)
    cases = [
        (usual, "fsdp:3", "layout for 3 processes, and there are 2"),
        (tiny(data, sequences=7), "ddp", "train.sequences = 7 does not divide"),
        (tiny(data, {"heads": 1}), "tp", "model.heads = 1 cannot be shared"),
        (usual, "pp,virtual=4", "8 chunks .* need as many layers"),
        (usual, "pp,microbatch=3", "microbatch=3 does not divide"),
        (tiny(data, {"residual": parse_residual(INSIDE)}), "tp", "looks inside sub-layers"),
        (usual, "one", "torchrun started 2 processes; say how they share the run"),
        (tiny(data, {"vocabulary": 299}), "fsdp", "model.vocabulary is 299"),
    ]
    found = world.run(2, refuse_each, [(config, tmp_path / "run", layout) for config, layout, _ in cases], grouped=False)
    for (_, _, wanted), *said in zip(cases, *found, strict=True):
        for code, text in said:
            assert code == 2
            with pytest.raises(RequestError, match=wanted):
                raise RequestError(text)
    assert not (tmp_path / "run").exists()
    with pytest.raises(RequestError, match="--parallel fsdp needs several processes: torchrun"):
        trained(usual, tmp_path / "run", "fsdp")
    assert not (tmp_path / "run").exists()


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(RequestError, match="started 2 processes on this machine, and it has 1 GPUs"), joined(Layout(fsdp=2), "cuda"):
        pass


def test_processes_that_start_again_do_not_meet_those_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun keeps what the last ones have left in its store, and says how often it has started them again."""
    names = []
    for restarts in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        times = itertools.count()
        names += [_meeting(times), _meeting(times)]
    assert len(set(names)) == 4


def test_a_rank_without_a_world_is_none(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")  # what some schedulers leave in the environment of every job
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    trained(tiny(data, steps=1, milestones=()), tmp_path / "run", "one")
    assert (tmp_path / "run" / "result.json").exists()


def refused_here_and_there(config: RunConfig, run: Path, other: Path) -> list[tuple[int, str]]:
    found = [refused(tiny(Path(config.data), seed=1), run, "fsdp"), refused(config, other, "fsdp")]
    with RunFolder(run).claimed(config, {}) if os.environ["RANK"] == "0" else contextlib.nullcontext():
        found.append(refused(config, run, "fsdp"))
    return found


def test_what_the_first_process_refuses_all_refuse(tmp_path: Path, data: Path, world: World) -> None:
    config = tiny(data)
    run, other = tmp_path / "run", tmp_path / "other"
    assert train_until(config, run, "one", 2)
    config = loop.resolve(config, loop.recorded_config(run))
    other.mkdir()
    (other / "letter.txt").write_text("not a run")
    for said in world.run(2, refused_here_and_there, config, run, other, grouped=False):
        assert [code for code, _ in said] == [2, 2, 2]
        assert "holds a run with train.seed = 0, not 1" in said[0][1]
        assert f"{other} is not a run folder (it holds 'letter.txt')" in said[1][1]
        assert "another process is training in" in said[2][1]


def fail_at_evaluation(config: RunConfig, run: Path) -> tuple[int, str]:
    full = mock.patch.object(RunFolder, "add_evaluation", side_effect=FailureError("the disk is full while writing gloo"))
    with full if os.environ["RANK"] == "0" else contextlib.nullcontext():
        return refused(config, run, "pp")


def test_a_failure_of_the_first_process_alone_is_told_to_the_others(tmp_path: Path, data: Path, world: World) -> None:
    for code, text in world.run(2, fail_at_evaluation, tiny(data), tmp_path / "run", grouped=False):
        assert (code, text) == (1, "the disk is full while writing gloo")
    world.run(2, trained, tiny(data), tmp_path / "run", "tp", grouped=False)
    assert "continuing after step 3\n" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.parametrize("layout", ["pp", "fsdp"])
def test_a_loss_that_is_not_finite_ends_all_with_the_same_sentence(tmp_path: Path, data: Path, world: World, layout: str) -> None:
    config = tiny(data, learning_rate=1e30, gradient_clip=None)
    first, second = world.run(2, refused, config, tmp_path / "run", layout, grouped=False)
    assert first == second
    assert first[0] == 1 and "the step was not taken, and the last checkpoint is that of step 0. Lower train.learning_rate" in first[1]


def train_watched(config: RunConfig, run: Path) -> tuple[str, list[Any]]:
    """What is printed, and the sinks that are asked for."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), mock.patch.object(loop, "check_sinks", tuple), mock.patch.object(loop, "Sinks") as sinks:
        train(config, run, sinks=["tensorboard"], layout=parse_layout("ddp"))
        train(config, run, sinks=["tensorboard"], layout=parse_layout("ddp"))  # it is complete, and the sink catches up
    return printed.getvalue(), [call.args[0] for call in sinks.call_args_list]


def test_the_first_process_alone_prints_and_has_sinks(tmp_path: Path, data: Path, world: World) -> None:
    first, second = world.run(2, train_watched, tiny(data), tmp_path / "run", grouped=False)
    assert "complete: validation NLL" in first[0] and "step 4/8" in first[0] and first[1] == [("tensorboard",), ("tensorboard",)]
    assert second == ("", [()])


def test_shards_become_whole_files_and_the_trained_model(
    tmp_path: Path, data: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    world.run(2, trained, tiny(data, keep_checkpoints=(4,), checkpoint_every=1), run, "pp,virtual=2", grouped=False)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000004", "step-00000008"]
    saved, (_, before) = tensors_of(run), load_trained(run)
    assert main(["gather", str(run)]) == 0
    assert "step-00000008: model.safetensors and optimizer.safetensors in place of its shards" in capsys.readouterr().out
    assert (run / "checkpoints/step-00000008/model.safetensors").exists()
    _, after = load_trained(run)
    for name, tensor in after.state_dict().items():
        assert torch.equal(tensor, before.state_dict()[name])
    for name, parameter in after.named_parameters():
        assert torch.equal(parameter, saved[name])
    assert tensors_of(run).keys() == saved.keys() and all(torch.equal(tensor, saved[name]) for name, tensor in tensors_of(run).items())


def test_a_branch_starts_from_a_trunk_with_shards(tmp_path: Path, data: Path, world: World) -> None:
    shared = {"schedule": "wsd", "warmup_fraction": None, "warmup_steps": 2, "decay_fraction": 0.25, "checkpoint_every": 0}
    trunk, branch = tiny(data, steps=12, keep_checkpoints=(4,), **shared), tiny(data, **shared)
    world.run(2, trained, trunk, tmp_path / "trunk", "fsdp", grouped=False)
    trained(branch, tmp_path / "alone", "one")
    for layout in ("one", "pp"):
        assert branch_run(branch, tmp_path / layout, tmp_path / "trunk") == 4
        if layout == "one":
            trained(branch, tmp_path / layout, layout)
        else:
            world.run(2, trained, branch, tmp_path / layout, layout, grouped=False)
        assert_close(tmp_path / layout, tmp_path / "alone", 2e-6)


def save_slowly(config: RunConfig, run: Path) -> int:
    """Every checkpoint takes longer than the steps between two; how many threads are left that write one."""
    real = checkpoints.write_state

    def slow(*arguments: Any) -> None:
        time.sleep(0.3)
        real(*arguments)

    with mock.patch.object(checkpoints, "write_state", slow):
        trained(config, run, "fsdp")
    return sum(thread.name.startswith("checkpoint") and thread.is_alive() for thread in threading.enumerate())


def test_a_checkpoint_waits_for_the_one_before(tmp_path: Path, data: Path, world: World) -> None:
    run = tmp_path / "run"
    world.run(2, save_slowly, tiny(data, checkpoint_every=2, keep_checkpoints=(3, 4)), run, grouped=False)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000003", "step-00000004", "step-00000008"]
    assert len(lines(run, "metrics.jsonl")) == 8


def fail_to_save(config: RunConfig, run: Path) -> tuple[int, str]:
    with mock.patch.object(checkpoints, "write_state", side_effect=OSError(errno.ENOSPC, "No space left on device")):
        return refused(config, run, "ddp")


def test_a_full_disk_during_a_checkpoint_ends_all_with_its_sentence(tmp_path: Path, data: Path, world: World) -> None:
    run = tmp_path / "run"
    for code, text in world.run(2, fail_to_save, tiny(data), run, grouped=False):
        assert code == 1 and "the disk is full" in text
    assert list((run / "checkpoints").iterdir()) == []
    world.run(2, trained, tiny(data), run, "ddp", grouped=False)
