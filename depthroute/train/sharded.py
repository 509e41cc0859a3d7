"""Checkpoints that every rank of a parallel run writes its own part of, in the background.

RUN/checkpoints/step-00000500/ then holds the safetensors shards of torch.distributed.checkpoint, each with the pieces that one rank wrote,
of the model ("layers.0.mlp.up.weight") and of the optimiser ("layers.0.mlp.up.weight.exp_avg") together, and state.json, which says which
names are the model's. Nothing in it is a pickle. A checkpoint loads onto any number of ranks and any layout, whichever form it has
(checkpoint.py), and `consolidate` makes the plain form of it. All ranks see one file system.
"""

from __future__ import annotations

import fcntl
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_in_place
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future as TorchFuture

from depthroute.common.errors import DepthrouteError, FailureError, RequestError
from depthroute.common.files import explain_os_errors, new_folder, sync
from depthroute.parallel.world import from_first
from depthroute.train import checkpoint as plain
from depthroute.train.run_folder import root_of

Group = distributed.ProcessGroup
Value = TypeVar("Value")
Piece = tuple[str, tuple[int, ...], tuple[int, ...]]  # of a tensor: its name, where in it, of which shape

PATIENCE = timedelta(hours=6)  # others wait while one rank verifies a large checkpoint; a rank that is gone is noticed at once

_groups: WeakKeyDictionary[Group, Group] = WeakKeyDictionary()


class Saving:
    """A checkpoint on its way to the disk."""

    def __init__(self, written: Future[None]) -> None:
        self._written = written

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._written.done()

    def failed(self) -> bool:
        """Whether `wait` would raise at once."""
        return self._written.done() and self._written.exception() is not None

    def wait(self) -> None:
        """Until the checkpoint is there, on rank 0; on the others until every rank has written and hashed its shard.

        Raises:
            FailureError: the disk is full, or the folder cannot be written, on any rank. The previous checkpoint is then untouched.
        """
        self._written.result()


def save(
    run: Path, step: int, tensors: Mapping[str, Tensor], state: dict[str, Any], *, model: Collection[str], keep: Collection[int] = (),
    group: Group | None = None,
) -> Saving:
    """Copy `tensors`, then write the checkpoint of `step` in the background; older ones are removed only when it is there.

    Every rank calls this. The tensors may change as soon as it returns. Of what several ranks hold alike, one makes the copy. The `Saving`
    of the one before must have been waited for, and this one must be before the process group is destroyed.

    Args:
        tensors: what this rank holds, by the names of the whole model: DTensors in any layout, and plain tensors. A plain tensor that
            several ranks have under one name is the same on all of them.
        state: JSON, as rank 0 gives it.
        model: the names in `tensors` that are the model's. The others are its optimiser's.
        keep: the steps whose checkpoints are not removed.
        group: of all ranks, over the CPU, and used by nothing else while this is written. None: one that is made on the first call.

    Raises:
        RequestError: there is a checkpoint of this step.
        FailureError: the folder cannot be written.
    """
    group = _own_group() if group is None else group
    if group is None:
        raise RequestError("shards are written by the ranks of a process group, and there is none; write a plain checkpoint.")
    pieces = _pieces(tensors)
    held = _gathered((list(model), pieces), group)
    mine = {piece[0] for piece in pieces.keys() & _shares([part for _, part in held])[group.rank()]}
    target = plain.folder(run, step)
    with ExitStack() as stack:
        temporary = Path(from_first(lambda: str(stack.enter_context(new_folder(target))), group))
        writer = _Writer(str(temporary), save_distributed=True)  # the usual writer would pickle its index
        writer.per_thread_copy_ahead = 0  # all is on the CPU by then; else the thread of every rank would open the first GPU for it
        shards = async_save({name: _dense(tensors[name]) for name in tensors if name in mine}, storage_writer=writer, process_group=group)
        assert not isinstance(shards, AsyncSaveResponse)  # which only a stager of one's own gives
        completing = stack.pop_all()
    everywhere = sorted({name for names, _ in held for name in names})
    whole = {"format": plain.FORMAT, "form": plain.SHARDED, "step": step, **state, "model": everywhere}

    def complete() -> None:
        with explain_os_errors(target, "writing"):
            with completing:
                files = _files(shards, writer, target, group)
                if group.rank() == 0:
                    plain.write_state(temporary, whole, files)
            if group.rank() == 0:
                plain.remove_others({target, *(plain.folder(run, kept) for kept in keep)}, target.parent)

    background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    saving = Saving(background.submit(complete))
    background.shutdown(wait=False)
    return saving


