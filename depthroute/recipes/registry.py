"""The studies of the papers, and of what the papers leave open, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from depthroute.common.errors import RequestError, choose
from depthroute.data import PrepareConfig
from depthroute.recipes import (
    attention_residuals,
    attention_residuals_sweeps,
    bodies,
    crossed,
    low_rank,
    low_rank_recipe,
    multi_hop,
    next_tests,
    role_decoupled,
    route_rate,
)
from depthroute.recipes.forms import Form
from depthroute.study.plan import Study


class BuildStudy(Protocol):
    """A study as a function of the data that it is run on. RequestError where a setting or a seed is refused."""

    def __call__(
        self,
        data: Path,
        *,
        form: Form = "small",
        vocabulary: int | None = None,
        end: int | None = None,
        seeds: tuple[int, ...] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> Study:
        """The study in one of its forms.

        Args:
            data: the folder of the token shards.
            vocabulary: that of the data's tokenizer; None is the recipe's.
            end: the token behind each of the data's documents, for recipes that mask documents; None is the recipe's.
            seeds: () is the recipe's own.
            settings: dotted changes to every arm's run (`{"train.steps": "100"}`).
        """
        ...


@dataclass(frozen=True, kw_only=True)
class StudyRecipe:
    """A study by name. `data` says what it is trained on unless the user brings data, for a vocabulary."""

    description: str
    build: BuildStudy
    data: Callable[[int], PrepareConfig] = lambda vocabulary: PrepareConfig(vocabulary=vocabulary)


STUDIES: dict[str, StudyRecipe] = {
    "role-decoupled": StudyRecipe(
        description="Role-Decoupled paper: RD, Block and PreNorm at two scales, with Tied, Average, Frozen-V and both read paths",
        build=role_decoupled.role_decoupled_study,
    ),
    "rd-horizon": StudyRecipe(
        description="longer training: the decay branches from one stable trunk, Block and RD", build=next_tests.rd_horizon
    ),
    "rd-block-size": StudyRecipe(description="Block and RD over block sizes", build=next_tests.rd_block_size),
    "rd-route-rate": StudyRecipe(
        description="Block and RD at two scales, routes at the body's rate and faster", build=next_tests.rd_route_rate
    ),
    "rd-context": StudyRecipe(description="Block and RD over context lengths", build=next_tests.rd_context),
    "low-rank": StudyRecipe(description="Low-Rank paper: eight ranks in full and three block forms", build=low_rank.low_rank_sweep),
    "attnres-ablations": StudyRecipe(
        description="Attention Residuals, Table 4: every ablation", build=attention_residuals.attnres_ablations
    ),
    "attnres-block-size": StudyRecipe(
        description="Attention Residuals, Figure 6: sub-layers per block", build=attention_residuals.attnres_block_size
    ),
    "attnres-scaling": StudyRecipe(
        description="Attention Residuals, Table 2: power laws over five sizes", build=attention_residuals_sweeps.attnres_scaling
    ),
    "attnres-architecture": StudyRecipe(
        description="Attention Residuals, Figure 7: 25 shapes at fixed compute and parameters",
        build=attention_residuals_sweeps.attnres_architecture,
    ),
    "multi-hop": StudyRecipe(
        description="composition of 1 to 4 look-ups in shallow and deep bodies", build=multi_hop.multi_hop_study, data=multi_hop.data
    ),
    "route-rate": StudyRecipe(
        description="key rank crossed with the learning rate of the routes: are narrow keys worse, or slower?",
        build=route_rate.route_rate_study,
    ),
    "crossed": StudyRecipe(
        description="which of learning rates, head width and length decides between Block, low-rank keys and RD",
        build=crossed.crossed_study,
    ),
    "bodies": StudyRecipe(description="Block AttnRes in a dense body and in a Kimi body of experts", build=bodies.bodies_study),
    "low-rank-recipe": StudyRecipe(
        description="Low-Rank paper: PreNorm, Block and low-rank keys with its own optimisers and with AdamW",
        build=low_rank_recipe.low_rank_recipe_study,
    ),
}


def study_recipe(name: str) -> StudyRecipe:
    """The study of that name; RequestError with the nearest right one otherwise."""
    if name not in STUDIES:
        raise RequestError(choose("study", name, STUDIES))
    return STUDIES[name]
