"""A checkpoint is there and whole, or it is refused by name."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from depthroute.common.errors import FailureError, RequestError
from depthroute.model import Decoder, ModelConfig
from depthroute.residual import parse_residual
from depthroute.train import RunConfig, load_trained, train
from depthroute.train import checkpoint as checkpoints
from depthroute.train.initialise import initialise
from depthroute.train.optimiser import Optimiser, build_optimiser

Config = Callable[..., RunConfig]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.zeros(2))


def stepped(config: RunConfig, seed: int = 0) -> tuple[Decoder, Optimiser]:
    """A model and an optimiser that has taken one step."""
    model = Decoder(config.model)
    initialise(model, seed)
    optimiser = build_optimiser(model, config.train)
    tokens = torch.arange(32).view(2, 16)
    model.loss(tokens, tokens).objective.backward()
    optimiser.step()
    return model, optimiser


@pytest.mark.parametrize("arm", ["prenorm", "rd:2", "full,rank=8,keys=projected"])
def test_model_and_optimiser_come_back_bit_for_bit(tmp_path: Path, config: Config, arm: str) -> None:
    settings = config(model={"residual": parse_residual(arm)})
    model, optimiser = stepped(settings)
    path = checkpoints.save(tmp_path, 1, model, optimiser, {"tokens": 32})
    other_model, other_optimiser = stepped(settings, seed=1)
    assert checkpoints.load(path, other_model, other_optimiser)["tokens"] == 32
    for ours, theirs in zip(model.parameters(), other_model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    same_state(optimiser.state_tensors(model.named_parameters()), other_optimiser.state_tensors(other_model.named_parameters()))


def test_only_the_newest_checkpoint_stays(tmp_path: Path, config: Config) -> None:
    model, optimiser = stepped(config())
    leftover = tmp_path / "checkpoints" / ".step-00000009.killed"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    assert checkpoints.latest(tmp_path) is None  # what a kill left half written does not count
    for step in (1, 2):
        checkpoints.save(tmp_path, step, model, optimiser, {})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


def test_checkpoints_to_keep_stay_beside_the_newest(tmp_path: Path, config: Config) -> None:
    model, optimiser = stepped(config())
    for step in range(1, 6):
        checkpoints.save(tmp_path, step, model, optimiser, {}, keep=(2, 4))
    found = sorted((tmp_path / "checkpoints").iterdir())
    assert [path.name for path in found] == ["step-00000002", "step-00000004", "step-00000005"]
    assert [checkpoints.verify(path)["step"] for path in found] == [2, 4, 5]


def test_a_run_writes_and_keeps_the_checkpoints_it_is_asked_for(tmp_path: Path, config: Config) -> None:
    train(config(keep_checkpoints=(4, 6)), tmp_path / "run", console=False)  # 4 is no multiple of checkpoint_every, 6 is
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-00000004", "step-00000006", "step-00000012"]


def test_a_checkpoint_of_before_loads_into_groups_with_another_rate(tmp_path: Path, config: Config) -> None:
    """States go by the name of the parameter, not by group."""
    arm = {"residual": parse_residual("rd:2")}
    model, optimiser = stepped(config(model=arm))
    path = checkpoints.save(tmp_path, 1, model, optimiser, {})
    other_model, other = stepped(config(model=arm, route_rate=2.0), seed=1)
    checkpoints.load(path, other_model, other)
    same_state(optimiser.state_tensors(model.named_parameters()), other.state_tensors(other_model.named_parameters()))
    assert [group["rate"] for group in other.param_groups] == [1.0, 1.0, 2.0]


def test_tied_tensors_are_saved_once_and_tied_after_loading(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    model.count += 5
    path = checkpoints.save(tmp_path, 1, model, Optimiser(torch.optim.AdamW(model.parameters())), {})
    assert sorted(load_file(path / "model.safetensors")) == ["count", "embedding.weight"]
    checkpoints.load(path, other, Optimiser(torch.optim.AdamW(other.parameters())))
    assert torch.equal(other.head.weight, model.embedding.weight) and torch.equal(other.count, model.count)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["truncated", "altered", "missing"])
def test_a_damaged_checkpoint_is_refused_by_name_with_what_to_do(tmp_path: Path, config: Config, name: str, damage: str) -> None:
    train(config(), tmp_path / "run", console=False)
    (tmp_path / "run" / "result.json").unlink()
    file = tmp_path / "run" / "checkpoints" / "step-00000012" / name
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(content[:-9] if damage == "truncated" else content.replace(content[-9:-8], b"\x07"))
    with pytest.raises(FailureError) as refusal:
        train(config(), tmp_path / "run", console=False)
    assert "step-00000012" in str(refusal.value) and name in str(refusal.value)
    assert "Delete that folder to start this run again from its first step." in str(refusal.value)


def test_deleting_the_refused_checkpoint_starts_the_run_again(tmp_path: Path, config: Config) -> None:
    first = train(config(), tmp_path / "run", console=False)
    (tmp_path / "run" / "result.json").unlink()
    path = tmp_path / "run" / "checkpoints" / "step-00000012"
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    again = train(config(), tmp_path / "run", console=False)
    assert again["nll"] == first["nll"]


def test_weights_that_do_not_fit_the_model_are_refused_by_name(tmp_path: Path, config: Config, shape: Callable[..., ModelConfig]) -> None:
    model, optimiser = stepped(config())
    path = checkpoints.save(tmp_path, 1, model, optimiser, {})
    with pytest.raises(FailureError, match=r"\[300, 16\] there and \[300, 32\] in the model"):
        checkpoints.load_model(path, Decoder(shape(width=32)))
    with pytest.raises(FailureError, match=r"'residual\.sites\..*the checkpoint does not"):
        checkpoints.load_model(path, Decoder(shape(residual=parse_residual("full"))))


def test_a_full_disk_leaves_the_old_checkpoint_usable(tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever synchronisation of a checkpoint fails, the run continues from the one before it to the same end."""
    whole = train(config(), tmp_path / "whole", console=False)
    real = os.fsync
    failed = 0
    for number in range(1, 40):
        calls = 0

        def full(handle: int, number: int = number) -> None:
            nonlocal calls
            calls += 1
            if calls == number:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(handle)

        monkeypatch.setattr(os, "fsync", full)
        run = tmp_path / f"run-{number}"
        try:
            train(config(), run, console=False)
        except FailureError as error:
            failed += 1
            assert "the disk is full" in str(error) and "free some space" in str(error)
        else:
            break
        finally:
            monkeypatch.setattr(os, "fsync", real)
        assert not [path for path in run.rglob(".step-*")]
        assert train(config(), run, console=False)["nll"] == whole["nll"]
        assert losses(run) == losses(tmp_path / "whole")
    assert failed > 20  # five files and folders for each of four checkpoints, and the rest of the run folder