def load(checkpoint: Path, make: Callable[[set[str]], Mapping[str, Tensor]], *, group: Group | None = None) -> dict[str, Any]:
    """Put the values of a checkpoint of either form into what `make` gives, in place; returns its state with `step`.

    Every rank calls this. Without a process group, this process holds all there is.

    Args:
        make: gives what this rank holds, in any layout, for the names of all tensors of the checkpoint. It is called once every file is
            known to be what was written. Its KeyError tells a name that the optimiser of the run does not have.

    Raises:
        FailureError: on every rank, where a file is missing, was cut short or altered, or where checkpoint and the tensors of all ranks
            together do not have the same names and shapes.
    """
    group = _own_group() if group is None else group
    state = plain.verify(checkpoint) if group is None else from_first(lambda: plain.verify(checkpoint), group)
    problem: FailureError | None = None
    there: dict[str, torch.Size] = {}
    tensors: dict[str, Tensor] = {}
    try:
        there = plain.shapes(checkpoint, state)
        tensors = dict(make(set(there)))
        _refuse_misfit(checkpoint, there, tensors)
    except FailureError as error:
        problem = error
    except KeyError as error:
        problem = plain.unusable(checkpoint, f"it has {error.args[0]!r}, which the optimiser of this run does not")
    found = _gathered((problem, list(tensors)), group)
    problems = [one for one, _ in found if one is not None]
    for name in sorted(there.keys() - {name for _, held in found for name in held}):
        problems.append(plain.unusable(checkpoint, f"it has {name!r}, which the run does not"))
    if problems:
        problems[0].everywhere = True
        raise problems[0]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            load_in_place(tensors, storage_reader=plain.reader(checkpoint, state), process_group=group, no_dist=group is None)
        except CheckpointException as error:
            raise plain.unusable(checkpoint, _first_line(error)) from error
    return state


def consolidate(checkpoint: Path) -> bool:
    """Make the plain form of a sharded checkpoint, in its place, bit for bit. False: it is plain already.

    A kill at any time leaves the one form or the other. What one left is removed by the next call.

    Raises:
        FailureError: the checkpoint is damaged, or the disk is full.
    """
    state = plain.read_state(checkpoint)
    sharded = plain.is_sharded(state)
    with explain_os_errors(checkpoint, "writing"):
        try:
            if sharded:
                state = _as_plain(checkpoint, plain.verify(checkpoint))
        finally:
            _remove_unrecorded(checkpoint, state)
    return sharded


def gather(path: Path) -> dict[Path, bool]:
    """`consolidate` every checkpoint of a run folder, or the checkpoint folder that `path` is: which of them there are, and had shards.

    Raises:
        RequestError: `path` is neither, or a process is training in it.
        FailureError: a checkpoint is damaged, or the disk is full.
    """
    run = root_of(path)
    checkpoints = [path] if run != path else sorted((path / "checkpoints").glob("step-*"))
    if not (path if run != path else path / "config.json").exists():
        raise RequestError(f"{path} is neither a run folder nor a checkpoint folder of one.")
    with _nobody_trains(run):
        return {checkpoint: consolidate(checkpoint) for checkpoint in checkpoints}


def _as_plain(checkpoint: Path, state: dict[str, Any]) -> dict[str, Any]:
    model = set(state["model"])
    for file, wanted in ((plain.MODEL, model), (plain.OPTIMISER, plain.shapes(checkpoint, state).keys() - model)):
        # Under its last name at once: until state.json names it, nobody reads it.
        plain.write_tensors(checkpoint / file, plain.read_shards(checkpoint, state, wanted))
        sync(checkpoint / file)
    sync(checkpoint)
    plain.write_state(checkpoint, {name: value for name, value in state.items() if name not in ("form", "model", "files")})
    sync(checkpoint)
    return plain.read_state(checkpoint)


def _remove_unrecorded(checkpoint: Path, state: dict[str, Any]) -> None:
    """Remove what kills left: files under the names that a checkpoint is made of. Others in its folder are somebody's own."""
    for pattern in (plain.MODEL, plain.OPTIMISER, "shard-*.safetensors", f".{plain.STATE}.*"):
        for path in checkpoint.glob(pattern):
            if path.name not in state["files"]:
                path.unlink()


@contextmanager
def _nobody_trains(run: Path) -> Iterator[None]:
    """Hold the lock of a run folder, which its training holds."""
    with explain_os_errors(run, "writing into"), (run / "log.txt").open("a") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RequestError(f"another process is training in {run}; wait for it.") from None
        yield


