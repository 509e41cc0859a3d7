"""The bodies of the Attention Residuals paper as dense decoders: its five sizes, and its grid of widths and heads.

The paper trains Kimi Linear: three layers in four with linear attention (KDA), the fourth with latent attention (MLA), no positions, and
a mixture of experts in every layer: `recipes.kimi`. Here the bodies are dense, with softmax attention and rotary positions, which is a
question of its own and costs less. What stands for what:

- An MLP of 9 expert widths: eight routed experts and a shared one. The paper says so of its 48B model only, but this count gives the
  active parameters that Table 2 prints for every size, less 3 to 6 % (182M for 194M, 512M for 528M). What is missing are routers, the
  gates and decays of KDA, and a first layer with a wider dense MLP.
- Heads of 128, as in Kimi Linear. They are then 1.7 times as wide as the model together, because Table 2 has one head a layer.
- Layers, heads, widths, rates, batches and tokens are the table's. Its optimiser is not named; AdamW stands for it. The vocabulary and the
  separate head are Kimi Linear's, the share of the warm-up is Kimi K3's. Weight decay, the last rate and the base of the rotary positions
  are this library's choice.

The small bodies have the same proportions: a head a layer (of 16), heads 1.7 times as wide as the model, an MLP of 4 widths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from depthroute.cost.flops import core_flops
from depthroute.model import ModelConfig
from depthroute.recipes.base import Recipe
from depthroute.recipes.forms import Form
from depthroute.residual import AttnResConfig, ResidualConfig
from depthroute.train import TrainConfig

EXPERTS = 9  # that a token uses: eight routed and a shared one
MLP_RATIO = EXPERTS * 0.45  # of the grid (Figure 7: an expert is about 0.45 widths)


class Printed(NamedTuple):
    """A row of Table 2: active parameters in millions without embeddings, tokens in billions, losses in nats per token."""

    active: int
    tokens: float
    layers: int
    heads: int
    width: int
    expert_width: int
    learning_rate: float
    sequences: int
    baseline: float
    block: float
    full: float
    mhc: float


TABLE_2 = {
    "XS": Printed(194, 38.7, 12, 12, 896, 400, 2.99e-3, 192, 1.931, 1.909, 1.899, 1.906),
    "S": Printed(241, 45.4, 13, 13, 960, 432, 2.80e-3, 256, 1.895, 1.875, 1.874, 1.869),
    "M": Printed(296, 62.1, 14, 14, 1_024, 464, 2.50e-3, 320, 1.829, 1.809, 1.804, 1.807),
    "L": Printed(436, 87.9, 16, 16, 1_168, 528, 2.20e-3, 384, 1.766, 1.746, 1.737, 1.747),
    "XL": Printed(528, 119.0, 17, 17, 1_264, 560, 2.02e-3, 432, 1.719, 1.693, 1.692, 1.694),
}

# Layers and heads, width, sequences a step. Layers to width as in the table; the batch grows with the parameters, so that all take about
# as many steps, also as there.
SMALL = {"XS": (5, 48, 8), "S": (6, 56, 12), "M": (7, 64, 16), "L": (8, 72, 24), "XL": (10, 92, 40)}
SMALL_TOKENS = 2.0  # for each parameter outside the embedding; the paper's runs have 188 to 225
RATE_AT_96 = 4e-3  # of the recipe `small`; a rate is this at a width of 96 and goes down as the width goes up (in Table 2: as width^-1.1)


@dataclass(frozen=True, kw_only=True)
class Body:
    """A decoder's sizes in one form."""

    form: Form
    layers: int
    width: int
    heads: int
    mlp_width: int

    @property
    def head_width(self) -> int:
        return HEAD_WIDTH[self.form]

    @property
    def parameters(self) -> int:
        """Of the layers' matrices, which are their multiply-adds per token: no embedding, head, norm or residual method."""
        return core_flops(self.layers, self.width, self.mlp_width, attention_width=self.heads * self.head_width)

    def model(self, residual: ResidualConfig) -> ModelConfig:
        small = self.form == "small"
        return ModelConfig(
            vocabulary=2_048 if small else 163_840, width=self.width, layers=self.layers, heads=self.heads, mlp_width=self.mlp_width,
            context=128 if small else 8_192, head_width=self.head_width, rope_base=10_000.0 if small else 500_000.0,
            norm_eps=1e-6 if small else 1e-5, tied_embeddings=small, residual=residual,
        )  # fmt: skip

    def recipe(self, *, tokens: float, sequences: int, learning_rate: float, attnres: AttnResConfig) -> Recipe:
        """This body trained on so many tokens, rounded to whole steps."""
        steps = round(tokens / (sequences * self.model(attnres).context))
        if self.form == "small":
            train = TrainConfig(
                steps=steps, sequences=sequences, learning_rate=learning_rate, warmup_fraction=0.15, precision="float32", threads=1,
                evaluation_tokens=65_536,
            )  # fmt: skip
        else:
            train = TrainConfig(
                steps=steps, sequences=sequences, microbatch=2, learning_rate=learning_rate, warmup_fraction=0.01,
                evaluation_tokens=10_485_760,
            )  # fmt: skip
        return Recipe(
            description=f"Attention Residuals, {self.form}: {self.layers} layers x {self.width}, {self.parameters / 1e6:.3g}M parameters",
            model=self.model, train=train, attnres=attnres, residual="block" if attnres.has_blocks else "full",
        )  # fmt: skip


HEAD_WIDTH: dict[Form, int] = {"small": 16, "paper": 128}


