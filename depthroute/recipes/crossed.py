"""A crossed study: two small experiments put Block, low-rank keys and RD in different orders, and differed in five things at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from depthroute.common.errors import RequestError
from depthroute.model import ModelConfig
from depthroute.recipes.arms import boundary, milestones_at, run_in, run_of_arm
from depthroute.recipes.base import Recipe
from depthroute.recipes.forms import Form
from depthroute.recipes.models import RECIPES
from depthroute.residual import AttnResConfig, ResidualConfig
from depthroute.study.plan import Arm, Claim, Study
from depthroute.train import RunConfig, TrainConfig

SEEDS = (1, 2)
FASTER = 3.0  # upper level of both learning rates, times the lower
LONGER = 4  # and of the steps
METHODS = {
    "prenorm": ("prenorm", "PreNorm"),
    "block": ("block", "Block AttnRes"),
    "low-rank": ("low-rank,rank={rank}", "LR-AttnRes, r = d/4"),
    "rd": ("rd", "RD-AttnRes"),
}
PAIRS = (("rd", "block"), ("low-rank", "block"), ("block", "prenorm"), ("low-rank", "prenorm"), ("rd", "prenorm"))


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A row of the design: for each factor, whether it is at its upper level."""

    rate: bool
    routes: bool
    head: bool
    steps: bool

    @property
    def signs(self) -> tuple[int, ...]:
        """+1 and -1 in the order of the fields: the row of the design matrix."""
        return tuple(1 if level else -1 for level in dataclasses.astuple(self))

    @property
    def name(self) -> str:
        """`hhhl`: three factors high, the steps low."""
        return "".join("h" if level else "l" for level in dataclasses.astuple(self))


# The generator is steps = -(rate x routes x head), so I = -(rate x routes x head x steps), of resolution IV: no factor's effect is mixed
# with another's or with that of two together; those of two are mixed in pairs (rate x routes with head x steps, and so on). With the minus
# sign both corners that gave rise to the study are in it: hhhl and lllh. PreNorm has no routes and sees a full factorial of the others.
CONDITIONS = tuple(
    Condition(rate=rate, routes=routes, head=head, steps=not (rate ^ routes ^ head))
    for rate, routes, head in product((True, False), repeat=3)
)
CORNERS = ("hhhl", "lllh")


def _crossed_shape(residual: ResidualConfig) -> ModelConfig:
    return ModelConfig(vocabulary=2_048, width=64, layers=6, heads=4, mlp_width=320, context=64, residual=residual)


# The recipe's rate and steps are the lower levels.
BODIES: dict[Form, Recipe] = {
    "small": Recipe(
        description="6 layers x 64, blocks of 2 layers, for crossing factors",
        model=_crossed_shape,
        train=TrainConfig(
            steps=150, sequences=8, learning_rate=1e-3, warmup_fraction=0.15, precision="float32", threads=1, evaluation_tokens=65_536
        ),
        attnres=AttnResConfig(layers_per_block=2, first_read=True),
        residual="rd",
    ),
    "paper": replace(RECIPES["rd-s"], train=replace(RECIPES["rd-s"].train, steps=15_259, milestones=())),
}


