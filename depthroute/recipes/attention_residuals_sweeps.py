"""The studies of the Attention Residuals paper over bodies: its scaling law (Table 2, Figure 4) and its grid of shapes (Figure 7).

The bodies stand for the paper's, which are mixtures of experts with linear attention: see attention_residuals_shapes.py. The paper trains
every cell once; three seeds here, because one run has no interval.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from depthroute.recipes.arms import run_in
from depthroute.recipes.attention_residuals import MARGIN, PAPER, effect, stops
from depthroute.recipes.attention_residuals_shapes import (
    HEADS_PER_LAYER,
    TABLE_2,
    WIDTHS_PER_LAYER,
    grid_body,
    grid_recipe,
    size_label,
    size_recipe,
)
from depthroute.recipes.forms import Form
from depthroute.residual import AttnResConfig
from depthroute.study.plan import Arm, Claim, Reference, Study
from depthroute.train import RunConfig

SEEDS = (1, 2, 3)

# Method, label, specification. The paper's mHC is the "lite" one, whose mixing is made of permutations; here it is the full one.
METHODS = (
    ("baseline", "PreNorm", "prenorm"),
    ("block", "Block AttnRes", "block"),
    ("full", "Full AttnRes", "full"),
    ("mhc", "mHC", "mhc"),
)
SCALING_PAIRS = (("block", "baseline"), ("full", "baseline"), ("mhc", "baseline"), ("full", "block"))
# About as many sub-layers in a block as the paper's 8 blocks have, 3 to 4.25; the small sizes have 10 to 20.
BLOCKS: dict[Form, int] = {"paper": 8, "small": 4}
ADVANTAGE = 1.25  # of Block at 5.6 PFLOP/s-days (section 5.1)

# Losses of Figure 7 by heads a layer, most first, and width per layer, least first.
FIGURE_7 = {
    "baseline": (
        (2.017, 1.909, 1.875, 1.851, 1.858),
        (1.990, 1.902, 1.862, 1.852, 1.862),
        (1.973, 1.883, 1.859, 1.849, 1.854),
        (1.952, 1.868, 1.850, 1.849, 1.857),
        (1.926, 1.857, 1.851, 1.847, 1.858),
    ),
    "attnres": (
        (1.954, 1.890, 1.843, 1.828, 1.824),
        (1.931, 1.863, 1.830, 1.817, 1.818),
        (1.917, 1.841, 1.819, 1.812, 1.817),
        (1.893, 1.823, 1.815, 1.813, 1.813),
        (1.877, 1.816, 1.802, 1.806, 1.820),
    ),
}
GRID_METHODS = (("baseline", "PreNorm", "prenorm"), ("attnres", "Full AttnRes", "full"))
# The cells with the lowest loss, as positions on both axes: heads of the last row, and the widths that each method likes best.
FEW_HEADS, ATTNRES_BEST, BASELINE_BEST = 4, 2, 3


def attnres_scaling(
    data: Path,
    *,
    form: Form = "small",
    vocabulary: int | None = None,
    end: int | None = None,
    seeds: tuple[int, ...] = (),
    settings: Mapping[str, Any] | None = None,
) -> Study:
    """Table 2 and Figure 4: PreNorm, Block, Full and mHC at five sizes, and the compute that they save. The headline is Block at XL.

    Every size has its own steps, batch and rate, those of Table 2 or of `size_recipe`; the methods of a size share them, as the paper
    tuned them for its baseline alone. Small: 1.6 decades of training compute at two tokens a parameter, a night on two cores.

    Args:
        data: folder of the token shards.
        form: "paper" is 194M to 528M active parameters and 38.7 to 119 billion tokens; "small" 0.2M to 1.6M parameters.
        vocabulary: of the data's tokenizer; None is the form's.
        end: the token behind each of the data's documents, for recipes that mask documents; None is the recipe's.
        seeds: () is the recipe's own.
        settings: dotted changes applied to every arm of every size.

    Raises:
        RequestError: a setting that is not one.
    """
    seeds = seeds or SEEDS
    arms: dict[str, Arm] = {}
    for size, row in TABLE_2.items():
        made = size_recipe(form, size, AttnResConfig(num_blocks=BLOCKS[form]))
        scale = size_label(form, size)
        for method, label, specification in METHODS:
            arms[f"{method}-{size.lower()}"] = Arm(
                label=f"{label}, {scale}",
                config=run_in(made, data, specification, vocabulary=vocabulary, end=end, settings=settings),
                scale=scale,
                factors={"method": method},
                paper=Reference(value=getattr(row, method), source=f"{PAPER}, Table 2"),
            )
    sizes = [size.lower() for size in reversed(TABLE_2)]
    return Study(
        name="Scaling of Attention Residuals",
        question="Over five sizes, each on the same tokens in the same order: how much compute do Block and Full AttnRes save?",
        base=_run(arms["baseline-xl"]),
        arms=arms,
        comparisons=tuple((f"{arm}-{size}", f"{parent}-{size}") for size in sizes for arm, parent in SCALING_PAIRS),
        seeds=seeds,
        claims=_scaling_claims(arms, len(seeds), form),
    )


def attnres_architecture(
    data: Path,
    *,
    form: Form = "small",
    vocabulary: int | None = None,
    end: int | None = None,
    seeds: tuple[int, ...] = (),
    settings: Mapping[str, Any] | None = None,
) -> Study:
    """Figure 7: PreNorm and Full AttnRes in 25 bodies of equal parameters and compute, from deep and narrow to shallow and wide.

    `grid_body` solves the shapes. Compute is counted as in the paper, 6 x parameters x tokens, and is the same in all cells because the
    tokens are. Softmax attention adds what the paper's linear attention does not: its scores are 0.26 to 2.9 times the matrices' work at
    the paper's context and 0.05 to 0.54 times in the small form, most where there are many layers and heads. The two methods of a cell
    have it alike; comparisons of one shape with another do not.

    All 25 pairs are compared. Claims are made of the best cells alone, at the fewest heads: a correction for 25 of them would ask more
    than three seeds can show. The figure does not say whether its AttnRes has blocks; here it has none. One rate serves all shapes. Small:
    a night on two cores.

    Args:
        data: folder of the token shards.
        form: "paper" is 230M active parameters and 6.5e19 FLOPs; "small" 0.8M parameters on two tokens each.
        vocabulary: of the data's tokenizer; None is the form's.
        end: the token behind each of the data's documents, for recipes that mask documents; None is the recipe's.
        seeds: () is the recipe's own.
        settings: dotted changes applied to every arm of every shape.

    Raises:
        RequestError: a setting that is not one.
    """
    seeds = seeds or SEEDS
    arms: dict[str, Arm] = {}
    for row, heads in enumerate(HEADS_PER_LAYER[form]):
        for column, width in enumerate(WIDTHS_PER_LAYER[form]):
            made, body = grid_recipe(form, width, heads), grid_body(form, width, heads)
            for method, label, specification in GRID_METHODS:
                arms[_cell(method, form, row, column)] = Arm(
                    label=f"{label}, {body.layers} layers x {body.width}, {body.heads} heads",
                    config=run_in(made, data, specification, vocabulary=vocabulary, end=end, settings=settings),
                    factors={"method": method, "width_per_layer": width, "heads_per_layer": heads},
                    paper=Reference(value=FIGURE_7[method][row][column], source=f"{PAPER}, Figure 7"),
                )
    best, wider = (_cell("attnres", form, FEW_HEADS, column) for column in (ATTNRES_BEST, BASELINE_BEST))
    plain_deeper, plain_best = (_cell("baseline", form, FEW_HEADS, column) for column in (ATTNRES_BEST, BASELINE_BEST))
    claims = (
        (best, plain_deeper, "AttnRes has a lower loss than PreNorm in the shape that suits AttnRes"),
        (wider, plain_best, "AttnRes has a lower loss than PreNorm in the shape that suits PreNorm"),
        (best, plain_best, "AttnRes in its best shape has a lower loss than PreNorm in its own"),
        (best, wider, "AttnRes has a lower loss in the deeper and narrower shape"),
        (plain_best, plain_deeper, "PreNorm has a lower loss in the shallower and wider shape"),
    )
    cells = [(row, column) for row in range(len(HEADS_PER_LAYER[form])) for column in range(len(WIDTHS_PER_LAYER[form]))]
    within = ((_cell("attnres", form, *cell), _cell("baseline", form, *cell)) for cell in cells)
    base = _run(arms[plain_best])
    stop = stops(base, len(seeds), form, "one learning rate for all shapes")
    return Study(
        name="Shapes for Attention Residuals",
        question="At equal parameters and compute: which depth, width and heads suit PreNorm, and which AttnRes?",
        base=base,
        arms=arms,
        comparisons=tuple(dict.fromkeys((*((arm, parent) for arm, parent, _ in claims), *within))),
        seeds=seeds,
        differs=("model.layers", "model.width", "model.heads", "model.mlp_width"),
        claims=tuple(
            Claim(text=text, kind="lower", arm=arm, parent=parent, boundary=stop, paper=effect(arms, arm, parent, "Figure 7"))
            for arm, parent, text in claims
        ),
    )


def _scaling_claims(arms: Mapping[str, Arm], seeds: int, form: Form) -> tuple[Claim, ...]:
    """What section 5.1 and Figure 4 say: compute saved, lower losses at both ends, and Block near Full at the largest size."""
    small, large = (_run(arms[f"block-{size}"]) for size in ("xs", "xl"))
    law = stops(large, seeds, form, f"a power law over five sizes from {small.model.layers} layers x {small.model.width}")
    advantage = Reference(value=ADVANTAGE, source=f"{PAPER}, section 5.1, at 5.6 PFLOP/s-days", unit="times the compute")
    saves = (
        ("block", 1.0, "Block AttnRes saves compute", advantage),
        ("block", ADVANTAGE, f"Block AttnRes saves more than the factor of the paper, {ADVANTAGE}", advantage),
        ("full", 1.0, "Full AttnRes saves compute", None),
        ("mhc", 1.0, "mHC saves compute", None),
    )

    def lower(arm: str, size: str, text: str) -> Claim:
        pair = (f"{arm}-{size}", f"baseline-{size}")
        paper = effect(arms, *pair, "Table 2")
        words, stop = f"{text} has a lower loss than PreNorm at {arms[pair[0]].scale}", stops(_run(arms[pair[0]]), seeds, form)
        return Claim(text=words, kind="lower", arm=pair[0], parent=pair[1], boundary=stop, paper=paper)

    return (
        *(
            Claim(text=text, kind="saves", arm=arm, parent="baseline", margin=margin, boundary=law, paper=paper)
            for arm, margin, text, paper in saves
        ),
        *(lower(arm, size, text) for arm, text in (("block", "Block AttnRes"), ("full", "Full AttnRes")) for size in ("xl", "xs")),
        Claim(
            text=f"Full and Block AttnRes have the same loss at {arms['full-xl'].scale}", kind="equivalent", arm="full-xl",
            parent="block-xl", margin=MARGIN, boundary=stops(large, seeds, form), paper=effect(arms, "full-xl", "block-xl", "Table 2"),
        ),
    )  # fmt: skip


def _cell(method: str, form: Form, row: int, column: int) -> str:
    return f"{method}-w{WIDTHS_PER_LAYER[form][column]:g}-h{HEADS_PER_LAYER[form][row]:g}"


def _run(arm: Arm) -> RunConfig:
    assert isinstance(arm.config, RunConfig)
    return arm.config