def size_body(form: Form, size: str) -> Body:
    """One of the five sizes, "XS" to "XL"."""
    if form == "small":
        layers, width, _ = SMALL[size]
        return Body(form=form, layers=layers, width=width, heads=layers, mlp_width=4 * width)
    row = TABLE_2[size]
    return Body(form=form, layers=row.layers, width=row.width, heads=row.heads, mlp_width=EXPERTS * row.expert_width)


def size_recipe(form: Form, size: str, attnres: AttnResConfig) -> Recipe:
    """One of the five sizes and how it is trained.

    Small: two tokens a parameter, and 4e-3 x 96 / width as the rate. A size's compute then grows with the square of its parameters.
    """
    body = size_body(form, size)
    if form == "small":
        return body.recipe(
            tokens=SMALL_TOKENS * body.parameters, sequences=SMALL[size][2], learning_rate=small_rate(body.width), attnres=attnres
        )
    row = TABLE_2[size]
    return body.recipe(tokens=row.tokens * 1e9, sequences=row.sequences, learning_rate=row.learning_rate, attnres=attnres)


def size_label(form: Form, size: str) -> str:
    """The active parameters of a size: the table's, or ours."""
    return f"{TABLE_2[size].active}M" if form == "paper" else f"{size_body(form, size).parameters / 1e6:.1f}M"


def small_rate(width: int) -> float:
    return RATE_AT_96 * 96 / width


def ablation_recipe(form: Form) -> Recipe:
    """The body of the ablations (Table 4) and of the block sizes (Figure 6): 16 layers, the paper's at 436M.

    Small: 16 layers too, because blocks of 32 sub-layers and a window of 8 outputs among 32 need them, but only 64 wide; 320 steps.
    """
    if form == "paper":
        return size_recipe(form, "L", AttnResConfig())
    body = Body(form=form, layers=16, width=64, heads=7, mlp_width=256)
    return body.recipe(tokens=320 * 8 * 128, sequences=8, learning_rate=small_rate(64), attnres=AttnResConfig())


# The grid of Figure 7. Small: a fifth of the width per layer, and so many heads of 16 that they are as wide beside the model as there.
WIDTHS_PER_LAYER: dict[Form, tuple[float, ...]] = {"paper": (15, 30, 45, 60, 75), "small": (3, 6, 9, 12, 15)}
HEADS_PER_LAYER: dict[Form, tuple[float, ...]] = {"paper": (0.7, 0.6, 0.5, 0.4, 0.3), "small": (1.12, 0.96, 0.8, 0.64, 0.48)}
GRID_PARAMETERS: dict[Form, float] = {"paper": 2.3e8, "small": 0.8e6}
GRID_FLOPS = 6.5e19  # of training in the paper's form: 6 x parameters x tokens, which makes 47.1 billion tokens
GRID_SIZE: dict[Form, str] = {"paper": "S", "small": "L"}  # the size of the scaling study with about as many parameters: its rate and batch
GRID_STEP: dict[Form, int] = {"paper": 8, "small": 2}  # what widths are multiples of


def grid_body(form: Form, width_per_layer: float, heads_per_layer: float) -> Body:
    """The body of one cell of the grid: whole numbers near d = w L, H = h L and an MLP of 4.05 d with the grid's parameters N.

    N = L (4 d a H + 3 d m) with heads of a and an MLP of m, so L = (N / (w (4 a h + 12.15 w)))^(1/3) before rounding. Layers and heads are
    few, and rounding them alone would move N by a tenth; so L, H, d are searched nearby, m is what N leaves, and the body with the
    least sum of squared relative deviations (log) of d/L, H/L and m/d is taken. N is then met within 0.1 % (paper) or 0.3 % (small), and
    what the axes say within 5.1 % and 7.2 % (paper: d/L and H/L) or 8.4 % and 11.7 % (small); neighbours on an axis, 17 % apart or more by
    their names, stay 5 % apart.
    """
    budget, head, step = GRID_PARAMETERS[form], HEAD_WIDTH[form], GRID_STEP[form]
    middle = (budget / (width_per_layer * (4 * head * heads_per_layer + 3 * MLP_RATIO * width_per_layer))) ** (1 / 3)
    found: list[tuple[float, Body]] = []
    for layers in range(max(1, math.floor(middle) - 1), math.ceil(middle) + 2):
        exact_width, exact_heads = width_per_layer * layers, heads_per_layer * layers
        for heads in {max(1, math.floor(exact_heads)), math.ceil(exact_heads)}:
            for width in range(step * math.ceil(0.9 * exact_width / step), math.floor(1.1 * exact_width) + 1, step):
                left = (budget / layers - 4 * width * head * heads) / (3 * width)
                mlp_width = max(step, step * round(left / step))
                off = (width / exact_width, heads / exact_heads, mlp_width / (MLP_RATIO * width))
                body = Body(form=form, layers=layers, width=width, heads=heads, mlp_width=mlp_width)
                found.append((math.fsum(math.log(one) ** 2 for one in off), body))
    return min(found, key=lambda pair: pair[0])[1]


def grid_recipe(form: Form, width_per_layer: float, heads_per_layer: float) -> Recipe:
    """A cell of the grid and how it is trained: the same tokens, batch and rate in every cell."""
    body = grid_body(form, width_per_layer, heads_per_layer)
    of_size = size_recipe(form, GRID_SIZE[form], AttnResConfig()).train
    tokens = GRID_FLOPS / (6 * GRID_PARAMETERS[form]) if form == "paper" else SMALL_TOKENS * GRID_PARAMETERS[form]
    return body.recipe(tokens=tokens, sequences=of_size.sequences, learning_rate=of_size.learning_rate, attnres=AttnResConfig())
