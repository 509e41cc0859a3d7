"""What cells are taken to need, and what a machine is taken to have."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from depthroute.common.errors import RequestError
from depthroute.study import budget
from depthroute.study.budget import Budget, Need, available_memory, estimated_memory, need_of, size_in_bytes
from depthroute.study.plan import Study, write_plan
from depthroute.train import resolve


def need(threads: int, memory: int) -> Need:
    return Need(threads=threads, memory_bytes=memory, measured=False, cuda=False)


def test_a_cell_needs_its_threads_and_what_another_seed_of_its_arm_took(study: Study, fake: SimpleNamespace, tmp_path: Path) -> None:
    plan = write_plan(study, tmp_path)
    before = need_of(tmp_path, plan, "block")
    assert (before.threads, before.measured) == (1, False)
    fake.write_run(tmp_path, "block", 3)
    path = tmp_path / "runs/block/seed-3/result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "peak_memory_bytes": 10**9}))
    after = need_of(tmp_path, plan, "block")
    assert after == Need(threads=1, memory_bytes=1_050_000_000, measured=True, cuda=False)
    assert need_of(tmp_path, plan, "plain") == dataclasses.replace(before, memory_bytes=need_of(tmp_path, plan, "plain").memory_bytes)


def test_the_estimate_grows_with_parameters_and_microbatch(study: Study) -> None:
    config = resolve(study.config_of("plain"))
    small = estimated_memory(config)
    assert small >= budget.PROCESS_BYTES + 16 * 300 * 8
    wide = dataclasses.replace(config, model=dataclasses.replace(config.model, vocabulary=100_300))
    assert estimated_memory(wide) - small == 16 * 100_000 * 8
    doubled = dataclasses.replace(config, train=dataclasses.replace(config.train, sequences=4, microbatch=4))
    halves = dataclasses.replace(doubled, train=dataclasses.replace(doubled.train, microbatch=2))
    assert estimated_memory(doubled) > estimated_memory(halves) == small


def test_cells_share_cores_and_memory() -> None:
    machine = Budget(cores=4, memory_bytes=100)
    assert machine.fits(need(2, 40), [need(2, 60)])
    assert not machine.fits(need(2, 41), [need(2, 60)])
    assert not machine.fits(need(3, 1), [need(2, 1)])
    with pytest.raises(RequestError, match="cores = 0 is not allowed"):
        Budget(cores=0, memory_bytes=1)


def write_group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_control_groups_limit_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, root = tmp_path / "cgroup", tmp_path / "sys"
    groups.write_text("0::/user/job\n")
    write_group(root / "user/job", memory__max="max\n", memory__current="70\n")
    write_group(root / "user", memory__max="1000\n", memory__current="300\n", memory__stat="anon 100\ninactive_file 200\n")
    assert budget._group_limits(groups, root) == [(1000, 100)]  # files that can be dropped do not count
    groups.write_text("4:cpu,memory:/job\n1:cpuset:/\n")
    write_group(root / "memory", memory__limit_in_bytes="9223372036854771712\n", memory__usage_in_bytes="5\n")
    used = {"memory__limit_in_bytes": "500\n", "memory__usage_in_bytes": "450\n", "memory__stat": "total_inactive_file 20\n"}
    write_group(root / "memory/job", **used)
    assert budget._group_limits(groups, root) == [(500, 430)]
    assert budget._group_limits(tmp_path / "none", root) == []
    monkeypatch.setattr(budget, "_group_limits", lambda: [(500, 430)])
    assert available_memory() == 70
    monkeypatch.setattr(budget, "_group_limits", list)
    assert available_memory() > 2**20


@pytest.mark.parametrize(("text", "size"), [("12G", 12 * 2**30), ("1.5G", 3 * 2**29), ("800mb", 800 * 2**20), ("77", 77)])
def test_sizes_as_a_person_writes_them(text: str, size: int) -> None:
    assert size_in_bytes(text) == size


def test_a_size_that_is_none_is_refused() -> None:
    with pytest.raises(RequestError, match="'much' is no size of memory"):
        size_in_bytes("much")
