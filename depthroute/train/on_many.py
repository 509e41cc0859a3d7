"""A run on the processes of a layout: what this one holds of the model, its optimiser, and its part of the steps.

Global batches and initial values are those of one process: each takes its rows of the batch of (seed, step), and draws every parameter
that it holds by its name. Losses and weights are then the same up to rounding, whatever the layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from depthroute.common.config import to_json
from depthroute.common.errors import RequestError
from depthroute.model import Decoder
from depthroute.parallel.network import Network
from depthroute.parallel.world import Value, World, from_first
from depthroute.train import sharded
from depthroute.train.balance import balance
from depthroute.train.config import RunConfig
from depthroute.train.initialise import initialise
from depthroute.train.on_one import on_device
from depthroute.train.optimiser import build_optimiser
from depthroute.train.run_folder import flattened


class OnMany:
    """The interface of `OnOne`; every process calls the same methods in the same order."""

    def __init__(self, config: RunConfig, world: World) -> None:
        """Raises RequestError where the layout does not fit the model or the batch, or where the processes have not the same run."""
        settings = config.train
        _check_same(config)
        self.world, self.first = world, world.rank == 0
        self.share, self.shares = world.share, world.layout.shares
        self._z_loss = settings.z_loss
        self.network = Network(
            config.model, world, sequences=settings.sequences, microbatch=settings.microbatch or settings.sequences,
            precision=torch.bfloat16 if settings.precision == "bf16" else None, fill=partial(initialise, seed=settings.seed),
            recompute=settings.recompute,
        )  # fmt: skip
        self.optimiser = build_optimiser(self.network.parts, settings)
        with torch.device("meta"):
            self.parameter_counts = Decoder(config.model).parameter_counts()
        self.evaluation_rows = self.network.evaluation_rows
        self._saving: sharded.Saving | None = None

    def batch(self, tokens: np.ndarray) -> Tensor:
        return on_device(tokens, self.world.device)

    def accumulate(self, batch: Tensor) -> Tensor:
        return self.network.accumulate(batch, self._z_loss)

    def gradient_norm(self) -> float:
        return self.network.gradient_norm()

    def clip(self, limit: float, norm: float) -> None:
        self.network.clip(limit, norm)

    def balance(self) -> dict[str, float]:
        return balance(self.network.config, self.network.parts, distributed.all_reduce)

    def load(self, found: Path) -> dict[str, Any]:
        return sharded.load(
            found, lambda names: dict(self.network.named) | self.optimiser.make_state(self.network.named, sorted(names))
        )

    def save(self, run: Path, step: int, state: dict[str, Any], keep: Collection[int]) -> None:
        self.saved()
        tensors = dict(self.network.named) | self.optimiser.state_tensors(self.network.named)
        self._saving = sharded.save(run, step, tensors, state, model=[name for name, _ in self.network.named], keep=keep)

    def saved(self, *, alone: bool = False) -> None:
        if self._saving is not None:
            saving, self._saving = self._saving, None
            if not alone:
                from_first(saving.wait)  # which has more to do than the others, and fails where they do not
            saving.wait()

    def agreed(self, wish: bool) -> bool:
        """Also notices a checkpoint that could not be written: FailureError on every process."""
        failed = self._saving is not None and self._saving.failed()
        found = self.largest(2 if failed else int(wish))
        if found > 1:
            self.saved()
        return found > 0

    def from_first(self, make: Callable[[], Value]) -> Value:
        return from_first(make)

    def largest(self, value: int) -> int:
        found = torch.tensor(value)  # over the CPU: a GPU need not be waited for
        distributed.all_reduce(found, op=distributed.ReduceOp.MAX)
        return int(found.item())


def _check_same(config: RunConfig) -> None:
    """Refuse processes that were given different runs, or made different ones of the same request on different machines."""
    own = flattened(to_json(dataclasses.replace(config, data="")))
    everyone: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, own)
    for rank, theirs in enumerate(everyone):
        for name in sorted(own.keys() | theirs.keys()):
            if theirs.get(name) != everyone[0].get(name):
                raise RequestError(
                    f"process {rank} has {name} = {theirs.get(name)!r} and the first one {everyone[0].get(name)!r}: all processes need the "
                    "same request, data and packages, and where something is 'auto', machines of one kind.", everywhere=True,
                )  # fmt: skip