def crossed_study(
    data: Path,
    *,
    form: Form = "small",
    vocabulary: int | None = None,
    end: int | None = None,
    seeds: tuple[int, ...] = (),
    settings: Mapping[str, Any] | None = None,
) -> Study:
    """Which factor decides whether RD and low-rank keys are ahead of Block: a half fraction of four factors, eight conditions.

    Two small experiments disagreed. At width 128, heads of 32, learning rate 3e-3 and 1.2M tokens, RD was behind Block (4.87 and 4.74 nats
    per token) and low-rank keys further (4.95). At width 96, heads of 16, 1e-3 and 4.1M tokens, RD was ahead at every milestone, and
    low-rank keys 0.03 behind. Between them changed, at once:

    - the learning rate of the body, a factor of 3;
    - the learning rate of the routes, the same in both experiments, and apart here (`train.route_rate`): times 1 or 3 of the lower rate;
    - the head width, 16 or 32;
    - the steps, a factor of 4;
    - the vocabulary, which the data decides: run the study once more with other data.

    Every condition is a scale with its own four arms, and `factors` says its levels. The effect of a factor on a gap is the mean gap of the
    four conditions in which it is high minus that of the four in which it is low; `CONDITIONS` has the signs. The "paper" form crosses the
    same factors at the Role-Decoupled paper's S and from a quarter of its tokens on.

    Args:
        settings: `train.learning_rate` and `train.steps` are the lower levels, `model.heads` gives the narrower head.

    Raises:
        RequestError: a number of heads that is odd, so that heads of twice the width are none.
    """
    seeds = seeds or SEEDS
    made = BODIES[form]
    quarter = max(1, run_in(made, data, "prenorm", vocabulary=vocabulary, end=end, settings=settings).model.width // 4)
    arms: dict[str, Arm] = {}
    for condition, (method, (specification, label)) in product(CONDITIONS, METHODS.items()):
        plain = run_in(made, data, specification.format(rank=quarter), vocabulary=vocabulary, end=end, settings=settings)
        run = _at(condition, plain, keep_milestones="train.milestones" in (settings or {}))
        arms[f"{method}-{condition.name}"] = Arm(
            label=f"{label}, {condition.name}", config=run, scale=condition.name, factors={"method": method, **_levels(run)}
        )
    names = [*CORNERS, *(condition.name for condition in CONDITIONS if condition.name not in CORNERS)]
    return Study(
        name="What decides between shared, low-rank and decoupled routes",
        question="Which of the body's learning rate, the routes' learning rate, the head width and the length of training changes the "
        "order of Block AttnRes, low-rank keys and RD-AttnRes?",
        base=run_of_arm(arms[f"prenorm-{CORNERS[0]}"]),
        arms=arms,
        comparisons=tuple((f"{arm}-{name}", f"{parent}-{name}") for arm, parent in PAIRS for name in names),
        seeds=seeds,
        claims=tuple(_corner_claims(arms, len(seeds))),
    )


def _at(condition: Condition, plain: RunConfig, keep_milestones: bool) -> RunConfig:
    """The run at the levels of a condition; `plain` has the lower ones."""
    if plain.model.heads % 2:
        raise RequestError(f"model.heads = {plain.model.heads} is odd; half as many heads of twice the width need an even number.")
    steps = plain.train.steps * (LONGER if condition.steps else 1)
    body, routes = (FASTER if high else 1.0 for high in (condition.rate, condition.routes))  # of the lower rate
    train = replace(
        plain.train,
        learning_rate=body * plain.train.learning_rate,
        route_rate=routes / body * plain.train.route_rate,
        steps=steps,
        milestones=plain.train.milestones if keep_milestones else milestones_at(steps),
    )
    model = replace(plain.model, heads=plain.model.heads // 2) if condition.head else plain.model
    return replace(plain, model=model, train=train)


def _levels(run: RunConfig) -> dict[str, float | str]:
    train = run.train
    return {
        "learning_rate": train.learning_rate,
        "route_learning_rate": float(f"{train.learning_rate * train.route_rate:.6g}"),  # 3 x (1 / 3) is not 1 in every digit
        "head_width": run.model.resolved_head_width,
        "steps": train.steps,
    }


def _corner_claims(arms: Mapping[str, Arm], seeds: int) -> Iterator[Claim]:
    """What the two experiments disagree about, at their corners of the design."""
    for name, words in zip(CORNERS, ("high rates, wide heads and few steps", "low rates, narrow heads and many steps"), strict=True):
        run = run_of_arm(arms[f"rd-{name}"])
        yield Claim(
            text=f"RD-AttnRes has a lower loss than Block AttnRes at {words}", kind="lower", arm=f"rd-{name}", parent=f"block-{name}",
            boundary=boundary(run, seeds, f"learning rate {run.train.learning_rate:g}, heads of {run.model.resolved_head_width}"),
        )  # fmt: skip
