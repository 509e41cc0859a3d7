"""The bodies that the Attention Residuals paper trains: Kimi Linear in the five sizes of its Table 2 and at 48B, and one for two cores.

Three layers in four have linear attention (KDA), the fourth and the last latent attention (MLA), none has positions; every layer but the
first has experts, of which a token uses eight and a shared one. The dense stand-ins of attention_residuals_shapes.py are beside them.

The table has layers, heads, widths, expert widths, rates, batches and tokens. What it does not say, and what stands for it:

- Experts in a layer: 64. It changes what is stored, not what a token uses, but for 0.6M to 1.3M of routers.
- The width of the first layer's dense MLP: nine expert widths, what a token uses in the others. In the 48B model it is that too.
- Head width (128), latent width (512), shared key (64), vocabulary, separate head, epsilon, and the factor of the routed experts (2.446):
  Kimi Linear's, as far as it is published.
- The optimiser: the paper names Muon for its 48B model alone. Warm-up: one step in a hundred, Kimi K3's. Weight decay and the last rate are
  this library's choice.
- The peak rate of the 48B model: 1.0e-3. The table's rates fall with the active parameters, to the power -0.39, and come to that at 3B.
  The share of the steps in which it falls: a fifth.
"""

from __future__ import annotations

from depthroute.model import ModelConfig
from depthroute.model.bodies import ExpertsConfig, KDAConfig, MLAConfig
from depthroute.model.published import LINEAR_LAYERS_PER_BLOCK, PATTERN, kimi_linear_48b
from depthroute.recipes.attention_residuals_shapes import EXPERTS, TABLE_2
from depthroute.recipes.base import Recipe
from depthroute.residual import AttnResConfig, ResidualConfig
from depthroute.train import TrainConfig

SIZES = tuple(TABLE_2)
ROUTED, CHOSEN = 64, EXPERTS - 1
SCALING = 2.446


def size_shape(size: str, residual: ResidualConfig) -> ModelConfig:
    """One of the five sizes, "XS" to "XL"."""
    row = TABLE_2[size]
    return ModelConfig(
        vocabulary=163_840, width=row.width, layers=row.layers, heads=row.heads, head_width=128, mlp_width=EXPERTS * row.expert_width,
        context=8_192, mixers=PATTERN, last_mixer="mla", kda=KDAConfig(), mla=MLAConfig(latent=512, shared_key=64),
        experts=ExpertsConfig(number=ROUTED, chosen=CHOSEN, width=row.expert_width, shared=1, dense_layers=1, scaling=SCALING),
        tied_embeddings=False, norm_eps=1e-5, residual=residual,
    )  # fmt: skip


def size_recipe(size: str) -> Recipe:
    """One of the five sizes as the paper trains it, Block AttnRes with eight blocks."""
    row = TABLE_2[size]
    return Recipe(
        description=f"Attention Residuals, {size}: Kimi Linear, {row.layers} layers x {row.width}, {row.active}M active as printed, "
        f"{row.tokens:g}B tokens",
        model=lambda residual: size_shape(size, residual),
        train=TrainConfig(
            steps=round(row.tokens * 1e9 / (row.sequences * 8_192)), sequences=row.sequences, microbatch=1,
            learning_rate=row.learning_rate, optimiser="muon", warmup_fraction=0.01, evaluation_tokens=10_485_760,
        ),
        attnres=AttnResConfig(num_blocks=8),
        residual="block",
    )  # fmt: skip


# Section 5.2: 8M tokens a step, a trillion in all, before what the paper calls mid-training.
RECIPE_48B = Recipe(
    description="Attention Residuals, 48B: Kimi Linear 48B-A3B, blocks of 3 layers, 1T tokens",
    model=kimi_linear_48b,
    train=TrainConfig(
        steps=round(1e12 / (2_048 * 4_096)), sequences=2_048, microbatch=1, learning_rate=1.0e-3, optimiser="muon", schedule="wsd",
        warmup_fraction=0.01, decay_fraction=0.2, evaluation_tokens=10_485_760,
    ),
    attnres=AttnResConfig(layers_per_block=LINEAR_LAYERS_PER_BLOCK),
    residual="block",
)  # fmt: skip


def small_shape(residual: ResidualConfig) -> ModelConfig:
    """The recipe `small` with a Kimi body: 8 layers x 96, heads of 16, two of 8 experts and a shared one, 480 wide together as its MLP.

    The factor of the routed experts is the square root of how many are chosen, as 2.446 is of the six that it was made for (Moonlight).
    The biases of the router move 20 times as far a step as in a long run: at 0.001 a hundred steps send all tokens of a layer to two of its
    experts, and 400 are too few to bring them back.
    """
    return ModelConfig(
        vocabulary=2_048, width=96, layers=8, heads=6, mlp_width=480, context=128, mixers=PATTERN, last_mixer="mla", kda=KDAConfig(),
        mla=MLAConfig(latent=24, shared_key=8),
        experts=ExpertsConfig(number=8, chosen=2, width=160, shared=1, dense_layers=1, scaling=1.414, balance_rate=0.02),
        residual=residual,
    )  # fmt: skip


SMALL = Recipe(
    description="8 layers x 96 as a Kimi body: KDA and MLA 3:1, 2 of 8 experts, context 128, blocks of 2 layers",
    model=small_shape,
    train=TrainConfig(
        steps=400, sequences=8, learning_rate=4e-3, optimiser="muon", warmup_fraction=0.15, precision="float32", threads=1,
        evaluation_tokens=65_536,
    ),
    attnres=AttnResConfig(block=4),
    residual="block",
)  # fmt: skip
