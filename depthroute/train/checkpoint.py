"""Checkpoints of a run: there and whole, or not there.

RUN/checkpoints/step-00000500/ holds model.safetensors (every tensor once, tied ones under the first of their names),
optimizer.safetensors (`parameter.state`) and state.json with the sizes and hashes of both. A checkpoint is written into a temporary
folder beside its place, synchronised to the disk and renamed; older ones are removed only then, but for those that a run keeps.

That is its plain form. The sharded form, which the ranks of a parallel run write (sharded.py), has the pieces of the same tensors in other
safetensors files; state.json says so, and names the tensors that are the model's. What reads a checkpoint here reads both.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from safetensors.torch import save as serialised
from torch import Tensor, nn

from depthroute.common.errors import FailureError, RequestError
from depthroute.common.files import explain_os_errors, new_folder, read_json, sha256_of, sync, write_json
from depthroute.data.order import ORDER
from depthroute.train.optimiser import Optimiser

if TYPE_CHECKING:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

FORMAT = 1
MODEL, OPTIMISER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
SHARDED = "sharded"

File = dict[str, Any]  # in state.json: "bytes" and "sha256"


def save(
    run: Path, step: int, model: nn.Module, optimiser: Optimiser, state: dict[str, Any], *, keep: Collection[int] = ()
) -> Path:
    """Write the checkpoint of `step` with `state` (JSON) in it, then remove the others, except those of the steps in `keep`.

    Raises:
        FailureError: the disk is full, or the folder cannot be written. The previous checkpoint is then untouched.
    """
    root, target = run / "checkpoints", folder(run, step)
    with explain_os_errors(target, "writing"):
        with new_folder(target) as temporary:
            write_tensors(temporary / MODEL, model_tensors(model))
            write_tensors(temporary / OPTIMISER, optimiser.state_tensors(model.named_parameters()))
            write_state(temporary, {"format": FORMAT, "step": step, **state})
        remove_others({target, *(folder(run, kept) for kept in keep)}, root)
    return target


def write_state(checkpoint: Path, state: dict[str, Any], files: Mapping[str, File] | None = None) -> None:
    """Write the state of a checkpoint that has its tensors, with the sizes and hashes of its files.

    Args:
        files: those of the sharded form, as the ranks that wrote them tell. None: the two of the plain form.

    Raises:
        FailureError: a file of `files` is not there, or has another size.
    """
    if files is None:
        files = {name: recorded(checkpoint / name) for name in (MODEL, OPTIMISER)}
    for name, entry in files.items():
        file = checkpoint / name
        size = file.stat().st_size if file.exists() else None
        if size != entry["bytes"]:
            here = "is not there" if size is None else f"has {size} bytes"
            raise FailureError(
                f"{file} {here} for the first rank and has {entry['bytes']} for the one that wrote it; run all ranks on one file system."
            )
    write_json(checkpoint / STATE, {**state, "files": {name: files[name] for name in sorted(files)}})


def recorded(file: Path) -> File:
    """What the state of a checkpoint says of one of its files."""
    return {"bytes": file.stat().st_size, "sha256": sha256_of(file)}


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
                for name in (*read_state(source)["files"], STATE):
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


def to_resume(run: Path, steps: int) -> Path | None:
    """The checkpoint that a run of `steps` steps goes on from, or None.

    Raises:
        RequestError: its steps read their batches in another order than the next ones would, which would show some windows twice.
        FailureError: its state is damaged.
    """
    found = latest(run)
    if found is not None:
        refuse_other_order(found, steps)
    return found


def refuse_other_order(checkpoint: Path, steps: int) -> None:
    """What `to_resume` refuses. Before the first step and after the last there is nothing left to refuse."""
    state = read_state(checkpoint)
    if 0 < state["step"] < steps and state.get("order") != ORDER:
        raise RequestError(
            f"{checkpoint} was begun with another order of batches than this version's ({state.get('order', 'none is recorded')}, not "
            f"{ORDER}), by an earlier version: it cannot go on with the same data in this one. Start the run in a new folder."
        )


def load(checkpoint: Path, model: nn.Module, optimiser: Optimiser) -> dict[str, Any]:
    """Put a checkpoint's values into `model` and `optimiser`, in place; returns its state with `step`.

    Raises:
        FailureError: a file is missing, was cut short or altered, or does not fit the model, by name and with what to do.
    """
    state = verify(checkpoint)
    load_model(checkpoint, model)
    written = _optimiser_tensors(checkpoint, state)
    try:
        tensors = optimiser.make_state(model.named_parameters(), written.keys())
        for name in written.keys() - tensors.keys():
            raise KeyError(name)
    except KeyError as error:
        where = "it" if is_sharded(state) else OPTIMISER
        raise unusable(checkpoint, f"{where} has {error.args[0]!r}, which the optimiser of this run does not") from error
    _fill(checkpoint, tensors, written, "optimiser")
    return state


def load_model(checkpoint: Path, model: nn.Module) -> None:
    """Put a checkpoint's weights alone into `model`, in place. Raises FailureError where they do not fit it."""
    state = read_state(checkpoint)
    written = read_model(checkpoint, state)
    tensors = model_tensors(model)
    for name in tensors.keys() ^ written.keys():
        where = "the model does not" if name in written else "the checkpoint does not"
        raise unusable(checkpoint, f"one of model and {'checkpoint' if is_sharded(state) else MODEL} has {name!r}, which {where}")
    _fill(checkpoint, tensors, written, "model")


