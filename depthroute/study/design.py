"""What a study is: arms, comparisons, claims. Everything that its plan will hold, before anything is resolved."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

from depthroute.common.errors import RequestError, choose
from depthroute.study.curves import METHOD
from depthroute.train import RunConfig

ClaimKind = Literal["lower", "equivalent", "identical", "saves"]
STOPPING = "Every planned cell is trained to its last step; no result decides when to stop."


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A published number: context in a report, never an expected value. `unit` is that of `value` and `interval`."""

    value: float
    source: str
    interval: tuple[float, float] | None = None
    unit: str = "nats per token"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One variant: what reports call it, and its configuration, whole or as a change to the study's base.

    Attributes:
        scale: Arms of one scale share a body ("S", "M"). Empty where the study has one.
        factors: Its place in a sweep, `{"rank": 64, "blocks": 8}`. Over scales, `{"method": "block"}` says which arms are one curve.
        seeds: Which of the study's seeds it is trained with; None is all of them.
        trunk: An arm whose first steps are bit for bit this arm's own (see `depthroute.train.branch`). They are then trained once.
        paper: The loss that a paper reports for this arm.
    """

    label: str
    config: RunConfig | Callable[[RunConfig], RunConfig]
    scale: str = ""
    factors: Mapping[str, float | str] = field(default_factory=dict)
    seeds: tuple[int, ...] | None = None
    trunk: str | None = None
    paper: Reference | None = None


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence that the study is to decide, written before it starts.

    Attributes:
        kind: "lower": the arm's loss is below its parent's by more than `margin` nats. "equivalent": the difference is inside +-`margin`.
            "identical": every difference is exactly zero. "saves": the method `arm` needs less compute than the method `parent` for the
            same loss, by a factor above `margin`; both are values of the factor "method".
        boundary: Where the claim ends: the sizes, the data, the length of training.
        paper: The effect that a paper reports.
    """

    text: str
    kind: ClaimKind
    arm: str
    parent: str
    margin: float = 0.0
    boundary: str = ""
    paper: Reference | None = None


