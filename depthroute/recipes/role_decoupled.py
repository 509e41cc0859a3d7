"""The study of the Role-Decoupled paper: two scales, its parent, its controls, and the crossing of backends that it lacks.

The paper trains Block and RD-AttnRes with five seeds at two scales, and the controls with one seed to a quarter of the tokens. Here every
arm has every seed and the whole horizon, which is the paper's second next test (section 6). PreNorm stands beside them.

The paper's fused and reference kernels are not crossed within seeds (Appendix E). The counterpart here is `phases`: the closed blocks read
ahead for all sites of the open one, or every site read directly. Both are the same function and round differently. Read-ahead is what
every arm uses; the `direct` arms repeat Block and RD without it, with the first three seeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthroute.model import ModelConfig
from depthroute.recipes.arms import boundary, run_in
from depthroute.recipes.base import Recipe
from depthroute.recipes.forms import Form
from depthroute.recipes.models import RECIPES
from depthroute.residual import AttnResConfig, ResidualConfig
from depthroute.study.plan import Arm, Claim, Reference, Study
from depthroute.train import RunConfig, TrainConfig

PAPER = "Role-Decoupled paper"
SEEDS = (123, 2025, 2026, 3407, 7777)  # preregistered by the paper (section 4)
SMALL_SEEDS = (1, 2, 3, 4, 5, 6)  # with five the sign-flip p cannot fall below 0.0625
CROSSED_SEEDS = 3  # of the arms without read-ahead: two leave an interval of one degree of freedom

# In nats per token. Controls: a third of the paper's effect of RD at S. Backends: a tenth of it.
CONTROL_MARGIN = 0.01
BACKEND_MARGIN = 0.003

_ATTNRES = AttnResConfig(layers_per_block=2, first_read=True)


def _small(scale: str, width: int, layers: int, mlp_width: int, learning_rate: float) -> Recipe:
    """A scale for two cores: the paper's head width, MLP ratio (5) and four blocks or more."""

    def shape(residual: ResidualConfig) -> ModelConfig:
        return ModelConfig(
            vocabulary=2_048, width=width, layers=layers, heads=width // 16, mlp_width=mlp_width, context=128, residual=residual
        )

    train = TrainConfig(
        steps=320, sequences=8, learning_rate=learning_rate, warmup_fraction=0.15, precision="float32", threads=1,
        evaluation_tokens=65_536,
    )  # fmt: skip
    return Recipe(
        description=f"the Role-Decoupled paper's {scale} made small: {layers} layers x {width}, blocks of 2 layers",
        model=shape, train=train, attnres=_ATTNRES, residual="rd",
    )  # fmt: skip


SMALL: dict[str, Recipe] = {"S": _small("S", 48, 8, 240, 4e-3), "M": _small("M", 64, 12, 320, 3.5e-3)}
BODIES: dict[Form, dict[str, Recipe]] = {"small": SMALL, "paper": {"S": RECIPES["rd-s"], "M": RECIPES["rd-m"]}}


@dataclass(frozen=True, kw_only=True)
class Printed:
    """What the paper prints about a scale: mean NLL at 2.0B tokens, and the effects of its controls at 0.5B tokens with seed 123.

    `effect` is RD minus Block with its 95 % t interval (Appendix D). The others are differences of Table 2; None was not completed.
    """

    block: float
    rd: float
    effect: tuple[float, tuple[float, float]]
    tied: float | None
    average: float
    frozen: float
    rd_average: float
    rd_frozen: float


# Means over the five seeds of Table 3.
PRINTED = {
    "S": Printed(
        block=3.172384, rd=3.142268, effect=(-0.030118, (-0.033887, -0.026348)), tied=-0.0003, average=-0.0006, frozen=-0.0023,
        rd_average=-0.0416, rd_frozen=-0.0399,
    ),
    "M": Printed(
        block=3.027894, rd=3.003202, effect=(-0.024691, (-0.03957, -0.009812)), tied=None, average=0.0002, frozen=0.0,
        rd_average=-0.039, rd_frozen=-0.0388,
    ),
}  # fmt: skip

# Method, its specification and its label, in the order of training.
METHODS = (
    ("prenorm", "prenorm", "PreNorm"),
    ("block", "block", "Block AttnRes"),
    ("rd", "rd", "RD-AttnRes"),
    ("tied", "rd-tied", "Tied"),
    ("average", "rd-average", "Average"),
    ("frozen-value", "rd-frozen-value", "Frozen-V"),
    ("block-direct", "block,phases=false", "Block AttnRes, read directly"),
    ("rd-direct", "rd,phases=false", "RD-AttnRes, read directly"),
)
# (arm, parent) after the headline. RD stands beside the controls whose effect it must exceed, and the backends are crossed in full.
PAIRS = (
    ("block", "prenorm"),
    ("rd", "prenorm"),
    ("tied", "block"),
    ("average", "block"),
    ("frozen-value", "block"),
    ("rd", "average"),
    ("rd", "frozen-value"),
    ("block-direct", "block"),
    ("rd-direct", "rd"),
    ("rd-direct", "block-direct"),
)


