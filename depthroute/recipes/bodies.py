"""Block AttnRes in two bodies: dense with softmax attention, and the hybrid with experts that its paper trains.

Attention Residuals reports Kimi Linear bodies; its studies here have dense ones in their place. This one has both, of as many active
parameters in their MLPs, with one optimiser, on the same tokens in the same order, and asks in each what Block AttnRes changes. Losses are
compared within a body: between bodies more differs than a name could say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from depthroute.common.errors import RequestError
from depthroute.recipes import kimi
from depthroute.recipes.arms import boundary, optimiser_words, run_in, run_of_arm
from depthroute.recipes.attention_residuals_shapes import TABLE_2, size_body
from depthroute.recipes.base import Recipe
from depthroute.recipes.forms import Form
from depthroute.recipes.models import small
from depthroute.study.plan import Arm, Claim, Reference, Study

PAPER = "Attention Residuals, Table 2"
SEEDS = (1, 2, 3)
SIZE = "XS"  # of Table 2, in the paper's form
METHODS = {"prenorm": "PreNorm", "block": "Block AttnRes"}
BODIES = {"dense": "a dense body with softmax attention", "kimi": "a Kimi body: KDA, latent attention and experts"}


def bodies_of(form: Form) -> dict[str, Recipe]:
    """Both bodies with the training of the Kimi one. Blocks are of as many sub-layers in both."""
    made = kimi.SMALL if form == "small" else kimi.size_recipe(SIZE)
    return {"dense": replace(made, model=small if form == "small" else size_body("paper", SIZE).model), "kimi": made}


def bodies_study(
    data: Path,
    *,
    form: Form = "small",
    vocabulary: int | None = None,
    end: int | None = None,
    seeds: tuple[int, ...] = (),
    settings: Mapping[str, Any] | None = None,
) -> Study:
    """PreNorm and Block AttnRes in a dense body and in a Kimi body. The headline is the Kimi body.

    Small: about a quarter of an hour on two cores.

    Args:
        data: folder of the token shards.
        form: "paper" is the 194M row of Table 2; "small" 8 layers x 96.
        vocabulary: of the data's tokenizer; None is 163,840 ("paper") or 2,048 ("small").
        end: the token behind each of the data's documents, for recipes that mask documents; these do not.
        seeds: () is 1, 2, 3.
        settings: dotted changes applied to every arm.

    Raises:
        RequestError: a setting that is not one, one of `model.kda`, `model.mla`, `model.experts`, which the dense body lacks, or
            `model.mlp_width`, which is not the same in both.
    """
    seeds, arms = seeds or SEEDS, {}
    if "model.mlp_width" in (settings or {}):
        raise RequestError(
            "model.mlp_width is the whole MLP of the dense body and one layer's of the other, so that their active parameters would "
            "differ; leave it out."
        )
    for body, made in bodies_of(form).items():
        for method, label in METHODS.items():
            printed = Reference(value=TABLE_2[SIZE].baseline if method == "prenorm" else TABLE_2[SIZE].block, source=PAPER)
            arms[f"{method}-{body}"] = Arm(
                label=f"{label}, {'dense' if body == 'dense' else 'Kimi'}",
                config=run_in(made, data, method, vocabulary=vocabulary, end=end, settings=settings),
                scale=body,
                factors={"method": method, "body": body},
                paper=printed if body == "kimi" else None,
            )
    effect = Reference(value=round(TABLE_2[SIZE].block - TABLE_2[SIZE].baseline, 3), source=f"{PAPER}, one run each")
    claims = tuple(
        Claim(
            text=f"Block AttnRes has a lower loss than PreNorm in {words}", kind="lower", arm=f"block-{body}", parent=f"prenorm-{body}",
            boundary=boundary(run_of_arm(arms[f"block-{body}"]), len(seeds), optimiser_words(run_of_arm(arms[f"block-{body}"]).train)),
            paper=effect if body == "kimi" else None,
        )
        for body, words in reversed(BODIES.items())
    )  # fmt: skip
    return Study(
        name="Block AttnRes in a dense and in a Kimi body",
        question="On the same tokens in the same order: what does Block AttnRes bring in a dense body, and what in the body of its paper?",
        base=run_of_arm(arms["prenorm-kimi"]),
        arms=arms,
        comparisons=tuple((claim.arm, claim.parent) for claim in claims),
        seeds=seeds,
        claims=claims,
    )
