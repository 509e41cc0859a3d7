"""The processes of a run and the groups that they form: what torchrun started, joined into meshes."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, Store
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from depthroute.common.errors import DepthrouteError, FailureError, RequestError
from depthroute.parallel.layout import AXES, Layout

PATIENCE = timedelta(minutes=30)  # with a process that is alive and busy, as with hashing a checkpoint; one that ended is noticed at once

Value = TypeVar("Value")


@dataclass(frozen=True)
class World:
    """This process among those of a run.

    `mesh`: all of them, by the axes of the layout. `tokens`: the same processes as copies and shares of all that works on tokens alone:
    outside attention and MLPs a tensor axis is one more way to share the batch.
    """

    layout: Layout
    device: torch.device
    mesh: DeviceMesh
    tokens: DeviceMesh

    @property
    def rank(self) -> int:
        return distributed.get_rank()

    def place(self, axis: str) -> int:
        """Of this process along an axis, from 0."""
        return self.mesh.get_local_rank(axis)

    def group(self, axis: str) -> distributed.ProcessGroup:
        """The processes that differ from this one in `axis` alone."""
        return self.mesh.get_group(axis)

    @property
    def share(self) -> int:
        """Which share of the batch is this process's, of `layout.shares`."""
        return self.place("ddp") * self.layout.fsdp + self.place("fsdp")


def started() -> int | None:
    """How many processes torchrun has started, if it has started this one."""
    size = os.environ.get("WORLD_SIZE")
    return int(size) if size is not None and "RANK" in os.environ else None


def first() -> bool:
    """Whether this process is the first of its run, which alone writes and prints."""
    return started() is None or os.environ["RANK"] == "0"


@contextmanager
def joined(layout: Layout, device: str) -> Iterator[World]:
    """This process in the groups of a layout, while the context lasts.

    Args:
        layout: its open axis takes what the others leave.
        device: "cpu" (gloo) or "cuda" (NCCL, the GPU of the process's local rank).

    Raises:
        RequestError: torchrun did not start this process, or another number of them than the layout has, or more on this machine than it
            has GPUs.
        FailureError: another process of the run ended or cannot be reached.
    """
    size = started()
    if size is None:
        raise RequestError(
            f"--parallel {layout.describe()} needs several processes: torchrun --nproc-per-node N -m depthroute train ... --parallel ..."
        )
    layout = layout.fitted(size)
    place = torch.device(device)
    if device == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        local, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if max(local, place.index + 1) > gpus:
            raise RequestError(f"torchrun started {local} processes on this machine, and it has {gpus} GPUs; each takes one of them.")
        torch.cuda.set_device(place)
    with lost_processes_named():
        store, times = _store(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=PATIENCE, rank=int(os.environ["RANK"]), world_size=size,
            store=PrefixStore(_meeting(times), store),
        )  # fmt: skip
        try:
            yield meshes(layout, place)
        finally:
            leave()


def leave() -> None:
    """End the groups of this process, and what torch remembers of them: a later mesh that looks the same must not be taken for theirs."""
    distributed.destroy_process_group()
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # torch's own


@lru_cache(maxsize=1)
def _store(address: str, port: str) -> tuple[Store, Iterator[int]]:
    """Where the processes that meet at an address find each other, and numbers for the times that they do.

    It outlives their group: were it opened again for the next one, a process that is early would meet the others of the last one there.
    """
    store: Store = next(rendezvous("env://", timeout=PATIENCE))[0]
    return store, itertools.count()


def _meeting(times: Iterator[int]) -> str:
    """A name for this meeting that none before it had: torchrun may keep one store over restarts, with the addresses of those that died."""
    return f"restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}, time {next(times)}"


def meshes(layout: Layout, device: torch.device) -> World:
    """The groups of a layout, in a process group that is there."""
    mesh = init_device_mesh(device.type, tuple(getattr(layout, axis) for axis in AXES), mesh_dim_names=tuple(AXES))
    sizes = (layout.pp, layout.ddp, layout.fsdp * layout.tp)
    tokens = init_device_mesh(device.type, sizes, mesh_dim_names=("stages", "copies", "shards"))
    return World(layout, device, mesh, tokens)


def from_first(make: Callable[[], Value], group: ProcessGroup | None = None) -> Value:
    """What `make` gives on the first process, on every one; where it fails, it fails on every one, for the same reason.

    Every process of `group` (None: all) calls this; only the first calls `make`.
    """
    outcome: list[Any] = [None, None]
    if distributed.get_rank(group) == 0:
        try:
            outcome[0] = make()
        except DepthrouteError as error:
            outcome[1] = error
        except Exception as error:
            outcome[1] = FailureError(f"{type(error).__name__} on the first process: {error}")
            outcome[1].__cause__ = error
    distributed.broadcast_object_list(outcome, group=group, group_src=0)
    if outcome[1] is not None:
        outcome[1].everywhere = True
        raise outcome[1]
    value: Value = outcome[0]
    return value


@contextmanager
def lost_processes_named() -> Iterator[None]:
    """Turn what a process sees when another one is gone into one sentence."""
    try:
        yield
    except RuntimeError as error:
        # A sentence of ours may say anything, such as the path of a folder; what it comes from tells.
        found = error.__cause__ if isinstance(error, DepthrouteError) else error
        if found is None or not _of_communication(found):
            raise
        # "[.../gloo/transport/tcp/pair.cc:537] Connection closed by peer [10.0.0.2]:42896. This is typically caused by ..."
        reason = re.sub(r"^\[\S*\] ", "", (str(found).strip().splitlines() or [""])[0]).partition(". ")[0]
        raise FailureError(
            f"another process of this run has ended or cannot be reached ({reason[:200]}). The last checkpoint is whole; run the same "
            "command again to continue from it."
        ) from error


def _of_communication(error: BaseException) -> bool:
    """Whether an error, or what it comes from, is one of the transport between processes."""
    words = ("gloo", "NCCL", "Connection reset", "Connection closed", "Connection refused", "Broken pipe", "TCPStore", "Timed out waiting")
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, distributed.DistError) or any(word in str(found) for word in words):
            return True
        found = found.__cause__ or found.__context__
    return False
