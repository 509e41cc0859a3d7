"""What reads a run reads one whose checkpoints are in shards, and `depthroute gather` makes whole files of them."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, distributed

from depthroute.cli.main import main
from depthroute.common.errors import FailureError, RequestError
from depthroute.common.files import read_json, write_json
from depthroute.model import Decoder, ModelConfig
from depthroute.residual import parse_residual
from depthroute.train import RunConfig, branch_run, load_trained, sharded, train
from depthroute.train import checkpoint as checkpoints
from depthroute.train.optimiser import build_optimiser

Config = Callable[..., RunConfig]

pytestmark = pytest.mark.skipif(not distributed.is_gloo_available(), reason="torch has no gloo")


def to_shards(checkpoint: Path) -> Path:
    """A plain checkpoint of a run as the sharded form of it that one rank writes."""
    state = checkpoints.verify(checkpoint)
    model, optimiser = (load_file(checkpoint / name) for name in (checkpoints.MODEL, checkpoints.OPTIMISER))
    rest = {name: value for name, value in state.items() if name not in ("format", "step", "files")}
    shutil.rmtree(checkpoint)
    others = [int(path.name.removeprefix("step-")) for path in checkpoint.parent.iterdir()]
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        sharded.save(checkpoint.parents[1], state["step"], model | optimiser, rest, model=model, keep=others).wait()
    finally:
        distributed.destroy_process_group()
    return checkpoint


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, config: Config) -> Path:
    """A complete run of a routed model, with the checkpoints of steps 6 and 12."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train(config(model={"residual": parse_residual("rd:2"), "tied_embeddings": True}, keep_checkpoints=(6,)), run, console=False)
    return run


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """The same run, with both checkpoints in shards."""
    found = Path(shutil.copytree(whole, tmp_path / "run"))
    for checkpoint in sorted((found / "checkpoints").iterdir()):
        to_shards(checkpoint)
    return found


def parameters(run: Path) -> dict[str, Tensor]:
    return checkpoints.model_tensors(load_trained(run)[1])


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_a_model_opens_from_shards(whole: Path, run: Path) -> None:
    latest = checkpoints.latest(run)
    assert latest is not None and checkpoints.is_sharded(checkpoints.verify(latest)) and not (latest / checkpoints.MODEL).exists()
    assert same(parameters(run), parameters(whole))
    earlier = run / "checkpoints" / "step-00000006"
    assert same(parameters(earlier), parameters(whole / "checkpoints" / "step-00000006")) and not same(parameters(earlier), parameters(run))
    assert checkpoints.model_sha256(latest) == checkpoints.model_sha256(whole / "checkpoints" / latest.name)


def test_training_goes_on_from_shards_to_the_same_end(whole: Path, run: Path) -> None:
    (run / "result.json").unlink()
    shutil.rmtree(run / "checkpoints" / "step-00000012")
    settings, _ = load_trained(run)
    assert train(settings, run, console=False)["nll"] == read_json(whole / "result.json")["nll"]
    assert same(parameters(run), parameters(whole))
    assert not checkpoints.is_sharded(checkpoints.verify(run / "checkpoints" / "step-00000012"))
    assert checkpoints.is_sharded(checkpoints.verify(run / "checkpoints" / "step-00000006"))


def test_a_branch_starts_from_shards(whole: Path, run: Path, tmp_path: Path) -> None:
    settings, _ = load_trained(run)
    assert branch_run(settings, tmp_path / "branch", run) == branch_run(settings, tmp_path / "other", whole)
    assert same(parameters(tmp_path / "branch"), parameters(tmp_path / "other"))


def test_shards_that_do_not_fit_are_refused_by_name(run: Path, shape: Callable[..., ModelConfig]) -> None:
    found = checkpoints.latest(run)
    assert found is not None
    fitting = {"residual": parse_residual("rd:2"), "tied_embeddings": True}
    with pytest.raises(FailureError, match=r"\[300, 16\] there and \[300, 32\] in the model"):
        checkpoints.load_model(found, Decoder(shape(width=32, **fitting)))
    with pytest.raises(FailureError, match=r"one of model and checkpoint has 'head.*the checkpoint does not"):
        checkpoints.load_model(found, Decoder(shape(**fitting | {"tied_embeddings": False})))
    settings, model = load_trained(run)
    state = read_json(found / "state.json")
    write_json(found / "state.json", {**state, "model": state["model"][1:]})
    with pytest.raises(FailureError, match=f"one of model and checkpoint has '{state['model'][0]}'"):
        checkpoints.load(found, model, build_optimiser(model, settings.train))
    write_json(found / "state.json", {**state, "model": [*state["model"], "more"]})
    with pytest.raises(FailureError, match="no shard has 'more'"):
        checkpoints.load_model(found, model)