@dataclass(frozen=True, kw_only=True)
class Study:
    """A paired experiment.

    `arms` are in the order in which they are trained and reported; `comparisons` are (arm, parent) by name, the headline first. Every
    cell is an arm with a seed. It is evaluated at its milestones, and the last one, its last step, is the endpoint.

    Attributes:
        seeds: One pair a seed.
        milestones: Steps, for every arm, beside its last. Empty: what each arm's `train.milestones` says.
        differs: Beside `model.residual`, the dotted fields (`"train.learning_rate"`) in which the two arms of a pair may differ, a name
            standing for everything below it.
        endpoint: The split of evaluations.jsonl whose loss is compared.
        claims: What the study is to decide.
        stopping: The rule by which it ends.

    Raises (in `check`):
        RequestError: a comparison of an unknown arm or of an arm with itself, no, repeated or negative seeds, milestones that do not rise,
            an arm name that is no folder name, a claim about a pair that is not compared, with a margin that its kind does not take or with
            the text of another one, or a trunk that is none.
    """

    name: str
    question: str
    base: RunConfig
    arms: Mapping[str, Arm]
    comparisons: tuple[tuple[str, str], ...]
    seeds: tuple[int, ...]
    milestones: tuple[int, ...] = ()
    differs: tuple[str, ...] = ()
    endpoint: str = "validation"
    claims: tuple[Claim, ...] = ()
    stopping: str = STOPPING

    def seeds_of(self, name: str) -> tuple[int, ...]:
        """The seeds that one arm is trained with."""
        chosen = self.arms[name].seeds
        return self.seeds if chosen is None else chosen

    def config_of(self, name: str) -> RunConfig:
        """The configuration of one arm, with nothing resolved, at the milestones of the study."""
        given = self.arms[name].config
        config = given if isinstance(given, RunConfig) else given(self.base)
        steps = config.train.steps
        wanted = tuple(dict.fromkeys((*(self.milestones or config.train.milestones), steps)))
        if self.milestones and self.milestones[-1] > steps:
            raise RequestError(f"milestones = {self.milestones} are not allowed; they rise within the {steps} steps that {name} trains.")
        return replace(config, train=replace(config.train, milestones=wanted))

    def check(self) -> None:
        """Refuse what makes no sense, by name."""
        _check_seeds("seeds", self.seeds)
        self._check_arms()
        self._check_comparisons()
        if self.milestones and (self.milestones[0] < 1 or any(left >= right for left, right in pairwise(self.milestones))):
            raise RequestError(f"milestones = {self.milestones} are not allowed; they are steps, from 1, and rise.")
        texts = [claim.text for claim in self.claims]
        for claim in self.claims:
            if texts.count(claim.text) > 1:  # a plan knows a claim by its text
                raise RequestError(f"the claim {claim.text!r} is there more than once; give each a text of its own.")
            self._check_claim(claim)

    def _check_arms(self) -> None:
        for name, arm in self.arms.items():
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
                raise RequestError(f"arm name {name!r} is not allowed; it names a folder: letters, digits, '.', '_' and '-'.")
            if arm.seeds is not None:
                _check_seeds(f"arms.{name}.seeds", arm.seeds)
                for seed in arm.seeds:
                    if seed not in self.seeds:
                        raise RequestError(f"arms.{name}.seeds holds {seed}, which is none of the study's seeds {self.seeds}.")
            if arm.trunk is None:
                continue
            if arm.trunk == name or arm.trunk not in self.arms:
                raise RequestError(f"arms.{name}.trunk: {choose('arm', arm.trunk, [other for other in self.arms if other != name])}")
            if self.arms[arm.trunk].trunk is not None:
                raise RequestError(f"arms.{name}.trunk: {arm.trunk} is a branch itself; name the trunk that it comes from.")
            for seed in self.seeds_of(name):
                if seed not in self.seeds_of(arm.trunk):
                    raise RequestError(f"arms.{name} has the seed {seed}, and its trunk {arm.trunk} is not trained with it.")

    def _check_comparisons(self) -> None:
        if not self.comparisons:
            raise RequestError("comparisons is empty; a study compares at least one arm with a parent.")
        for pair in self.comparisons:
            for name in pair:
                if name not in self.arms:
                    raise RequestError(f"comparisons: {choose('arm', name, self.arms)}")
            if pair[0] == pair[1]:
                raise RequestError(f"comparisons: {pair[0]!r} cannot be its own parent.")
            if self.comparisons.count(pair) > 1:
                raise RequestError(f"comparisons holds {pair[0]} against {pair[1]} more than once.")
            if not set(self.seeds_of(pair[0])) & set(self.seeds_of(pair[1])):
                raise RequestError(f"comparisons: {pair[0]} and {pair[1]} have no seed in common.")

    def _check_claim(self, claim: Claim) -> None:
        what = f"the claim {claim.text!r}"
        if claim.kind == "saves":
            for method in (claim.arm, claim.parent):
                scales = {arm.scale for arm in self.arms.values() if arm.factors.get(METHOD) == method}
                if len(scales) < 3:
                    raise RequestError(
                        f"{what} needs the method {method!r} at three scales or more, and {len(scales)} have an arm with "
                        f"factors[{METHOD!r}] = {method!r}."
                    )
            lowest = 1.0
        else:
            if (claim.arm, claim.parent) not in self.comparisons:
                raise RequestError(f"{what} is about {claim.arm} and {claim.parent}, which the study does not compare.")
            lowest = 0.0
        useless = {"equivalent": claim.margin == 0, "identical": claim.margin != 0}.get(claim.kind, False)
        if not (math.isfinite(claim.margin) and claim.margin >= lowest) or useless:
            kinds = {"saves": "a factor of 1 or more", "equivalent": "a positive number of nats", "identical": "0 and nothing else"}
            raise RequestError(f"{what} has the margin {claim.margin}; it takes {kinds.get(claim.kind, '0 nats or more')}.")


def _check_seeds(where: str, seeds: tuple[int, ...]) -> None:
    if not seeds:
        raise RequestError(f"{where} is empty; give at least one.")
    for seed in seeds:
        if seed < 0:
            raise RequestError(f"{where} holds {seed}; a seed is 0 or more.")
        if seeds.count(seed) > 1:
            raise RequestError(f"{where} holds {seed} more than once; every pair needs a seed of its own.")
