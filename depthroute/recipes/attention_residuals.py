"""The studies of the Attention Residuals paper in one body of 16 layers: its ablations (Table 4) and its block sizes (Figure 6).

The paper trains every arm once. One run has no interval, so there are three seeds in the paper's form and six in the small one. The bodies
stand for the paper's, which are mixtures of experts with linear attention: see attention_residuals_shapes.py. Every comparison is of an
arm that has something with a parent that lacks it, so a negative difference speaks for the paper's choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from depthroute.recipes.arms import boundary, run_in
from depthroute.recipes.attention_residuals_shapes import ablation_recipe
from depthroute.recipes.forms import Form
from depthroute.study.design import ClaimKind
from depthroute.study.plan import Arm, Claim, Reference, Study
from depthroute.train import RunConfig

PAPER = "Attention Residuals"
SEEDS: dict[Form, tuple[int, ...]] = {"paper": (1, 2, 3), "small": (1, 2, 3, 4, 5, 6)}
SUBSTITUTION = "a dense decoder with softmax attention where the paper has experts and linear attention, matched in active parameters"
SHAPE = "a dense decoder with softmax attention, the paper's proportions at a small size"
MARGIN = 0.005  # nats, of what the paper finds equal: 0.000 to 0.002 there

# Arm, label, specification, the paper's loss. The input-independent weights pass a softmax here, the query of the token is projected from
# the newest source, and sigmoids are not normalised; the paper does not say. mHC is the full one, with four streams.
ABLATIONS = (
    ("baseline", "PreNorm", "prenorm", 1.766),
    ("denseformer", "DenseFormer", "denseformer", 1.767),
    ("mhc", "mHC", "mhc", 1.747),
    ("full", "Full AttnRes", "full", 1.737),
    ("full-input-dependent-query", "Full, query of the token", "dynamic-query", 1.731),
    ("full-input-independent-mixing", "Full, input-independent mixing", "static", 1.749),
    ("full-sigmoid", "Full, sigmoid", "sigmoid", 1.741),
    ("full-no-key-norm", "Full, no key norm", "no-key-norm", 1.743),
    ("full-sliding-window-1-plus-8", "Full, the embedding and the last 8", "window:8", 1.764),
    ("block-4", "Block AttnRes, 4 sub-layers", "block:4", 1.746),
    ("block-16-heads", "Block, 16 heads", "mhar-block:4,heads=16", 1.752),
    ("block-no-key-norm", "Block, no key norm", "block:4,key_norm=none,key_gain=false", 1.750),
)
# Kind, arm, parent and what is claimed, in the order of section 5.3; the first two are the headline.
ABLATION_CLAIMS: tuple[tuple[ClaimKind, str, str, str], ...] = (
    ("lower", "full", "baseline", "Full AttnRes has a lower loss than PreNorm"),
    ("lower", "block-4", "baseline", "Block AttnRes has a lower loss than PreNorm"),
    ("equivalent", "denseformer", "baseline", "DenseFormer has the loss of PreNorm"),
    ("lower", "mhc", "baseline", "mHC has a lower loss than PreNorm"),
    ("lower", "full", "mhc", "Full AttnRes has a lower loss than mHC"),
    ("lower", "full", "block-4", "Full AttnRes has a lower loss than Block AttnRes"),
    ("lower", "full-input-dependent-query", "full", "A query of the token has a lower loss than one of the site"),
    ("lower", "full", "full-input-independent-mixing", "Full AttnRes has a lower loss than weights that no input moves"),
    ("lower", "full", "full-sigmoid", "A softmax over depth has a lower loss than sigmoids"),
    ("lower", "full", "full-no-key-norm", "Normalised keys have a lower loss in Full AttnRes"),
    ("lower", "full", "full-sliding-window-1-plus-8", "All sources have a lower loss than the embedding and the last 8"),
    ("lower", "block-4", "full-sliding-window-1-plus-8", "Blocks over the whole depth have a lower loss than the last 8 outputs"),
    ("lower", "block-4", "block-16-heads", "One depth mixture has a lower loss than one for each of 16 groups of channels"),
    ("lower", "block-4", "block-no-key-norm", "Normalised keys have a lower loss in Block AttnRes"),
)

# Sub-layers a block and the paper's loss. Blocks of one sub-layer are Full AttnRes.
BLOCK_SIZES = {1: 1.737, 2: 1.746, 4: 1.746, 8: 1.748, 16: 1.753, 32: 1.757}
BLOCK_SIZE_CLAIMS: tuple[tuple[ClaimKind, str, str, str], ...] = (
    ("lower", "block-4", "baseline", "Blocks of 4 sub-layers have a lower loss than PreNorm"),
    ("lower", "full", "baseline", "Full AttnRes has a lower loss than PreNorm"),
    ("lower", "block-2", "baseline", "Blocks of 2 sub-layers have a lower loss than PreNorm"),
    ("lower", "block-8", "baseline", "Blocks of 8 sub-layers have a lower loss than PreNorm"),
    ("lower", "block-16", "baseline", "Blocks of 16 sub-layers have a lower loss than PreNorm"),
    ("lower", "block-32", "baseline", "One block beside the embedding has a lower loss than PreNorm"),
    ("identical", "block-1", "full", "Blocks of one sub-layer are Full AttnRes"),
    ("lower", "full", "block-4", "Full AttnRes has a lower loss than blocks of 4 sub-layers"),
    ("equivalent", "block-4", "block-2", "Blocks of 4 and of 2 sub-layers have the same loss"),
    ("equivalent", "block-4", "block-8", "Blocks of 4 and of 8 sub-layers have the same loss"),
    ("lower", "block-4", "block-32", "Blocks of 4 sub-layers have a lower loss than one block"),
)


def attnres_ablations(
    data: Path,
    *,
    form: Form = "small",
    vocabulary: int | None = None,
    end: int | None = None,
    seeds: tuple[int, ...] = (),
    settings: Mapping[str, Any] | None = None,
) -> Study:
    """Every row of Table 4: prior methods, and Full and Block AttnRes without one of their parts. The headline is Full against PreNorm.

    Small: about an hour on two cores.

    Args:
        data: folder of the token shards.
        form: "paper" is the 16 layers, width 1,168 and 87.9 billion tokens of the paper; "small" the same arms 64 wide.
        vocabulary: of the data's tokenizer; None is 163,840 ("paper") or 2,048 ("small").
        end: the token behind each of the data's documents, for recipes that mask documents; None is the recipe's.
        seeds: () is the form's own.
        settings: dotted changes applied to every arm.

    Raises:
        RequestError: a setting that is not one.
    """
    made, seeds = ablation_recipe(form), seeds or SEEDS[form]
    arms = {
        name: Arm(
            label=label,
            config=run_in(made, data, specification, vocabulary=vocabulary, end=end, settings=settings),
            paper=Reference(value=loss, source=f"{PAPER}, Table 4"),
        )
        for name, label, specification, loss in ABLATIONS
    }
    return _study(
        "Ablations of Attention Residuals",
        "In one body, on the same tokens in the same order: what do earlier methods and each part of Attention Residuals bring?",
        arms, ABLATION_CLAIMS, seeds, form, "Table 4",
    )  # fmt: skip


def attnres_block_size(
    data: Path,
    *,
    form: Form = "small",
    vocabulary: int | None = None,
    end: int | None = None,
    seeds: tuple[int, ...] = (),
    settings: Mapping[str, Any] | None = None,
) -> Study:
    """Figure 6: blocks of 1 to 32 sub-layers, PreNorm and Full AttnRes. The headline is blocks of 4 against PreNorm.

    Blocks of one sub-layer are a control for the first seed alone: they must repeat Full AttnRes bit for bit. Small: half an hour on
    two cores.

    Args:
        data: folder of the token shards.
        form: as in `attnres_ablations`, whose body this is.
        vocabulary: of the data's tokenizer; None is the form's.
        end: the token behind each of the data's documents, for recipes that mask documents; None is the recipe's.
        seeds: () is the form's own.
        settings: dotted changes applied to every arm.

    Raises:
        RequestError: a setting that is not one.
    """
    made, seeds = ablation_recipe(form), seeds or SEEDS[form]

    def arm(label: str, specification: str, loss: float, size: int | None = None, of: tuple[int, ...] | None = None) -> Arm:
        return Arm(
            label=label,
            config=run_in(made, data, specification, vocabulary=vocabulary, end=end, settings=settings),
            factors={} if size is None else {"sublayers_per_block": size},
            seeds=of,
            paper=Reference(value=loss, source=f"{PAPER}, Figure 6"),
        )

    arms = {"baseline": arm("PreNorm", "prenorm", 1.766), "full": arm("Full AttnRes", "full", BLOCK_SIZES[1], 1)}
    for size, loss in BLOCK_SIZES.items():
        label = f"Blocks of {size}" if size > 1 else "Blocks of 1, control"
        arms[f"block-{size}"] = arm(label, f"block:{size}", loss, size if size > 1 else None, None if size > 1 else seeds[:1])
    return _study(
        "Block sizes of Attention Residuals",
        "In one body, on the same tokens in the same order: how does the loss depend on how many sub-layers are summed into one source?",
        arms, BLOCK_SIZE_CLAIMS, seeds, form, "Figure 6",
    )  # fmt: skip


def stops(run: RunConfig, seeds: int, form: Form, *more: str) -> str:
    """Where a claim of these studies stops."""
    return boundary(run, seeds, SUBSTITUTION if form == "paper" else SHAPE, *more)


def effect(arms: Mapping[str, Arm], arm: str, parent: str, where: str) -> Reference | None:
    """The paper's difference of two arms, where it prints both. Its losses have three decimals."""
    ours, theirs = arms[arm].paper, arms[parent].paper
    if ours is None or theirs is None:
        return None
    return Reference(value=round(ours.value - theirs.value, 3), source=f"{PAPER}, {where}, one run each")


def _study(
    name: str, question: str, arms: Mapping[str, Arm], claims: tuple[tuple[ClaimKind, str, str, str], ...], seeds: tuple[int, ...],
    form: Form, where: str,
) -> Study:  # fmt: skip
    base = arms["baseline"].config
    assert isinstance(base, RunConfig)

    def claim(kind: ClaimKind, arm: str, parent: str, text: str) -> Claim:
        number = len(arms[arm].seeds or seeds)
        return Claim(
            text=text, kind=kind, arm=arm, parent=parent, margin=MARGIN if kind == "equivalent" else 0.0,
            boundary=stops(base, number, form), paper=effect(arms, arm, parent, where),
        )  # fmt: skip

    return Study(
        name=name, question=question, base=base, arms=arms, comparisons=tuple((arm, parent) for _, arm, parent, _ in claims), seeds=seeds,
        claims=tuple(claim(*given) for given in claims),
    )  # fmt: skip
