"""What a training run is configured by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from depthroute.common.errors import RequestError, choose
from depthroute.model import ModelConfig

Precision = Literal["auto", "float32", "bf16"]
Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a model is trained. The defaults are the recipe of the Role-Decoupled paper (Section 4).

    Attributes:
        steps: Optimiser steps.
        sequences: Sequences of `context` tokens in the batch of one step.
        microbatch: Sequences in one forward pass; divides `sequences`. None: all of them. Gradients are summed over microbatches.
        learning_rate: The peak.
        betas, eps, weight_decay: AdamW's. Decay applies to matrices only, never to route queries or gains.
        warmup_fraction: Share of the steps that the linear warm-up takes.
        final_fraction: Share of the peak learning rate that the last step has.
        gradient_clip: Largest global norm of the gradient. None: no clipping.
        z_loss: Weight of the mean squared log-normaliser in the training loss; the losses written down leave it out.
        precision: Autocast to bf16, or float32. "auto" is bf16 on a GPU or processor (AVX512-BF16, AMX) that multiplies it natively.
            Parameters are float32.
        device: "auto" is CUDA where there is a GPU.
        seed: Initial values and batch order.
        milestones: Steps after which the validation split is evaluated, ascending. The last step always is.
        evaluation_tokens: Validation tokens of one evaluation. None: all of them.
        checkpoint_every: Steps between checkpoints. 0: only at the end and when interrupted.
        threads: CPU threads of this run. None: what torch chooses. Sums are split by threads, so the last bits depend on it.
    """

    steps: int
    sequences: int
    learning_rate: float
    microbatch: int | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    warmup_fraction: float = 0.02
    final_fraction: float = 0.1
    gradient_clip: float | None = 1.0
    z_loss: float = 0.0
    precision: Precision = "auto"
    device: Device = "auto"
    seed: int = 0
    milestones: tuple[int, ...] = ()
    evaluation_tokens: int | None = None
    checkpoint_every: int = 500
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "sequences"):
            _whole(name, getattr(self, name), at_least=1)
        for name in ("seed", "checkpoint_every"):
            _whole(name, getattr(self, name), at_least=0)
        for name in ("microbatch", "evaluation_tokens", "threads"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), at_least=1, or_none=True)
        if self.microbatch is not None and self.sequences % self.microbatch:
            raise RequestError(
                f"train.microbatch must divide train.sequences: {self.sequences} sequences cannot be split into microbatches of "
                f"{self.microbatch}."
            )
        _number("learning_rate", self.learning_rate, self.learning_rate > 0, "above 0")
        _number("eps", self.eps, self.eps > 0, "above 0")
        _number("weight_decay", self.weight_decay, self.weight_decay >= 0, "0 or above")
        _number("z_loss", self.z_loss, self.z_loss >= 0, "0 or above")
        _number("warmup_fraction", self.warmup_fraction, 0 <= self.warmup_fraction < 1, "at least 0 and below 1")
        _number("final_fraction", self.final_fraction, 0 <= self.final_fraction <= 1, "from 0 to 1")
        if self.gradient_clip is not None:
            _number("gradient_clip", self.gradient_clip, self.gradient_clip > 0, "above 0, or none")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise RequestError(f"train.betas must be two numbers, each at least 0 and below 1, not {self.betas!r}.")
        for field, allowed in (("precision", ("auto", "float32", "bf16")), ("device", ("auto", "cpu", "cuda"))):
            if getattr(self, field) not in allowed:
                raise RequestError(f"train.{field}: {choose('value', str(getattr(self, field)), allowed)}")
        self._check_milestones()

    def _check_milestones(self) -> None:
        for milestone in self.milestones:
            if not 1 <= milestone <= self.steps:
                raise RequestError(f"train.milestones must lie between 1 and the {self.steps} steps of the run, not {milestone}; "
                    "set train.milestones=[] to evaluate at the end only.")
        if list(self.milestones) != sorted(set(self.milestones)):
            raise RequestError(f"train.milestones must be ascending and different from each other, not {list(self.milestones)}.")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run: a model, how it is trained, and on what.

    Attributes:
        data: Folder of the token shards.
        data_fingerprint: The content hash that the shards must have. Empty: that of `data`, filled in when the run starts.
    """

    model: ModelConfig
    train: TrainConfig
    data: str
    data_fingerprint: str = ""

    @property
    def tokens_per_step(self) -> int:
        return self.train.sequences * self.model.context


def _whole(name: str, value: Any, *, at_least: int, or_none: bool = False) -> None:
    if type(value) is not int or value < at_least:
        raise RequestError(f"train.{name} must be a whole number of at least {at_least}{', or none' if or_none else ''}, not {value!r}.")


def _number(name: str, value: float, allowed: bool, words: str) -> None:
    if not allowed or not math.isfinite(value):
        raise RequestError(f"train.{name} must be {words}, not {value!r}.")
