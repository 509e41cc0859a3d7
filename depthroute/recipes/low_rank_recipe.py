"""Low-Rank AttnRes with the optimisers that its paper has, and with the one that every other study here has.

The paper trains matrices with Muon, everything else with Adam, masks documents and falls linearly to zero; it compares nothing with AdamW.
In short runs with AdamW narrow keys gave up most of what depth routing gains. Whether the optimiser is why is asked here: PreNorm, Block
AttnRes and Low-Rank AttnRes under both, in the recipe's body, with everything else as the recipe has it. Whether two differences differ is
not tested: three seeds would not show it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from depthroute.common.errors import RequestError
from depthroute.data import EOS
from depthroute.model import ModelConfig
from depthroute.recipes import low_rank
from depthroute.recipes.arms import boundary, optimiser_words, run_in, run_of_arm
from depthroute.recipes.base import Recipe
from depthroute.recipes.forms import Form
from depthroute.recipes.models import LOW_RANK_GROUPS, RECIPES
from depthroute.residual import ResidualConfig
from depthroute.study.plan import Arm, Claim, Reference, Study

SEEDS = (1, 2, 3)


def _small_shape(residual: ResidualConfig) -> ModelConfig:
    return replace(low_rank.SMALL.model(residual), document_end=EOS)


# The sweep's small body and rate with the rest of the recipe, for longer. Muon has Adam's rate, as its updates are scaled to AdamW's: the
# paper's ratio of 3.3 was worse in PreNorm by 0.17 nats after 120 steps, one seed.
SMALL = replace(
    low_rank.SMALL,
    description="the Low-Rank paper's 0.5B and its training made small: 12 layers x 64, 4 blocks, rank 8, Muon",
    model=_small_shape,
    train=replace(
        low_rank.SMALL.train, steps=600, groups=(replace(LOW_RANK_GROUPS[0], rate=1.0), LOW_RANK_GROUPS[1]), schedule="wsd",
        decay_fraction=0.2, final_fraction=0.0,
    ),
)  # fmt: skip
BODIES: dict[Form, Recipe] = {"small": SMALL, "paper": RECIPES["lr-0.5b"]}
OPTIMISERS = {"muon": "Muon on matrices", "adamw": "AdamW"}
MUON_ALONE = ("train.groups", "train.momentum")


def low_rank_recipe_study(
    data: Path,
    *,
    form: Form = "small",
    vocabulary: int | None = None,
    end: int | None = None,
    seeds: tuple[int, ...] = (),
    settings: Mapping[str, Any] | None = None,
) -> Study:
    """PreNorm, Block and Low-Rank AttnRes (rank d/8) with Muon and with AdamW. The headline is Low-Rank against Block with Muon.

    AdamW has the rate of the recipe's Adam and its own usual decay of matrices, 0.1. Both AttnRes arms have keys without a gain, as in
    the paper, whose Block AttnRes is rank d. Small: about a quarter of an hour on two cores.

    Args:
        data: folder of the token shards.
        form: "paper" is the 0.5B model on 10B tokens; "small" the same arms on 12 layers x 64.
        vocabulary: of the data's tokenizer; None is 100,277 ("paper") or 2,048 ("small").
        end: the token behind each of the data's documents; None is that of cl100k ("paper") or of a tokenizer trained here ("small").
        seeds: () is 1, 2, 3.
        settings: dotted changes applied to every arm, but for `train.groups` and `train.momentum`, which are of the arms with Muon alone.

    Raises:
        RequestError: a setting that is not one, or groups without Muon.
    """
    seeds, made = seeds or SEEDS, BODIES[form]
    bodies = {"muon": made, "adamw": low_rank.with_adamw(made)}
    methods = {"prenorm": ("PreNorm", "prenorm"), "block": ("Block AttnRes", "low-rank,rank=none"), "low-rank": ("LR-AttnRes", "low-rank")}
    arms: dict[str, Arm] = {}
    for optimiser, body in bodies.items():
        # Settings are of both optimisers, but for those of Muon's groups: they would turn the arms of AdamW into the others.
        own = {name: value for name, value in (settings or {}).items() if optimiser == "muon" or not name.startswith(MUON_ALONE)}
        for method, (label, specification) in methods.items():
            arms[f"{method}-{optimiser}"] = Arm(
                label=f"{label}, {OPTIMISERS[optimiser]}",
                config=run_in(body, data, specification, vocabulary=vocabulary, end=end, settings=own),
                factors={"method": method, "optimiser": optimiser},
            )

        if run_of_arm(arms[f"prenorm-{optimiser}"]).train.uses_muon != (optimiser == "muon"):
            raise RequestError(f"train.groups leaves the arms {OPTIMISERS[optimiser]!r} without that; give one of the groups to it.")

    def claim(text: str, arm: str, parent: str, effect: Reference | None = None) -> Claim:
        optimisers = dict.fromkeys(optimiser_words(run_of_arm(arms[name]).train) for name in (arm, parent))
        stop = boundary(run_of_arm(arms[arm]), len(seeds), " against ".join(optimisers))
        return Claim(text=text, kind="lower", arm=arm, parent=parent, boundary=stop, paper=effect)

    over_block = Reference(value=-0.02893, source=f"{low_rank.PAPER}, section 4.4, three seeds")
    over_plain = Reference(value=round(2.944 - low_rank.BASELINE, 3), source=f"{low_rank.PAPER}, Table 5")
    claims = (
        claim("With Muon, keys of d/8 have a lower loss than full-width keys", "low-rank-muon", "block-muon", over_block),
        claim("With Muon, keys of d/8 have a lower loss than PreNorm", "low-rank-muon", "prenorm-muon", over_plain),
        claim("With AdamW, keys of d/8 have a lower loss than full-width keys", "low-rank-adamw", "block-adamw"),
        claim("With AdamW, keys of d/8 have a lower loss than PreNorm", "low-rank-adamw", "prenorm-adamw"),
        claim("PreNorm has a lower loss with Muon than with AdamW", "prenorm-muon", "prenorm-adamw"),
    )
    return Study(
        name="Low-rank keys and the optimiser",
        question="Are narrow keys over depth better than full-width ones with the paper's optimisers, and are they with AdamW?",
        base=run_of_arm(arms["prenorm-muon"]),
        arms=arms,
        comparisons=tuple((claim.arm, claim.parent) for claim in claims),
        seeds=seeds,
        differs=("train.groups",),
        claims=claims,
    )