def _own_group() -> Group | None:
    """A group of all ranks over the CPU for checkpoints alone: what is written in the background must not mix with the training's own."""
    if not distributed.is_initialized():
        return None
    everyone = distributed.group.WORLD
    assert everyone is not None
    if everyone not in _groups:
        _groups[everyone] = distributed.new_group(backend="gloo", timeout=PATIENCE)
    return _groups[everyone]


def _gathered(value: Value, group: Group | None) -> list[Value]:
    if group is None:
        return [value]
    found: list[Any] = [None] * group.size()
    distributed.all_gather_object(found, value, group)
    return found


class _Writer(HuggingFaceStorageWriter):
    """Remembers the names of the files that this rank wrote: what the folder lists may be behind on a file system over the network."""

    def __init__(self, path: str, *, save_distributed: bool) -> None:
        super().__init__(path, save_distributed=save_distributed)
        self.names: set[str] = set()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        found = super().write_data(plan, planner)
        self.names = {result.storage_data.relative_path for result in found.wait()}
        return found


def _pieces(tensors: Mapping[str, Tensor]) -> dict[Piece, int]:
    """What this rank holds of every tensor, and how many bytes that is."""
    found = {}
    for item in create_default_local_save_plan(dict(tensors), False).items:
        data = item.tensor_data
        assert data is not None and item.index.offset is not None
        sizes = tuple(data.chunk.sizes)
        found[item.index.fqn, tuple(item.index.offset), sizes] = math.prod(sizes) * data.properties.dtype.itemsize
    return found


def _shares(held: list[dict[Piece, int]]) -> list[set[Piece]]:
    """The pieces that each rank copies and writes, by what each holds: all there are, each once, with about the same bytes for all."""
    holders: dict[Piece, list[int]] = {}
    for rank, part in enumerate(held):
        for piece in part:
            holders.setdefault(piece, []).append(rank)
    shares: list[set[Piece]] = [set() for _ in held]
    load = [0] * len(held)

    def hard_first(piece: Piece) -> tuple[Any, ...]:
        ranks = holders[piece]
        return len(ranks) > 1, -held[ranks[0]][piece], piece  # the same order on every rank

    for piece in sorted(holders, key=hard_first):
        rank = min(holders[piece], key=lambda one: load[one])
        shares[rank].add(piece)
        load[rank] += held[rank][piece]
    return shares


def _refuse_misfit(checkpoint: Path, there: Mapping[str, torch.Size], tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if name not in there:
            raise plain.unusable(checkpoint, f"the run has {name!r}, which it does not")
        if tensor.shape != there[name]:
            raise plain.unusable(checkpoint, f"{name!r} is {list(there[name])} there and {list(tensor.shape)} in the run")


def _dense(tensor: Tensor) -> Tensor:
    """`tensor` with a contiguous part on this rank, which is all that safetensors writes."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.contiguous()
    local = tensor.to_local()
    if local.is_contiguous():
        return tensor
    return DTensor.from_local(
        local.contiguous(), tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _files(shards: Future[Any], writer: _Writer, target: Path, group: Group) -> dict[str, plain.File]:
    """Wait for the shards of all ranks: their names, sizes and hashes, which each rank takes of its own.

    What fails on one rank fails on all; the system's refusal as itself, for `explain_os_errors`.
    """
    outcome: dict[str, plain.File] | Exception
    try:
        shards.result()
        outcome = {name: plain.recorded(Path(writer.path) / name) for name in sorted(writer.names)}
    except CheckpointException as failure:
        refused = [error for error, _ in failure.failures.values() if isinstance(error, OSError)]
        outcome = refused[0] if refused else FailureError(f"{target} could not be written: {_first_line(failure)}.")
    except (OSError, DepthrouteError) as error:
        outcome = error
    except RuntimeError as error:  # of the process group, over which there is nothing more to say
        raise _alone(target, error) from error
    except Exception as error:
        outcome = FailureError(f"{target} could not be written: {type(error).__name__} on rank {group.rank()}: {error}.")
    try:
        found = _gathered(outcome, group)
    except RuntimeError as error:
        raise _alone(target, error) from error
    files: dict[str, plain.File] = {}
    for part in found:
        if isinstance(part, Exception):
            raise part
        files |= part
    return files


def _alone(target: Path, error: RuntimeError) -> FailureError:
    return FailureError(f"{target} could not be written: another rank is gone ({error}).")


def _first_line(failure: CheckpointException) -> str:
    rank, (error, _) = next(iter(failure.failures.items()))
    return f"{type(error).__name__} on rank {rank}: {str(error).partition(chr(10))[0]}"
