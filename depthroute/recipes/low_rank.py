"""The sweep of the Low-Rank paper: key rank by block count, with the baseline, full-width keys, projected keys and the full-RMS control.

Table 5 in full: 40 configurations. The two at N = 8 that the paper repeats, full-width keys and rank d/8, have three seeds; every other has
one, as in the paper, so what is said of it is a direction without an interval. The paper does not print its seeds.

Names of arms are shares, so that both forms have the same: `block6-d8` has blocks of 6 sub-layers and keys of d/8, `full` every sub-layer
as a source. The small form keeps the paper's block sizes (12, 6 and 3 sub-layers; N = 2, 4, 8 of 24 in place of 4, 8, 16 of 48), its ranks
as shares of the width, its MLP ratio, its QK norm and its untied head. What each arm adds in FLOPs is `depthroute.cost`'s to say.

The paper's form has the paper's training (`recipes.models`). The small one has AdamW on every matrix, a cosine, and documents that see each
other; with the paper's training it is a study of its own, `recipes.low_rank_recipe`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from depthroute.model import ModelConfig
from depthroute.recipes.arms import boundary, optimiser_words, run_in
from depthroute.recipes.base import Recipe
from depthroute.recipes.forms import Form
from depthroute.recipes.models import RECIPES
from depthroute.residual import AttnResConfig, ResidualConfig
from depthroute.study.plan import Arm, Claim, Reference, Study
from depthroute.train import RunConfig, TrainConfig

PAPER = "Low-Rank paper"
SEEDS = (1, 2, 3)
MARGIN = 0.003  # nats per token: a tenth of the paper's effect at N = 8, and above the spread of its seeds (0.0018)

WHOLE = Fraction(1)
RANKS = tuple(Fraction(part, 64) for part in (1, 2, 4, 8, 16, 32, 48, 64))  # of the width: 16 to 1,024 of 1,024
SIZES = (1, 12, 6, 3)  # sub-layers a block; 1 is full. 48 of them make N = 4, 8 and 16
REPLICATED = ("block6", "block6-d8")


def _small_shape(residual: ResidualConfig) -> ModelConfig:
    return ModelConfig(
        vocabulary=2_048, width=64, layers=12, heads=4, mlp_width=176, context=128, rope_base=500_000.0, qk_norm=True,
        tied_embeddings=False, residual=residual,
    )  # fmt: skip


SMALL = Recipe(
    description="the Low-Rank paper's 0.5B made small: 12 layers x 64, 4 blocks, rank 8",
    model=_small_shape,
    train=TrainConfig(
        steps=240, sequences=8, learning_rate=3.5e-3, warmup_fraction=0.15, z_loss=1e-5, precision="float32", threads=1,
        evaluation_tokens=65_536,
    ),
    attnres=AttnResConfig(num_blocks=4, rank=8, key_gain=False),
    residual="low-rank",
)  # fmt: skip
BODIES: dict[Form, Recipe] = {"small": SMALL, "paper": RECIPES["lr-0.5b"]}


def with_adamw(made: Recipe) -> Recipe:
    """The recipe with AdamW in place of its groups of parameters, at the rate of its Adam, with a decay of 0.1 on matrices."""
    return replace(made, train=replace(made.train, groups=(), weight_decay=0.1))


@dataclass(frozen=True, kw_only=True)
class Row:
    """A configuration of Table 5: what its keys are, its block size in sub-layers, its rank as a share of the width, the paper's loss."""

    keys: str  # "slice", "projected" or "full-rms"
    size: int
    share: Fraction
    loss: float

    @property
    def name(self) -> str:
        whole = "full" if self.size == 1 else f"block{self.size}"
        rank = "" if self.share == WHOLE else f"-{'' if self.share.numerator == 1 else self.share.numerator}d{self.share.denominator}"
        return {"slice": "", "projected": "projected-", "full-rms": "full-rms-"}[self.keys] + whole + rank


BASELINE = 2.997
# Losses of sliced keys in the order of RANKS, by block size; the last of each row is AttnRes itself. At N = 8 the ranks d/8 and d are means
# of three seeds (section 4.4).
SLICED = {
    1: (2.973, 2.965, 2.960, 2.959, 2.959, 2.958, 2.962, 2.972),
    12: (2.960, 2.953, 2.950, 2.948, 2.956, 2.970, 2.974, 2.976),
    6: (2.958, 2.951, 2.945, 2.944, 2.956, 2.966, 2.969, 2.973),
    3: (2.961, 2.949, 2.946, 2.947, 2.955, 2.953, 2.956, 2.964),
}
PROJECTED = ((1, 1, 2.957), (1, 2, 2.950), (1, 4, 2.947), (12, 2, 2.945), (6, 2, 2.944), (3, 2, 2.951))  # size, 64ths of d, loss
ROWS = (
    *(Row(keys="slice", size=size, share=share, loss=loss) for size in SIZES for share, loss in zip(RANKS, SLICED[size], strict=True)),
    *(Row(keys="projected", size=size, share=Fraction(part, 64), loss=loss) for size, part, loss in PROJECTED),
    Row(keys="full-rms", size=6, share=Fraction(1, 8), loss=2.943),
)


