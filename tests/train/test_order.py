"""A run that read its first batches in another order than this version's does not go on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from depthroute.common.errors import FailureError, RequestError
from depthroute.common.files import read_json, write_json
from depthroute.data.loader import Batch, Loader
from depthroute.train import RunConfig, branch_run, checkpoint, train

Config = Callable[..., RunConfig]


def crash(self: Loader, step: int) -> Batch:
    if step == 5:
        raise FailureError("killed")
    return read(self, step)


read = Loader.batch_at


def begun_by_another_version(run: Path, order: str | None) -> None:
    """Give a run's last checkpoint another order, or that of before orders were recorded."""
    found = checkpoint.latest(run)
    assert found is not None
    state = read_json(found / "state.json")
    assert state.pop("order") == "feistel-1"
    write_json(found / "state.json", state if order is None else {"order": order, **state})


def contents(run: Path) -> dict[str, bytes]:
    names = ("config.json", "metrics.jsonl", "evaluations.jsonl", "checkpoints/step-00000003/model.safetensors")
    return {name: (run / name).read_bytes() for name in names if (run / name).exists()}


@pytest.mark.parametrize(("order", "said"), [(None, "none is recorded"), ("feistel-0", "feistel-0")])
def test_an_unfinished_run_of_another_order_is_refused(
    order: str | None, said: str, tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Loader, "batch_at", crash)
        with pytest.raises(FailureError, match="killed"):
            train(config(), run, console=False)
    shutil.copytree(run, tmp_path / "same")
    begun_by_another_version(run, order)
    before = contents(run)
    words = rf"step-00000003 was begun with another order of batches .*\({said}, not feistel-1\).* new folder"
    with pytest.raises(RequestError, match=words):
        train(config(), run, console=False)
    assert contents(run) == before
    assert train(config(), tmp_path / "same", console=False)["nll"] == train(config(), tmp_path / "whole", console=False)["nll"]


@pytest.mark.parametrize("order", [None, "feistel-0"])
def test_a_run_that_reads_no_more_batches_can_still_be_evaluated(order: str | None, tmp_path: Path, config: Config) -> None:
    result = train(config(steps=3), tmp_path, console=False)
    assert result["order"] == "feistel-1"
    for name in ("result.json", "evaluations.jsonl"):
        (tmp_path / name).unlink()
    begun_by_another_version(tmp_path, order)
    again = train(config(steps=3), tmp_path, console=False)
    assert again["nll"] == result["nll"] and again["order"] == order  # that of its steps, not this version's


def test_no_branch_starts_from_a_trunk_of_another_order(tmp_path: Path, config: Config) -> None:
    settings = {"schedule": "wsd", "warmup_fraction": None, "warmup_steps": 1, "decay_fraction": 0.0}
    train(config(steps=3, **settings), tmp_path / "trunk", console=False)
    begun_by_another_version(tmp_path / "trunk", None)
    with pytest.raises(RequestError, match="step-00000003 was begun with another order of batches"):
        branch_run(config(steps=5, **settings), tmp_path / "run", tmp_path / "trunk")
    assert not (tmp_path / "run").exists()
