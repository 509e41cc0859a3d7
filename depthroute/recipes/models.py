"""The papers' model shapes and training recipes, and a small one that learns in minutes on two cores.

A recipe is a function from a residual method to a run; `RECIPES` names them. The data is the user's.
"""

from __future__ import annotations

from collections.abc import Callable

from depthroute.common.errors import RequestError, choose
from depthroute.model import ModelConfig
from depthroute.recipes import kimi
from depthroute.recipes.base import Recipe
from depthroute.residual import AttnResConfig, ResidualConfig
from depthroute.train import TrainConfig
from depthroute.train.config import ParameterGroup


def role_decoupled_s(residual: ResidualConfig) -> ModelConfig:
    """Shape S of the Role-Decoupled paper (Table 4)."""
    return ModelConfig(
        vocabulary=32_768, width=576, layers=16, heads=36, mlp_width=2_880, context=1_024, rope_base=10_000.0, residual=residual
    )


def role_decoupled_m(residual: ResidualConfig) -> ModelConfig:
    """Shape M of the Role-Decoupled paper (Table 4)."""
    return ModelConfig(
        vocabulary=32_768, width=832, layers=24, heads=52, mlp_width=4_160, context=1_024, rope_base=10_000.0, residual=residual
    )


def _low_rank_shape(width: int, layers: int, heads: int, mlp_width: int) -> Callable[[ResidualConfig], ModelConfig]:
    """A shape of the Low-Rank paper (sections 4.1 and 4.5): QK-norm, untied head, masked documents, the cl100k vocabulary and its end."""

    def shape(residual: ResidualConfig) -> ModelConfig:
        return ModelConfig(
            vocabulary=100_277, width=width, layers=layers, heads=heads, mlp_width=mlp_width, context=2_048, rope_base=500_000.0,
            qk_norm=True, tied_embeddings=False, document_end=100_257, residual=residual,
        )  # fmt: skip

    return shape


def small(residual: ResidualConfig) -> ModelConfig:
    """Eight layers that learn technical prose in a minute; heads of 16 and an MLP of 5 widths as in the Role-Decoupled paper."""
    return ModelConfig(vocabulary=2_048, width=96, layers=8, heads=6, mlp_width=480, context=128, residual=residual)


# Role-Decoupled paper, section 4 and C.2. Both scales see 32 sequences a step.
_ROLE_DECOUPLED = AttnResConfig(layers_per_block=4, first_read=True)
_ROLE_DECOUPLED_MILESTONES = (7_630, 15_259, 30_518, 61_036)


def _role_decoupled_training(learning_rate: float, microbatch: int) -> TrainConfig:
    return TrainConfig(
        steps=61_036, sequences=32, microbatch=microbatch, learning_rate=learning_rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1,
        warmup_fraction=0.02, final_fraction=0.1, gradient_clip=1.0, seed=123, milestones=_ROLE_DECOUPLED_MILESTONES,
        evaluation_tokens=10_485_760,
    )  # fmt: skip


# Muon's learning rate is 1e-3 and Adam's 3e-4. Muon has the matrices of attention and MLPs; embedding, head, norms and routes are Adam's.
# The paper does not say how its Muon scales an update. Here that is as in Moonlight, so that a rate moves a matrix about as far as AdamW
# would; with the scale that Muon came with, 1e-3 moves a matrix of 1,024 by 1,024 a sixth as far.
MUON_RATE = 1e-3 / 3e-4
LOW_RANK_GROUPS = (
    ParameterGroup(
        parameters="layers[.][0-9]+[.](attention|mlp)[.](query|key|value|output|gate|up|down)[.]weight", optimiser="muon", rate=MUON_RATE,
        weight_decay=0.1,
    ),
    ParameterGroup(parameters=".*", weight_decay=0.0),
)  # fmt: skip


def _low_rank_training(tokens: float) -> TrainConfig:
    """Section 4.1: 262,144 tokens a step, Muon and Adam (`LOW_RANK_GROUPS`), 2,000 steps of warm-up, a linear fall over the last fifth."""
    steps = round(tokens / 262_144)
    return TrainConfig(
        steps=steps, sequences=128, microbatch=2, learning_rate=3e-4, betas=(0.9, 0.95), momentum=0.95, groups=LOW_RANK_GROUPS,
        schedule="wsd", warmup_fraction=2_000 / steps, decay_fraction=0.2, final_fraction=0.0, z_loss=1e-5, gradient_clip=1.0,
        evaluation_tokens=100_000_000,
    )  # fmt: skip


def _low_rank(name: str, width: int, layers: int, heads: int, mlp_width: int, rank: int, tokens: float) -> Recipe:
    return Recipe(
        description=f"Low-Rank paper, {name}: {layers} layers x {width}, 8 blocks, rank {rank}",
        model=_low_rank_shape(width, layers, heads, mlp_width),
        train=_low_rank_training(tokens),
        attnres=AttnResConfig(num_blocks=8, rank=rank, key_gain=False),
        residual="low-rank",
    )


# At this width bf16 autocast is slower than float32 on a processor that has it, and one thread a run is the best use of two cores.
_SMALL_TRAINING = TrainConfig(
    steps=400, sequences=8, learning_rate=4e-3, warmup_fraction=0.15, precision="float32", threads=1, evaluation_tokens=65_536
)

RECIPES: dict[str, Recipe] = {
    "small": Recipe(
        description="8 layers x 96, MLP 480, context 128, blocks of 4 layers: the first study, a minute a run",
        model=small,
        train=_SMALL_TRAINING,
        attnres=AttnResConfig(block=8),
        residual="rd",
    ),
    "rd-s": Recipe(
        description="Role-Decoupled paper, S: 16 layers x 576, blocks of 4 layers, 120M parameters, 2.0B tokens",
        model=role_decoupled_s,
        train=_role_decoupled_training(3e-4, 8),
        attnres=_ROLE_DECOUPLED,
        residual="rd",
    ),
    "rd-m": Recipe(
        description="Role-Decoupled paper, M: 24 layers x 832, blocks of 4 layers, 343M parameters, 2.0B tokens",
        model=role_decoupled_m,
        train=_role_decoupled_training(2e-4, 4),
        attnres=_ROLE_DECOUPLED,
        residual="rd",
    ),
    "lr-0.5b": _low_rank("0.5B", 1_024, 24, 16, 2_816, 128, 10e9),
    "lr-1b": _low_rank("1B", 1_536, 24, 24, 4_224, 384, 20e9),
    "lr-4b": _low_rank("4B", 2_560, 44, 40, 7_040, 640, 20e9),
    **{f"kimi-{size.lower()}": kimi.size_recipe(size) for size in kimi.SIZES},
    "kimi-48b": kimi.RECIPE_48B,
    "kimi-small": kimi.SMALL,
}


def recipe(name: str) -> Recipe:
    """The recipe of that name; RequestError with the nearest right one otherwise."""
    if name not in RECIPES:
        raise RequestError(choose("recipe", name, RECIPES))
    return RECIPES[name]
