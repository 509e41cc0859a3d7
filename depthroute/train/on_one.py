"""A run on one process: its model, its optimiser, and its steps."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from depthroute.model import Decoder
from depthroute.parallel.world import Value
from depthroute.train import checkpoint
from depthroute.train.balance import balance
from depthroute.train.config import RunConfig
from depthroute.train.devices import autocast
from depthroute.train.initialise import initialise
from depthroute.train.optimiser import build_optimiser


class OnOne:
    """What the training loop asks of whatever runs it: this process alone. `OnMany` is several.

    `first`: whether this process writes the run's files. `network`: what an evaluation measures. `share` of `shares`: which rows of every
    batch this process has.
    """

    first = True
    share, shares = 0, 1

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.network = Decoder(config.model)
        self.network.recompute = config.train.recompute
        initialise(self.network, config.train.seed)
        self.network.to(config.train.device)
        self.optimiser = build_optimiser(self.network, config.train)
        self.parameter_counts = self.network.parameter_counts()
        self.evaluation_rows = config.train.microbatch or config.train.sequences

    def batch(self, tokens: np.ndarray) -> Tensor:
        """This process's rows of a batch, int64 [rows, context + 1], where it trains."""
        return on_device(tokens, torch.device(self.config.train.device))

    def accumulate(self, batch: Tensor) -> Tensor:
        """Add the gradients of the whole batch, and return the sum of its token losses (float64)."""
        return accumulate_gradients(self.network, batch, self.config)

    def gradient_norm(self) -> float:
        norm: float = get_total_norm([parameter.grad for parameter in self.optimiser.parameters if parameter.grad is not None]).item()
        return norm

    def clip(self, limit: float, norm: float) -> None:
        """Scale gradients of this norm to `limit`."""
        clip_grads_with_norm_(self.optimiser.parameters, limit, torch.tensor(norm, device=self.config.train.device))

    def balance(self) -> dict[str, float]:
        """Move the biases of mixtures of experts by the loads of the step; what the metrics say of the loads."""
        return balance(self.config.model, [self.network])

    def load(self, found: Path) -> dict[str, Any]:
        """Put a checkpoint into model and optimiser; its state."""
        return checkpoint.load(found, self.network, self.optimiser)

    def save(self, run: Path, step: int, state: dict[str, Any], keep: Collection[int]) -> None:
        """Write a checkpoint, or begin to. At most one is being written."""
        checkpoint.save(run, step, self.network, self.optimiser, state, keep=keep)

    def saved(self, *, alone: bool = False) -> None:
        """Wait for the checkpoint that is being written; where that fails on any process, this fails on all.

        `alone`: this process has failed, and the others may not come here.
        """

    def agreed(self, wish: bool) -> bool:
        """Whether any process wishes it."""
        return wish

    def from_first(self, make: Callable[[], Value]) -> Value:
        """What `make` gives on the first process, which alone calls it; where it fails there, it fails on all."""
        return make()

    def largest(self, value: int) -> int:
        """Over the processes."""
        return value


def on_device(tokens: np.ndarray, device: torch.device) -> Tensor:
    """The same numbers on `device`; a GPU copies them while this process goes on."""
    found = torch.from_numpy(tokens)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)


def accumulate_gradients(model: Decoder, batch: Tensor, config: RunConfig) -> Tensor:
    """Add the gradient of the mean loss of `batch` [sequences, context + 1] int64, and return the sum of its token losses (float64).

    Sums over tokens are divided once, by the count of the whole batch, so the split into microbatches changes nothing but rounding.
    """
    settings = config.train
    total = torch.zeros((), dtype=torch.float64, device=batch.device)
    count = batch.shape[0] * (batch.shape[1] - 1)
    for part in torch.split(batch, settings.microbatch or len(batch)):
        with autocast(settings.device, settings.precision):
            sums = model.loss(part[:, :-1].contiguous(), part[:, 1:].contiguous(), settings.z_loss)
        torch.autograd.backward(sums.objective / count)
        total += sums.nll
    return total
