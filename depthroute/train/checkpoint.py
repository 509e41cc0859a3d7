"""Checkpoints of a run: there and whole, or not there.

RUN/checkpoints/step-00000500/ holds model.safetensors (every tensor once, tied ones under the first of their names),
optimizer.safetensors (`parameter.state`) and state.json with the sizes and hashes of both. A checkpoint is written into a temporary
folder beside its place, synchronised to the disk and renamed; older ones are removed only then, but for those that a run keeps.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from depthroute.common.errors import FailureError
from depthroute.common.files import explain_os_errors, new_folder, read_json, sha256_of, sync, write_json

FORMAT = 1
MODEL, OPTIMISER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"


def save(
    run: Path, step: int, model: nn.Module, optimiser: torch.optim.Optimizer, state: dict[str, Any], *, keep: Collection[int] = ()
) -> Path:
    """Write the checkpoint of `step` with `state` (JSON) in it, then remove the others, except those of the steps in `keep`.

    Raises:
        FailureError: the disk is full, or the folder cannot be written. The previous checkpoint is then untouched.
    """
    root, target = run / "checkpoints", folder(run, step)
    with explain_os_errors(target, "writing"):
        with new_folder(target) as temporary:
            _write_tensors(temporary / MODEL, model_tensors(model))
            _write_tensors(temporary / OPTIMISER, _optimiser_tensors(model, optimiser))
            write_state(temporary, {"format": FORMAT, "step": step, **state})
        _remove_others({target, *(folder(run, kept) for kept in keep)}, root)
    return target


def write_state(checkpoint: Path, state: dict[str, Any]) -> None:
    """Write the state of a checkpoint that has its weights and its optimiser, with the sizes and hashes of both."""
    files = {name: {"bytes": (checkpoint / name).stat().st_size, "sha256": sha256_of(checkpoint / name)} for name in (MODEL, OPTIMISER)}
    write_json(checkpoint / STATE, {**state, "files": files})


def folder(run: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies, if there is one."""
    return run / "checkpoints" / f"step-{step:08d}"


def copy(checkpoints: Collection[Path], run: Path) -> None:
    """Copy checkpoints into a run that has none, verified, all at once: a kill leaves all of them there or none.

    Raises:
        FailureError: the disk is full, or a copy is not what was written; the run has no checkpoint then.
    """
    root, temporary = run / "checkpoints", run / ".checkpoints"
    with explain_os_errors(root, "writing"):
        shutil.rmtree(temporary, ignore_errors=True)  # what a kill left
        temporary.mkdir()
        try:
            for source in checkpoints:
                target = temporary / source.name
                target.mkdir()
                for name in (MODEL, OPTIMISER, STATE):
                    shutil.copyfile(source / name, target / name)
                    sync(target / name)
                verify(target)
                sync(target)
            sync(temporary)
            if root.exists():
                shutil.rmtree(root)  # a kill during the first checkpoint left half of one there
            temporary.rename(root)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync(run)


def latest(run: Path) -> Path | None:
    """The checkpoint of the highest step, or None. What a crash left half written does not count."""
    found = _checkpoints(run / "checkpoints")
    return found[-1] if found else None


def load(checkpoint: Path, model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Any]:
    """Put a checkpoint's values into `model` and `optimiser`, in place; returns its state with `step`.

    Raises:
        FailureError: a file is missing, was cut short or altered, or does not fit the model, by name and with what to do.
    """
    state = verify(checkpoint)
    load_model(checkpoint, model)
    written = _read_tensors(checkpoint / OPTIMISER)
    named = optimiser.state_dict()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    slots: dict[int, dict[str, Tensor]] = {}
    for group, indexed in zip(optimiser.param_groups, named["param_groups"], strict=True):
        for parameter, index in zip(group["params"], indexed["params"], strict=True):
            prefix = f"{names[id(parameter)]}."
            slot = {key.removeprefix(prefix): written.pop(key) for key in list(written) if key.rpartition(".")[0] + "." == prefix}
            if slot:
                slots[index] = slot
    if written:
        raise _unusable(checkpoint, f"{OPTIMISER} has {next(iter(written))!r}, which the optimiser of this run does not")
    optimiser.load_state_dict({"state": slots, "param_groups": named["param_groups"]})
    return state


def load_model(checkpoint: Path, model: nn.Module) -> None:
    """Put a checkpoint's weights alone into `model`, in place. Raises FailureError where they do not fit it."""
    written = _read_tensors(checkpoint / MODEL)
    tensors = model_tensors(model)
    for name in tensors.keys() ^ written.keys():
        where = "the model does not" if name in written else "the checkpoint does not"
        raise _unusable(checkpoint, f"one of model and {MODEL} has {name!r}, which {where}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            if tensor.shape != written[name].shape:
                raise _unusable(checkpoint, f"{name!r} is {list(written[name].shape)} there and {list(tensor.shape)} in the model")
            tensor.copy_(written[name])


def verify(checkpoint: Path) -> dict[str, Any]:
    """The state of a checkpoint of which every file has the size and hash that were recorded; FailureError otherwise."""
    if not (checkpoint / STATE).exists():
        raise _unusable(checkpoint, f"{STATE} is missing")
    try:
        state: dict[str, Any] = read_json(checkpoint / STATE)
        recorded = {name: (state["files"][name]["bytes"], state["files"][name]["sha256"]) for name in (MODEL, OPTIMISER)}
        known = state["format"] == FORMAT and isinstance(state["step"], int)
    except (FailureError, KeyError, TypeError) as error:
        raise _unusable(checkpoint, f"{STATE} was cut short or changed by hand") from error
    if not known:
        raise _unusable(checkpoint, f"its format is {state['format']!r} and this version reads {FORMAT}")
    for name, (size, digest) in recorded.items():
        file = checkpoint / name
        if not file.exists():
            raise _unusable(checkpoint, f"{name} is missing")
        if file.stat().st_size != size:
            raise _unusable(checkpoint, f"{name} has {file.stat().st_size} bytes instead of {size}: it is truncated")
        if sha256_of(file) != digest:
            raise _unusable(checkpoint, f"{name} is not what was written (its SHA-256 differs)")
    return state


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers of `model` by name, tied ones once."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach()
    return tensors


def _optimiser_tensors(model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimiser.state.get(parameter, {}).items()
    }


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:
        if f"os error {errno.ENOSPC}" in str(error):  # the Rust side has no OSError
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise FailureError(f"{path} could not be written: {error}.") from error
    path.chmod(0o644)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        # cloned: the file is mapped, and the checkpoint is deleted once a newer one exists
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
    except (SafetensorError, FileNotFoundError) as error:
        raise _unusable(path.parent, f"{path.name} cannot be read ({error})") from error


def _unusable(checkpoint: Path, reason: str) -> FailureError:
    older = [path for path in _checkpoints(checkpoint.parent) if path < checkpoint]
    then = f"continue from {older[-1].name}" if older else "start this run again from its first step"
    return FailureError(f"the checkpoint {checkpoint} cannot be used: {reason}. Delete that folder to {then}.")


def _checkpoints(root: Path) -> list[Path]:
    return sorted(root.glob("step-*")) if root.exists() else []


def _remove_others(keep: Collection[Path], root: Path) -> None:
    for path in root.iterdir():
        if path in keep:
            continue
        if path.name.startswith("step-"):  # hidden first: removing takes time, and a half-removed one must not look whole
            path = path.rename(root / f".{path.name}.removed")
        if path.name.startswith(".step-"):
            shutil.rmtree(path)
