"""What a training run is configured by."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from depthroute.common.errors import RequestError, choose
from depthroute.model import ModelConfig

Precision = Literal["auto", "float32", "bf16"]
Device = Literal["auto", "cpu", "cuda"]
Schedule = Literal["cosine", "wsd"]
OptimiserName = Literal["adamw", "muon"]


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters that are optimised alike.

    Attributes:
        parameters: A regular expression that a name matches as a whole, such as "layers[.].*[.]mlp[.].*".
        optimiser: "adamw", or "muon" for matrices of linear maps inside the layers, those of experts too.
        rate: What the learning rate is multiplied by, and with it the weight decay.
        weight_decay: None is that of the run. It applies to what that one does.
    """

    parameters: str
    optimiser: OptimiserName = "adamw"
    rate: float = 1.0
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        named = f"groups: of {self.parameters!r},"
        try:
            re.compile(self.parameters)
        except re.error as error:
            raise RequestError(f"train.{named} parameters is no regular expression: {error}.") from error
        if self.optimiser not in get_args(OptimiserName):
            raise RequestError(f"train.{named} optimiser: {choose('value', str(self.optimiser), get_args(OptimiserName))}")
        _number(f"{named} rate", self.rate, self.rate > 0, "above 0")
        if self.weight_decay is not None:
            _number(f"{named} weight_decay", self.weight_decay, self.weight_decay >= 0, "0 or above, or none")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a model is trained. The defaults are the recipe of the Role-Decoupled paper (Section 4).

    Attributes:
        steps: Optimiser steps.
        sequences: Sequences of `context` tokens in the batch of one step.
        microbatch: Sequences in one forward pass; divides `sequences`. None: all of them. Gradients are summed over microbatches.
        learning_rate: The peak.
        route_rate: What the learning rate of the residual method's parameters is multiplied by, and with it their weight decay, which
            AdamW multiplies by the learning rate. Methods without parameters are the same at any value.
        optimiser: "adamw", or "muon": Muon for the matrices of the projections and experts in the layers, and AdamW for everything else:
            embedding, head, norms, biases, routers, convolutions, and all of the residual method.
        matrix_rate: What the learning rate of Muon's matrices is multiplied by, and with it their weight decay. Muon's update is scaled to
            the size of AdamW's, so 1 is the usual value. With "adamw" there are no such matrices, and it must be 1.
        momentum: Muon's. Where nothing is Muon's it must be left as it is.
        groups: Groups of parameters with an optimiser, a rate and a weight decay each. A parameter is in the first whose expression matches
            its name; each must be in one, and each group must have one. They say what `optimiser`, `matrix_rate` and `route_rate` say
            otherwise, which are then left at their defaults. Empty: the groups that those three make.
        betas, eps: AdamW's.
        weight_decay: Of AdamW and Muon. It applies to matrices, convolutions and routers, never to vectors: gains, decays, route queries.
        schedule: What the learning rate does after the warm-up (`depthroute.train.schedule` has the formulas). "cosine" falls from there to
            the end; "wsd" stays at the peak, and falls linearly over the last steps. Runs of "wsd" that differ only in `steps` and in how
            they end are the same until the first of them decays, if their warm-up is given in steps (`depthroute.train.branch`).
        warmup_fraction: Share of the steps that the linear warm-up takes.
        warmup_steps: The warm-up in steps. One of the two is given and the other is None.
        decay_fraction: Share of the steps that the decay of "wsd" takes; 0 stays at the peak to the end. "cosine" has none: None.
        final_fraction: Share of the peak learning rate that the last step of the decay has.
        gradient_clip: Largest global norm of the gradient. None: no clipping.
        z_loss: Weight of the mean squared log-normaliser in the training loss; the losses written down leave it out.
        precision: Autocast to bf16, or float32. "auto" is bf16 on a GPU or processor (AVX512-BF16, AMX) that multiplies it natively.
            Parameters are float32.
        device: "auto" is CUDA where there is a GPU.
        seed: Initial values and batch order.
        recompute: Keep of a layer only what comes in for the backward pass, and run it again there (activation checkpointing): less memory
            for a third more arithmetic, and the same result.
        milestones: Steps after which the validation split is evaluated, ascending. The last step always is.
        evaluation_tokens: Validation tokens of one evaluation. None: all of them.
        checkpoint_every: Steps between checkpoints, of which only the newest stays. 0: only at the end and when interrupted.
        keep_checkpoints: Steps after which a checkpoint is written that stays, ascending.
        threads: CPU threads of this run. None: what torch chooses. Sums are split by threads, so the last bits depend on it.
    """

    steps: int
    sequences: int
    learning_rate: float
    route_rate: float = 1.0
    optimiser: OptimiserName = "adamw"
    matrix_rate: float = 1.0
    momentum: float = 0.95
    groups: tuple[ParameterGroup, ...] = ()
    microbatch: int | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    schedule: Schedule = "cosine"
    warmup_fraction: float | None = 0.02
    warmup_steps: int | None = None
    decay_fraction: float | None = None
    final_fraction: float = 0.1
    gradient_clip: float | None = 1.0
    z_loss: float = 0.0
    precision: Precision = "auto"
    device: Device = "auto"
    seed: int = 0
    recompute: bool = False
    milestones: tuple[int, ...] = ()
    evaluation_tokens: int | None = None
    checkpoint_every: int = 500
    keep_checkpoints: tuple[int, ...] = ()
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
        _number("route_rate", self.route_rate, self.route_rate > 0, "above 0")
        _number("matrix_rate", self.matrix_rate, self.matrix_rate > 0, "above 0")
        _number("momentum", self.momentum, 0 <= self.momentum < 1, "at least 0 and below 1")
        _number("eps", self.eps, self.eps > 0, "above 0")
        _number("weight_decay", self.weight_decay, self.weight_decay >= 0, "0 or above")
        _number("z_loss", self.z_loss, self.z_loss >= 0, "0 or above")
        _number("final_fraction", self.final_fraction, 0 <= self.final_fraction <= 1, "from 0 to 1")
        if self.gradient_clip is not None:
            _number("gradient_clip", self.gradient_clip, self.gradient_clip > 0, "above 0, or none")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise RequestError(f"train.betas must be two numbers, each at least 0 and below 1, not {self.betas!r}.")
        choices = {"precision": Precision, "device": Device, "schedule": Schedule, "optimiser": OptimiserName}
        for field, literal in choices.items():
            if getattr(self, field) not in get_args(literal):
                raise RequestError(f"train.{field}: {choose('value', str(getattr(self, field)), get_args(literal))}")
        self._check_groups()
        self._check_muon()
        self._check_schedule()
        self._check_steps("milestones", self.milestones, "evaluate at the end only")
        self._check_steps("keep_checkpoints", self.keep_checkpoints, "keep the newest only")

    @property
    def uses_muon(self) -> bool:
        """Whether any parameter is Muon's."""
        return self.optimiser == "muon" or any(group.optimiser == "muon" for group in self.groups)

    @property
    def steps_of_warmup(self) -> int:
        """Steps of the warm-up, however it is given."""
        if self.warmup_fraction is not None:
            return round(self.warmup_fraction * self.steps)
        assert self.warmup_steps is not None
        return self.warmup_steps

    @property
    def steps_of_decay(self) -> int:
        """Steps in which the learning rate falls: with "cosine" all after the warm-up."""
        return self.steps - self.steps_of_warmup if self.decay_fraction is None else round(self.decay_fraction * self.steps)

    def _check_groups(self) -> None:
        for name, default in (("optimiser", "adamw"), ("matrix_rate", 1.0), ("route_rate", 1.0)):
            if self.groups and getattr(self, name) != default:
                raise RequestError(
                    f"train.{name} = {getattr(self, name)!r} does not go with train.groups, of which each has its own optimiser and rate: "
                    f"leave it at {default} and set that in the groups (routes are 'residual[.].*'), or leave train.groups empty."
                )

    def _check_muon(self) -> None:
        if self.uses_muon and self.groups:
            return
        has_none, instead = f"train.optimiser = {self.optimiser!r} has none", "set train.optimiser=muon"
        if self.groups:
            has_none, instead = "no group of train.groups is Muon's", "give it a group"
        for name, value, default in (("matrix_rate", self.matrix_rate, 1.0), ("momentum", self.momentum, 0.95)):
            if self.optimiser != "muon" and value != default:
                raise RequestError(
                    f"train.{name} = {value!r} is of Muon's matrices, and {has_none}: leave it at {default:g}, or {instead}."
                )

    def _check_schedule(self) -> None:
        if (self.warmup_fraction is None) == (self.warmup_steps is None):
            raise RequestError(
                f"train.warmup_fraction = {self.warmup_fraction} and train.warmup_steps = {self.warmup_steps}: give one of the two, and "
                "none for the other."
            )
        if self.warmup_fraction is not None:
            _number("warmup_fraction", self.warmup_fraction, 0 <= self.warmup_fraction < 1, "at least 0 and below 1, or none")
        if self.warmup_steps is not None:
            _whole("warmup_steps", self.warmup_steps, at_least=0, or_none=True)
        if (self.schedule == "wsd") != (self.decay_fraction is not None):
            raise RequestError(
                f"train.decay_fraction = {self.decay_fraction} does not go with train.schedule = {self.schedule!r}: give a share of the "
                "steps with 'wsd', and none with 'cosine', which falls from the end of the warm-up."
            )
        if self.decay_fraction is not None:
            _number("decay_fraction", self.decay_fraction, 0 <= self.decay_fraction <= 1, "from 0 to 1")
        warmup, decay = self.steps_of_warmup, self.steps_of_decay if self.schedule == "wsd" else 0
        if warmup + decay > self.steps:
            raise RequestError(
                f"the warm-up of {warmup} steps{f' and the decay of {decay}' if decay else ''} do not fit into train.steps = {self.steps}; "
                "shorten them, or train for longer."
            )

    def _check_steps(self, name: str, steps: tuple[int, ...], without: str) -> None:
        for step in steps:
            if not 1 <= step <= self.steps:
                raise RequestError(
                    f"train.{name} must lie between 1 and the {self.steps} steps of the run, not {step}; set train.{name}=[] to {without}."
                )
        if list(steps) != sorted(set(steps)):
            raise RequestError(f"train.{name} must be ascending and different from each other, not {list(steps)}.")


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