@pytest.mark.parametrize(
    "change", [{"form": "other"}, {"files": {}}, {"model": None}, {"files": {"../config.json": {"bytes": 1, "sha256": ""}}}, {"format": 2}]
)
def test_a_state_that_was_changed_by_hand_is_refused(run: Path, change: dict[str, object]) -> None:
    found = checkpoints.latest(run)
    assert found is not None
    write_json(found / "state.json", read_json(found / "state.json") | change)
    with pytest.raises(FailureError, match=r"step-00000012 cannot be used: (state.json was cut|its form is|its format is)"):
        checkpoints.verify(found)
    with pytest.raises(FailureError, match="step-00000012 cannot be used"):
        sharded.load(found, lambda _: {})


def test_one_file_of_weights_is_pointed_to_gather(whole: Path, run: Path) -> None:
    found = whole / "checkpoints" / "step-00000012"
    assert checkpoints.model_file(found) == found / checkpoints.MODEL
    with pytest.raises(RequestError, match=r"step-00000012 is in shards.*depthroute gather .*step-00000012"):
        checkpoints.model_file(run / "checkpoints" / "step-00000012")


def test_gather_makes_the_files_of_a_plain_run(whole: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    earlier, latest = sorted((run / "checkpoints").iterdir())
    assert main(["gather", str(earlier)]) == 0
    assert capsys.readouterr().out == f"{earlier}: model.safetensors and optimizer.safetensors in place of its shards\n"
    assert main(["gather", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"gathered": [str(latest)], "whole_before": [str(earlier)]}
    assert main(["gather", str(run)]) == 0
    assert capsys.readouterr().out == f"{run}: nothing to do, no checkpoint has shards\n"
    for checkpoint in (earlier, latest):
        there = whole / "checkpoints" / checkpoint.name
        assert sorted(path.name for path in checkpoint.iterdir()) == sorted(path.name for path in there.iterdir())
        for path in there.iterdir():
            assert (checkpoint / path.name).read_bytes() == path.read_bytes()


def test_gather_removes_what_kills_left_and_nothing_that_is_the_users_own(run: Path) -> None:
    own = ("ema.safetensors", "model.safetensors.old", "shards.safetensors", "notes.txt", ".state.jsonl")
    left = ("shard-00002-model-00001-of-00001.safetensors", ".state.json.x7f3k2")
    earlier, latest = sorted((run / "checkpoints").iterdir())
    sharded.consolidate(earlier)
    for checkpoint in (earlier, latest):
        for name in own + left:
            (checkpoint / name).write_text(name)
    (latest / "optimizer.safetensors").write_text("half of it")
    assert sharded.gather(run) == {earlier: False, latest: True}
    for checkpoint in (earlier, latest):
        made = ("model.safetensors", "optimizer.safetensors", "state.json")
        assert sorted(path.name for path in checkpoint.iterdir()) == sorted(own + made)
        assert all((checkpoint / name).read_text() == name for name in own)
        checkpoints.verify(checkpoint)


def test_gather_refuses_what_is_no_run_and_a_run_in_training(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path, tmp_path / "nothing", run / "checkpoints" / "step-00000001"):
        assert main(["gather", str(path)]) == 2
        assert f"{path} is neither a run folder nor a checkpoint folder" in capsys.readouterr().err
    with (run / "log.txt").open("a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        assert main(["gather", str(run)]) == 2
    assert "another process is training in" in capsys.readouterr().err
    shutil.rmtree(run / "checkpoints")
    assert main(["gather", str(run)]) == 0
    assert capsys.readouterr().out == f"{run}: nothing to do, it has no checkpoint yet\n"


def test_shards_are_written_by_the_ranks_of_a_group(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="ranks of a process group"):
        sharded.save(tmp_path, 1, {}, {}, model=())
