"""The split of the cores among cells: what is tried, what is chosen, and where it is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from depthroute.common.errors import FailureError, RequestError
from depthroute.common.files import read_json
from depthroute.study import split
from depthroute.study.design import Study
from depthroute.study.pace import Pace, measure_pace
from depthroute.study.plan import read_plan
from depthroute.study.runner import plan_study, run_study
from depthroute.study.split import flops_per_token, read_machine, splits, with_threads
from depthroute.train import RunConfig, resolve

ROOM = 1 << 40


def opened(study: Study) -> Study:
    """The study with train.threads open, in one arm as a whole configuration and in the other as a change of the base."""
    base = dataclasses.replace(study.base, train=dataclasses.replace(study.base.train, threads=None))
    return dataclasses.replace(study, base=base, arms={**study.arms, "plain": dataclasses.replace(study.arms["plain"], config=base)})


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RunConfig, int, int]]:
    """What would have been measured, on a machine whose cores together are fastest two by two."""
    found: list[tuple[RunConfig, int, int]] = []

    def measure(config: RunConfig, *, workers: int, threads: int) -> Pace:
        found.append((config, workers, threads))
        return Pace(workers=workers, threads=threads, tokens_per_second=100.0 - abs(threads - 2), memory_bytes=1)

    monkeypatch.setattr(split, "measure_pace", measure)
    return found


def test_powers_of_two_up_to_one_thread_each_and_no_more_than_cells() -> None:
    assert splits(8, 100) == [(1, 8), (2, 4), (4, 2), (8, 1)]
    assert splits(6, 100) == [(1, 6), (2, 3), (4, 1), (6, 1)]
    assert splits(8, 3) == [(1, 8), (2, 4)]
    assert splits(1, 5) == [(1, 1)]


def test_the_fastest_split_is_chosen_and_written_down(study: Study, tmp_path: Path, tried: list[tuple[RunConfig, int, int]]) -> None:
    said: list[str] = []
    chosen = with_threads(opened(study), tmp_path, cores=4, memory_bytes=ROOM, report=said.append)
    assert [(workers, threads) for _, workers, threads in tried] == [(1, 4), (2, 2), (4, 1)]
    assert {name: chosen.config_of(name).train.threads for name in chosen.arms} == {"plain": 2, "block": 2}
    assert said == ["trying how to split 4 cores among cells, with a few steps of plain", "2 at a time with 2 threads each"]
    machine = read_json(tmp_path / "machine.json")
    assert machine == read_machine(tmp_path)
    assert (machine["workers"], machine["threads"], machine["tokens_per_second"], machine["arm"]) == (2, 2, 100.0, "plain")
    assert [entry["threads"] for entry in machine["measured"]] == [4, 2, 1]
    assert machine["flops_per_token"] == flops_per_token(resolve(study.config_of("plain")))
    assert machine["packages"]["torch"]


def test_a_split_that_memory_does_not_allow_is_not_tried(study: Study, tmp_path: Path, tried: list[tuple[RunConfig, int, int]]) -> None:
    with_threads(opened(study), tmp_path, cores=4, memory_bytes=1_300_000_000)
    assert [(workers, threads) for _, workers, threads in tried] == [(1, 4), (2, 2)]


def test_the_arm_of_median_cost_is_tried(study: Study, tmp_path: Path, tried: list[tuple[RunConfig, int, int]]) -> None:
    def wider(factor: int) -> Callable[[RunConfig], RunConfig]:
        return lambda base: dataclasses.replace(base, model=dataclasses.replace(base.model, width=factor * base.model.width))

    given = opened(study)
    arms = {f"w{factor}": dataclasses.replace(given.arms["plain"], config=wider(factor)) for factor in (8, 1, 4, 2)}
    with_threads(dataclasses.replace(given, arms={**given.arms, **arms}, seeds=(1,)), tmp_path, cores=1, memory_bytes=ROOM)
    assert tried[0][0].model.width == 8  # plain, block and w1 cost least of six, and the third of them is the lower median
    assert tried[0][0].train.precision == "float32"


def test_set_threads_are_left_and_nothing_is_measured(study: Study, tmp_path: Path, tried: list[tuple[RunConfig, int, int]]) -> None:
    assert with_threads(study, tmp_path) is study
    assert tried == []
    assert read_machine(tmp_path) is None


@pytest.mark.usefixtures("fake_worker")
def test_a_study_goes_on_with_the_threads_of_its_plan(
    study: Study, tmp_path: Path, tried: list[tuple[RunConfig, int, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    given = opened(study)
    statistics = run_study(given, tmp_path, workers=None, cores=4, memory_bytes=ROOM)
    assert statistics["missing"] == []
    plan = read_plan(tmp_path)
    assert [arm["config"]["train"]["threads"] for arm in plan["arms"]] == [2, 2]
    assert "2 at a time with 2 threads each" in capsys.readouterr().out
    assert run_study(given, tmp_path, workers=None, cores=1, memory_bytes=ROOM, console=False) == statistics
    arms = {**given.arms, "third": given.arms["block"]}
    grown = dataclasses.replace(given, arms=arms, comparisons=(("block", "plain"), ("third", "plain")))
    run_study(grown, tmp_path, workers=None, cores=1, memory_bytes=ROOM, extend=True, console=False)
    assert [arm["config"]["train"]["threads"] for arm in read_plan(tmp_path)["arms"]] == [2, 2, 2]
    assert len(tried) == 3


def test_threads_that_were_measured_hold_whatever_the_number_of_workers(
    study: Study, tmp_path: Path, fake_worker: None, tried: list[tuple[RunConfig, int, int]]
) -> None:
    """The number of workers is no part of a plan: another one must find the plan that is there."""
    given = opened(study)
    plan = plan_study(given, tmp_path, workers=None, cores=4, memory_bytes=ROOM, console=False)
    assert run_study(given, tmp_path, workers=1, memory_bytes=ROOM, console=False)["missing"] == []
    assert read_plan(tmp_path) == plan and plan["arms"][0]["config"]["train"]["threads"] == 2


def test_no_plan_is_left_behind_that_could_not_be_run(study: Study, tmp_path: Path, fake_worker: None) -> None:
    """The advice is to set train.threads, which makes it another plan."""
    for begin in (plan_study, run_study):
        with pytest.raises(RequestError, match=r"workers = 2 needs train\.threads in the plan"):
            begin(opened(study), tmp_path, workers=2, memory_bytes=ROOM, console=False)
        assert not (tmp_path / "plan.json").exists()
    assert run_study(study, tmp_path, workers=2, memory_bytes=ROOM, console=False)["missing"] == []


def test_a_plan_without_threads_stays_so(study: Study, tmp_path: Path, fake_worker: None, tried: list[tuple[RunConfig, int, int]]) -> None:
    given = opened(study)
    run_study(given, tmp_path, workers=1, memory_bytes=ROOM, console=False)
    assert run_study(given, tmp_path, workers=None, memory_bytes=ROOM, console=False)["missing"] == []
    assert [arm["config"]["train"]["threads"] for arm in read_plan(tmp_path)["arms"]] == [None, None]
    assert tried == []


def test_processes_train_at_the_same_time_and_say_how_fast(study: Study) -> None:
    config = resolve(study.config_of("block"))
    pace = measure_pace(config, workers=2, threads=1, seconds=0.2)
    assert (pace.workers, pace.threads) == (2, 1)
    assert pace.tokens_per_second > 2 * 2 * config.tokens_per_step / 60  # two steps each, in less than a minute
    assert pace.memory_bytes > 50 << 20


def test_a_measurement_that_fails_says_why(study: Study) -> None:
    config = dataclasses.replace(resolve(study.config_of("plain")), model=dataclasses.replace(study.base.model, width=10**9, heads=1))
    with pytest.raises(FailureError, match="the speed of this machine could not be measured: "):
        measure_pace(config, workers=1, threads=1, seconds=0.1)