def low_rank_sweep(
    data: Path,
    *,
    form: Form = "small",
    vocabulary: int | None = None,
    end: int | None = None,
    seeds: tuple[int, ...] = (),
    settings: Mapping[str, Any] | None = None,
) -> Study:
    """Eight key ranks by four groupings of sources, and their controls. The headline is rank d/8 against full-width keys at N = 8.

    Args:
        data: folder of the token shards.
        form: "paper" is the 0.5B model on 10B tokens; "small" the same grid on 12 layers x 64 for two cores.
        vocabulary: of the data's tokenizer; None is 100,277 ("paper") or 2,048 ("small").
        end: the token behind each of the data's documents, for recipes that mask documents; None is the recipe's.
        seeds: of the repeated pair; () is 1, 2, 3. Every other arm has the first.
        settings: dotted changes applied to every arm.

    Raises:
        RequestError: a setting that is not one.
    """
    seeds = seeds or SEEDS
    made = BODIES[form]
    base = run_in(made, data, "prenorm", vocabulary=vocabulary, end=end, settings=settings)
    width, sublayers = base.model.width, 2 * base.model.layers
    arms = {"prenorm": Arm(label="PreNorm", config=base, seeds=seeds[:1], paper=_printed(BASELINE, "Table 5"))}
    for row in ROWS:
        rank, blocks = max(1, int(row.share * width)), -(-sublayers // row.size)
        replicated = row.name in REPLICATED
        arms[row.name] = Arm(
            label=_label(row, rank, blocks),
            config=run_in(made, data, _specification(row, rank, blocks), vocabulary=vocabulary, end=end, settings=settings),
            factors={"rank": rank, "blocks": blocks, "keys": row.keys},
            seeds=None if replicated else seeds[:1],
            paper=_printed(row.loss, "section 4.4, mean of three seeds" if replicated else "Table 5"),
        )
    return Study(
        name="Low-rank keys over depth",
        question="In one body, on the same tokens in the same order: how narrow may the keys be by which depth routing chooses its "
        "sources, and does it depend on how sources are grouped?",
        base=base,
        arms=arms,
        comparisons=tuple(dict.fromkeys(_pairs())),
        seeds=seeds,
        claims=_claims(base, len(seeds)),
    )


def _specification(row: Row, rank: int, blocks: int) -> str:
    """The residual specification of a row. Gains on the keys are off throughout: AttnRes here is the paper's rank d."""
    grouping = f"num_blocks={blocks}" if row.size > 1 else "num_blocks=none"
    extra = {"slice": "", "projected": ",keys=projected", "full-rms": ",key_norm=full"}[row.keys]
    return f"low-rank,{grouping},rank={rank}{extra}"


def _label(row: Row, rank: int, blocks: int) -> str:
    sources = "all sources" if row.size == 1 else f"N = {blocks}"
    if row.share == WHOLE:
        return f"AttnRes, {sources}"
    method = "Projected LR-AttnRes" if row.keys == "projected" else "LR-AttnRes"
    return f"{method}, {sources}, r = {rank}" + (", full RMS" if row.keys == "full-rms" else "")


def _pairs() -> Iterator[tuple[str, str]]:
    """What section 4 and Appendix C compare, the repeated pair first."""
    yield REPLICATED[1], REPLICATED[0]
    sliced = {(row.size, row.share): row.name for row in ROWS if row.keys == "slice"}
    for row in ROWS:
        if (row.size, row.share) in sliced and row.keys != "slice":
            yield row.name, sliced[row.size, row.share]  # the same rank and grouping, other keys
        if row.name != sliced[row.size, WHOLE]:
            yield row.name, sliced[row.size, WHOLE]  # the same grouping, full-width keys
    yield "projected-block6-d32", "block6-d8"  # the best of either kind
    for row in ROWS:
        yield row.name, "prenorm"


def _claims(run: RunConfig, seeds: int) -> tuple[Claim, ...]:
    """What the paper says in words. The first is about the repeated pair; one pair gives the others a direction and no interval."""
    optimiser = optimiser_words(run.train)
    several, one = boundary(run, seeds, optimiser), boundary(run, 1, optimiser)

    def claim(kind: Any, arm: str, parent: str, text: str, effect: float, where: str) -> Claim:
        both = arm in REPLICATED and parent in REPLICATED
        return Claim(
            text=text, kind=kind, arm=arm, parent=parent, margin=MARGIN if kind == "equivalent" else 0.0,
            boundary=several if both else one, paper=_printed(effect, where),
        )  # fmt: skip

    return (
        claim("lower", "block6-d8", "block6", "Keys of d/8 have a lower loss than full-width keys, in blocks of 6 sub-layers", -0.02893,
              "section 4.4, three seeds"),
        claim("lower", "block12-d8", "block12", "Keys of d/8 have a lower loss than full-width keys, in blocks of 12", -0.028, "Table 5"),
        claim("lower", "block3-d16", "block3", "Keys of d/16 have a lower loss than full-width keys, in blocks of 3", -0.018, "Table 5"),
        claim("lower", "full-d2", "full", "Keys of d/2 have a lower loss than full-width keys, with all sources", -0.014, "Table 5"),
        claim("lower", "projected-full-d16", "full-d16", "With all sources, projected keys of d/16 have a lower loss than sliced ones",
              -0.01365, "Appendix C.3"),
        claim("equivalent", "full-d64", "full", "With all sources, the narrowest keys are as good as full-width ones", 0.001, "Table 5"),
        claim("equivalent", "full-rms-block6-d8", "block6-d8", "The RMS of the slice or of the whole source makes no difference",
              -0.0008345, "section 4.4"),
        claim("equivalent", "projected-block6-d32", "block6-d8", "The best projected keys are as good as the best sliced ones", 0.0006263,
              "Appendix C.3"),
    )  # fmt: skip


def _printed(value: float, where: str) -> Reference:
    return Reference(value=value, source=f"{PAPER}, {where}")