def role_decoupled_study(
    data: Path,
    *,
    form: Form = "small",
    vocabulary: int | None = None,
    end: int | None = None,
    seeds: tuple[int, ...] = (),
    settings: Mapping[str, Any] | None = None,
) -> Study:
    """RD-AttnRes against Block AttnRes at two scales, with PreNorm, three controls and crossed backends. The headline is RD at S.

    Args:
        data: folder of the token shards.
        form: "paper" is the paper's scales, tokens and seeds; "small" the same arms for two cores, with 6 seeds.
        vocabulary: of the data's tokenizer; None is 32,768 ("paper") or 2,048 ("small").
        end: the token behind each of the data's documents, for recipes that mask documents; None is the recipe's.
        seeds: () is the form's own. The arms that are read directly take the first three.
        settings: dotted changes applied to every arm.

    Raises:
        RequestError: a setting that is not one.
    """
    seeds = seeds or (SEEDS if form == "paper" else SMALL_SEEDS)
    crossed = seeds[:CROSSED_SEEDS]
    arms: dict[str, Arm] = {}
    plain = {
        scale: run_in(made, data, "prenorm", vocabulary=vocabulary, end=end, settings=settings) for scale, made in BODIES[form].items()
    }
    for scale, made in BODIES[form].items():
        printed = PRINTED[scale]
        losses = {"block": printed.block, "rd": printed.rd}
        for method, specification, label in METHODS:
            arms[f"{method}-{scale.lower()}"] = Arm(
                label=f"{label}, {scale}",
                config=run_in(made, data, specification, vocabulary=vocabulary, end=end, settings=settings),
                scale=scale,
                factors={"method": method},
                seeds=crossed if method.endswith("-direct") else None,
                paper=_printed(losses[method], "Table 3, mean of five seeds at 2.0B tokens") if method in losses else None,
            )
    return Study(
        name="Role-decoupled routes over depth",
        question="In one body, on the same tokens in the same order: does a depth read of its own for values lower the loss of Block "
        "AttnRes, at both scales, and do tied, averaged or frozen routes do the same?",
        base=plain["S"],
        arms=arms,
        comparisons=(("rd-s", "block-s"), ("rd-m", "block-m"), *((f"{a}-{s}", f"{b}-{s}") for a, b in PAIRS for s in ("s", "m"))),
        seeds=seeds,
        claims=tuple(claim for scale, run in plain.items() for claim in _claims(scale, run, len(seeds), len(crossed))),
    )


def _printed(value: float, where: str, interval: tuple[float, float] | None = None) -> Reference:
    return Reference(value=value, source=f"{PAPER}, {where}", interval=interval)


def _claims(scale: str, run: RunConfig, seeds: int, crossed: int) -> tuple[Claim, ...]:
    """The claims of the paper's ledger (Table 5) that are differences of losses, and what the crossing of backends must show.

    Only these: the p values of all "lower" claims are adjusted together, so what the paper does not claim would weaken what it does.
    """
    printed, small = PRINTED[scale], scale.lower()
    stop, stop_crossed = boundary(run, seeds), boundary(run, crossed, "the two read paths of this code on one machine")
    table = "Table 2, seed 123 at 0.5B tokens"
    tied = None if printed.tied is None else _printed(printed.tied, table)

    def claim(kind: Any, arm: str, parent: str, text: str, paper: Reference | None = None, margin: float = 0.0) -> Claim:
        return Claim(
            text=f"{text} at {scale}", kind=kind, arm=f"{arm}-{small}", parent=f"{parent}-{small}", margin=margin, paper=paper,
            boundary=stop_crossed if "direct" in arm else stop,
        )  # fmt: skip

    return (
        claim("lower", "rd", "block", "RD-AttnRes has a lower loss than Block AttnRes",
              _printed(printed.effect[0], "Appendix D, five seeds at 2.0B tokens", printed.effect[1])),
        claim("lower", "rd", "average", "RD-AttnRes has a lower loss than two averaged routes", _printed(printed.rd_average, table)),
        claim("lower", "rd", "frozen-value", "RD-AttnRes has a lower loss than a uniform value route", _printed(printed.rd_frozen, table)),
        claim("identical", "tied", "block", "RD-AttnRes with tied routes is Block AttnRes", tied),
        claim("equivalent", "average", "block", "Averaging the mixtures of two routes changes nothing against Block AttnRes",
              _printed(printed.average, table), CONTROL_MARGIN),
        claim("equivalent", "frozen-value", "block", "A value route that stays uniform changes nothing against Block AttnRes",
              _printed(printed.frozen, table), CONTROL_MARGIN),
        claim("equivalent", "block-direct", "block", "Reading directly or ahead is the same to Block AttnRes", margin=BACKEND_MARGIN),
        claim("equivalent", "rd-direct", "rd", "Reading directly or ahead is the same to RD-AttnRes", margin=BACKEND_MARGIN),
    )  # fmt: skip
