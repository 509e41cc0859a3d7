"""The Kimi bodies of Attention Residuals: what its table prints, and how far the parameters are from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from depthroute.common.errors import RequestError
from depthroute.model import Decoder, ModelConfig
from depthroute.model.published import kimi_linear_48b
from depthroute.recipes import recipe
from depthroute.recipes.attention_residuals_shapes import TABLE_2, size_body
from depthroute.recipes.bodies import bodies_study
from depthroute.recipes.models import RECIPES
from depthroute.residual import AttnResConfig, PreNormConfig

# Active parameters without embedding and head, in percent beside what is printed. Nothing was fitted: 64 experts, and a dense layer as wide
# as the active experts, are choices of ours.
DIFFERENCES = {"XS": -2.7, "S": -2.4, "M": -2.2, "L": -1.9, "XL": -1.8}


def active(config: ModelConfig) -> int:
    """Parameters that a token uses, without embedding, head and residual method."""
    with torch.device("meta"):
        decoder = Decoder(config)
    assert config.experts is not None
    unused = (config.experts.number - config.experts.chosen) * 3 * config.width * config.experts.width
    inside = sum(parameter.numel() for name, parameter in decoder.named_parameters() if name.startswith("layers."))
    return inside - unused * sum(map(config.has_experts, range(config.layers)))


@pytest.mark.parametrize("size", TABLE_2)
def test_the_sizes_of_the_table(size: str) -> None:
    row, made = TABLE_2[size], recipe(f"kimi-{size.lower()}")
    shape, train = made.resolve(), made.train
    assert (shape.layers, shape.heads, shape.width, shape.context) == (row.layers, row.heads, row.width, 8_192)
    assert shape.residual == AttnResConfig(num_blocks=8)
    assert shape.experts is not None
    assert (shape.experts.width, shape.experts.chosen, shape.experts.shared) == (row.expert_width, 8, 1)
    mixers = [shape.mixer(layer) for layer in range(shape.layers)]
    assert mixers[:8] == ["kda", "kda", "kda", "mla"] * 2 and mixers[-1] == "mla"
    assert not shape.has_experts(0) and all(map(shape.has_experts, range(1, shape.layers)))
    assert (train.learning_rate, train.sequences, train.schedule, train.optimiser) == (row.learning_rate, row.sequences, "cosine", "muon")
    assert train.steps * train.sequences * shape.context == pytest.approx(row.tokens * 1e9, rel=1e-4)
    plain, dense = made.resolve("prenorm"), size_body("paper", size)
    assert round(100 * (active(plain) / 1e6 / row.active - 1), 1) == DIFFERENCES[size]
    assert dense.parameters < active(plain)  # the dense body that stands for it lacks gates and routers


def test_the_large_run() -> None:
    made = recipe("kimi-48b")
    assert made.resolve("prenorm") == kimi_linear_48b(PreNormConfig())
    method, train, context = made.resolve().residual, made.train, made.resolve().context
    assert isinstance(method, AttnResConfig) and set(method.block_ends(54)) == set(range(6, 55, 6))
    assert (train.sequences * context, train.schedule) == (8 * 2**20, "wsd")
    assert train.steps * train.sequences * context == pytest.approx(1e12, rel=1e-5)
    rates = [row.learning_rate * (row.active / 3_000) ** 0.39 for row in TABLE_2.values()]
    assert all(train.learning_rate == pytest.approx(rate, rel=0.05) for rate in rates)  # what the table's rates come to at 3B


def test_the_small_body_is_the_small_recipe_but_for_its_parts() -> None:
    kimi, dense = recipe("kimi-small").resolve("prenorm"), recipe("small").resolve("prenorm")
    for name in ("vocabulary", "width", "layers", "heads", "context", "mlp_width", "tied_embeddings"):
        assert getattr(kimi, name) == getattr(dense, name), name
    assert kimi.experts is not None and (kimi.experts.chosen + kimi.experts.shared) * kimi.experts.width == dense.mlp_width


def test_block_is_compared_with_prenorm_within_a_body_and_bodies_are_trained_alike() -> None:
    study = bodies_study(Path("none"))
    assert study.comparisons == (("block-kimi", "prenorm-kimi"), ("block-dense", "prenorm-dense"))
    runs = {name: study.config_of(name) for name in study.arms}
    assert len({run.train for run in runs.values()}) == 1 and next(iter(runs.values())).train.optimiser == "muon"
    assert {name: run.model.experts is not None for name, run in runs.items()} == {name: name.endswith("kimi") for name in runs}
    assert runs["block-kimi"].model.residual == runs["block-dense"].model.residual == AttnResConfig(block=4)


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith("kimi")])
def test_biases_can_cross_the_scores_within_a_run(name: str) -> None:
    """A score is between 0 and 1, so a bias that moves by less in all steps cannot bring a lost expert back."""
    made = RECIPES[name]
    experts = made.model(PreNormConfig()).experts
    assert experts is not None and experts.balance_rate * made.train.steps > 2


def test_widths_that_would_part_the_bodies_are_refused() -> None:
    with pytest.raises(RequestError, match="mlp_width is the whole MLP of the dense body"):
        bodies_study(Path("none"), settings={"model.mlp_width": "240"})