def test_a_disk_that_fills_up_while_tensors_are_written_is_explained(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import SafetensorError

    def full(*arguments: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    model, optimiser = stepped(config())
    path = checkpoints.save(tmp_path, 1, model, optimiser, {})
    monkeypatch.setattr(checkpoints, "save_file", full)
    with pytest.raises(FailureError, match="the disk is full while writing"):
        checkpoints.save(tmp_path, 2, model, optimiser, {})
    assert checkpoints.latest(tmp_path) == path
    checkpoints.load(path, model, optimiser)


def test_a_trained_model_opens_from_its_run_folder(tmp_path: Path, config: Config) -> None:
    with pytest.raises(RequestError, match="is not a run folder"):
        load_trained(tmp_path)
    result = train(config(), tmp_path / "run", console=False)
    settings, model = load_trained(tmp_path / "run")
    assert settings.train.steps == result["step"]
    written = load_file(tmp_path / "run" / "checkpoints" / "step-00000012" / "model.safetensors")
    assert torch.equal(model.embedding.weight, written["embedding.weight"])


def same_state(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours and ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def losses(run: Path) -> list[str]:
    """The lines of metrics.jsonl without their timing."""
    return [line.partition(', "seconds"')[0] for line in (run / "metrics.jsonl").read_text().splitlines()]