def verify(checkpoint: Path) -> dict[str, Any]:
    """The state of a checkpoint of which every file has the size and hash that were recorded; FailureError otherwise."""
    state = read_state(checkpoint)
    for name, entry in state["files"].items():
        file, size = checkpoint / name, entry["bytes"]
        if not file.exists():
            raise unusable(checkpoint, f"{name} is missing")
        if file.stat().st_size != size:
            raise unusable(checkpoint, f"{name} has {file.stat().st_size} bytes instead of {size}: it is truncated")
        if sha256_of(file) != entry["sha256"]:
            raise unusable(checkpoint, f"{name} is not what was written (its SHA-256 differs)")
    return state


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The state of a checkpoint whose files may not be what it says; FailureError where it is not whole itself."""
    if not (checkpoint / STATE).exists():
        raise unusable(checkpoint, f"{STATE} is missing")
    try:
        state: dict[str, Any] = read_json(checkpoint / STATE)
        files = list(state["files"]) if state.get("form") == SHARDED else [MODEL, OPTIMISER]
        whole = all({"bytes", "sha256"} <= state["files"][name].keys() and Path(name).name == name for name in files)
        known = state["format"] == FORMAT and state.get("form", SHARDED) == SHARDED and isinstance(state["step"], int)
        whole &= not is_sharded(state) or (bool(files) and isinstance(state["model"], list))
    except (FailureError, AttributeError, KeyError, TypeError) as error:
        raise unusable(checkpoint, f"{STATE} was cut short or changed by hand") from error
    if not known:
        raise unusable(checkpoint, f"its format is {state['format']!r} and this version reads {FORMAT}")
    if not whole:
        raise unusable(checkpoint, f"{STATE} was cut short or changed by hand")
    return state


def is_sharded(state: dict[str, Any]) -> bool:
    """Whether a state is that of the sharded form."""
    return state.get("form") == SHARDED


def read_model(checkpoint: Path, state: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of the model in a checkpoint with that state, whole, by name."""
    return read_shards(checkpoint, state, state["model"]) if is_sharded(state) else _read_tensors(checkpoint / MODEL)


def model_sha256(checkpoint: Path) -> str:
    """The hash of model.safetensors in a checkpoint; of one in shards, that of the file which `sharded.consolidate` would make of them."""
    state = read_state(checkpoint)
    if is_sharded(state):
        return hashlib.sha256(serialised(read_model(checkpoint, state))).hexdigest()
    found: str = state["files"][MODEL]["sha256"]
    return found


def model_file(checkpoint: Path) -> Path:
    """model.safetensors of a checkpoint, for what reads it tensor by tensor; RequestError where there are shards instead."""
    if is_sharded(read_state(checkpoint)):
        raise RequestError(f"{checkpoint} is in shards, and one file is needed; `depthroute gather {checkpoint}` makes it.")
    return checkpoint / MODEL


