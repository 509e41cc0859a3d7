"""Studies as functions of the data they are run on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from depthroute.common.errors import RequestError, choose
from depthroute.recipes.arms import boundary
from depthroute.recipes.base import Recipe
from depthroute.residual import SPECIFICATIONS, AttnResConfig, parse_residual
from depthroute.study.plan import Arm, Claim, Study
from depthroute.train import RunConfig

DEFAULT_ARMS = ("prenorm", "block", "rd")
# Whose learning rate a baseline study checks: one method of each family beside the plain stream.
CHECKED = ("prenorm", "postnorm", "muddformer", "mhc", "block", "value-residual")
RATES = {"half": 0.5, "double": 2.0}
NEEDED = {"low-rank": "low-rank,rank={rank}"}  # what a method's name alone does not say

MILESTONES = (1 / 4, 1 / 2, 3 / 4, 1)  # of the steps, where the recipe names none


def matched_study(recipe: Recipe, base: RunConfig, *, arms: tuple[str, ...], seeds: tuple[int, ...]) -> Study:
    """A study of one body with several residual methods, each compared with the first, and separate roles also with shared ones.

    Args:
        recipe: what short residual specifications start from.
        base: the run that the arms share.
        arms: residual specifications, the parent first: `("prenorm", "block", "rd")`. An arm may be named: `"wide=block:8"`.
        seeds: one pair a seed.

    Raises:
        RequestError: fewer than two arms, a name twice, or a specification that is not one.
    """
    if len(arms) < 2:
        raise RequestError(f"a study compares at least two arms; it was given {len(arms)}.")
    made: dict[str, Arm] = {}
    for text in arms:
        name, specification = _name(text)
        if name in made:
            raise RequestError(f"the arm {name!r} is there twice; name one of them: --arm NAME={specification}.")
        model = dataclasses.replace(base.model, residual=parse_residual(specification, recipe.attnres))
        made[name] = Arm(label=_label(name, specification), config=dataclasses.replace(base, model=model))
    parent, *others = made
    comparisons = [(other, parent) for other in others] + _role_comparisons(made, others)
    steps = base.train.steps
    milestones = base.train.milestones or sorted({max(1, round(share * steps)) for share in MILESTONES})
    names = ", ".join(made[other].label for other in others)
    asked = f"what {'does' if len(others) == 1 else 'do'} {names} change against {made[parent].label}, at what cost?"
    return Study(
        name=f"{names} against {made[parent].label}",
        question=f"In one body, on the same tokens in the same order: {asked}",
        base=base,
        arms=made,
        comparisons=tuple(comparisons),
        seeds=seeds,
        milestones=tuple(dict.fromkeys((*milestones, steps))),
        claims=tuple(
            Claim(
                text=f"{made[arm].label} has a lower loss than {made[other].label}", kind="lower", arm=arm, parent=other,
                boundary=boundary(base, len(seeds)),
            )
            for arm, other in comparisons
        ),
    )  # fmt: skip


def baseline_study(recipe: Recipe, base: RunConfig, *, seeds: tuple[int, ...], methods: tuple[str, ...] = ()) -> Study:
    """Every residual method in one body, on the same batches, against the plain stream; and a learning-rate check in every family.

    The methods named in `CHECKED` are trained once more at half and at twice the learning rate, against themselves, so that a reader sees
    whether a method is held back by a rate that was chosen for another.

    Args:
        methods: names of methods beside the plain stream; none is all of them.

    Raises:
        RequestError: an unknown method.
    """
    for name in methods:
        if name not in SPECIFICATIONS:
            raise RequestError(f"methods: {choose('residual method', name, SPECIFICATIONS)}")
    names = ("prenorm", *(name for name in methods or SPECIFICATIONS if name != "prenorm"))
    rank = max(1, base.model.width // 4)
    arms = tuple(f"{name}={NEEDED[name].format(rank=rank)}" if name in NEEDED else name for name in names)
    study = matched_study(recipe, base, arms=arms, seeds=seeds)
    named = {name: dataclasses.replace(arm, label=SPECIFICATIONS[name].label) for name, arm in study.arms.items()}
    checks: dict[str, Arm] = {}
    for name in CHECKED:
        if name in study.arms:
            for words, factor in RATES.items():
                config = study.arms[name].config
                assert isinstance(config, RunConfig)
                train = dataclasses.replace(config.train, learning_rate=factor * config.train.learning_rate)
                label = f"{SPECIFICATIONS[name].label}, {words} rate"
                checks[f"{name}-{words}-rate"] = Arm(label=label, config=dataclasses.replace(config, train=train))
    pairs = [(check, check.removesuffix("-rate").rpartition("-")[0]) for check in checks]
    parent = [(name, "prenorm") for name in names if name != "prenorm"]
    return dataclasses.replace(
        study,
        name="Residual methods in one body",
        question="In one body, on the same tokens in the same order: what does each way of connecting sub-layers change against the plain "
        "stream, at what cost?",
        arms={**named, **checks},
        comparisons=(*parent, *pairs),
        claims=(),  # a survey: it asks what each method does and says nothing beforehand
        differs=("train.learning_rate",),
    )


def _role_comparisons(arms: Mapping[str, Arm], others: list[str]) -> list[tuple[str, str]]:
    """Every arm with decoupled roles beside the arm that differs from it in nothing else."""
    methods = {name: arm.config.model.residual for name, arm in arms.items() if isinstance(arm.config, RunConfig)}
    pairs = []
    for name in others:
        method = methods[name]
        if isinstance(method, AttnResConfig) and method.roles == "decoupled":
            shared = dataclasses.replace(method, roles="shared")
            pairs += [(name, other) for other in others if methods[other] == shared]
    return pairs


def _label(name: str, specification: str) -> str:
    """What a report calls an arm: its method's name with the settings, or the name that it was given."""
    method = specification.partition(",")[0].partition(":")[0]
    if name == _name(specification)[0]:
        settings = specification[len(method) :].lstrip(":,").replace(",", ", ")
        label = SPECIFICATIONS[method].label
        return f"{label} ({settings})" if settings else label
    return name


def _name(text: str) -> tuple[str, str]:
    """`NAME=SPECIFICATION`, or a specification that names itself: `block:8,rank=16` is `block-8-rank-16`."""
    head, equals, rest = text.partition("=")
    if equals and "," not in head and ":" not in head:
        return head, rest
    return text.replace(":", "-").replace(",", "-").replace("=", "-"), text