def reader(checkpoint: Path, state: dict[str, Any]) -> HuggingFaceStorageReader:
    """What torch.distributed.checkpoint reads the files of a checkpoint with: those that its state names, of either form, and no others."""
    from torch.distributed.checkpoint.filesystem import FileSystem
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    class Recorded(FileSystem):
        def ls(self, path: str | os.PathLike[str]) -> list[str]:
            return [str(checkpoint / name) for name in state["files"]]

    found = HuggingFaceStorageReader(str(checkpoint))
    found.fs = Recorded()
    return found


def shapes(checkpoint: Path, state: dict[str, Any]) -> dict[str, torch.Size]:
    """The shape of every tensor in a checkpoint with that state, by name."""
    with _reading(checkpoint):
        return {name: entry.size for name, entry in _entries(reader(checkpoint, state)).items()}


def read_shards(checkpoint: Path, state: dict[str, Any], wanted: Collection[str]) -> dict[str, Tensor]:
    """The tensors `wanted` of a sharded checkpoint with that state, whole, by name."""
    from torch.distributed.checkpoint.state_dict_loader import load as load_in_place

    with _reading(checkpoint), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # even where that is asked for
        source = reader(checkpoint, state)
        there = _entries(source)
        for name in set(wanted) - there.keys():
            raise unusable(checkpoint, f"no shard has {name!r}, which is the model's by its {STATE}")
        tensors = {name: torch.empty(there[name].size, dtype=there[name].properties.dtype) for name in wanted}
        load_in_place(tensors, storage_reader=source, no_dist=True)
    return tensors


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers of `model` by name, tied ones once."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach()
    return tensors


def _fill(checkpoint: Path, tensors: dict[str, Tensor], written: dict[str, Tensor], where: str) -> None:
    with torch.no_grad():
        for name, tensor in tensors.items():
            if tensor.shape != written[name].shape:
                raise unusable(checkpoint, f"{name!r} is {list(written[name].shape)} there and {list(tensor.shape)} in the {where}")
            tensor.copy_(written[name])


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write one safetensors file."""
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:
        if f"os error {errno.ENOSPC}" in str(error):  # the Rust side has no OSError
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise FailureError(f"{path} could not be written: {error}.") from error
    path.chmod(0o644)


def _optimiser_tensors(checkpoint: Path, state: dict[str, Any]) -> dict[str, Tensor]:
    if not is_sharded(state):
        return _read_tensors(checkpoint / OPTIMISER)
    return read_shards(checkpoint, state, shapes(checkpoint, state).keys() - set(state["model"]))


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        # cloned: the file is mapped, and the checkpoint is deleted once a newer one exists
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
    except (SafetensorError, FileNotFoundError) as error:
        raise unusable(path.parent, f"{path.name} cannot be read ({error})") from error


def _entries(source: HuggingFaceStorageReader) -> dict[str, TensorStorageMetadata]:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    found = source.read_metadata().state_dict_metadata
    return {name: entry for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}


@contextmanager
def _reading(checkpoint: Path) -> Iterator[None]:
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (SafetensorError, FileNotFoundError, CheckpointException) as error:
        raise unusable(checkpoint, f"its files cannot be read ({str(error).strip().rpartition(chr(10))[2]})") from error


def unusable(checkpoint: Path, reason: str) -> FailureError:
    """A checkpoint that cannot be used, for the person who has to choose what to do without it."""
    older = [path for path in _checkpoints(checkpoint.parent) if path < checkpoint]
    then = f"continue from {older[-1].name}" if older else "start this run again from its first step"
    return FailureError(f"the checkpoint {checkpoint} cannot be used: {reason}. Delete that folder to {then}.")


def _checkpoints(root: Path) -> list[Path]:
    return sorted(root.glob("step-*")) if root.exists() else []


def remove_others(keep: Collection[Path], root: Path) -> None:
    """Remove the checkpoints of a run's folder of them, and what kills left there, except those to keep."""
    for path in root.iterdir():
        if path in keep:
            continue
        if path.name.startswith("step-"):  # hidden first: removing takes time, and a half-removed one must not look whole
            path = path.rename(root / f".{path.name}.removed")
        if path.name.startswith(".step-"):
            shutil.rmtree(path)
