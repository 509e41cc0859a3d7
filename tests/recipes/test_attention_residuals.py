"""The studies of the Attention Residuals paper hold what it prints, in pairs that differ in what they name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from depthroute.common.errors import RequestError
from depthroute.cost.work import body_work, routing_work
from depthroute.model import Decoder, ModelConfig
from depthroute.recipes.attention_residuals import attnres_ablations, attnres_block_size
from depthroute.recipes.attention_residuals_shapes import GRID_PARAMETERS, MLP_RATIO, size_body
from depthroute.recipes.attention_residuals_sweeps import attnres_architecture, attnres_scaling
from depthroute.recipes.forms import Form
from depthroute.residual import AttnResConfig, PreNormConfig, ResidualConfig
from depthroute.residual.denseformer import DenseFormerConfig
from depthroute.residual.dynamic import DynamicQueryConfig
from depthroute.residual.mhc import MHCConfig
from depthroute.residual.schedule import block_ends
from depthroute.residual.static import StaticMixConfig
from depthroute.study.compute import token_compute
from depthroute.study.plan import Study, plan_of
from depthroute.train import RunConfig

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "attention_residuals.json").read_text(encoding="utf-8"))
ROWS = [dict(zip(GOLDEN["scaling_runs"]["columns"], row, strict=True)) for row in GOLDEN["scaling_runs"]["rows"]]
SIZES = ("xs", "s", "m", "l", "xl")
FORMS: tuple[Form, ...] = get_args(Form)
GRID_METHODS = ("attnres", "baseline")
STUDIES: tuple[Callable[..., Study], ...] = (attnres_ablations, attnres_block_size, attnres_scaling, attnres_architecture)

both_forms = pytest.mark.parametrize("form", FORMS)
every_study = pytest.mark.parametrize("make", STUDIES, ids=lambda make: make.__name__)


def made(make: Callable[..., Study], form: Form, **options: Any) -> Study:
    return make(Path("no-such-folder"), form=form, **options)


def run(study: Study, arm: str) -> RunConfig:
    config = study.arms[arm].config
    assert isinstance(config, RunConfig)
    return config


def losses(study: Study) -> dict[str, float]:
    return {name: arm.paper.value for name, arm in study.arms.items() if arm.paper is not None}


def changed(left: ResidualConfig, right: ResidualConfig) -> dict[str, Any]:
    """The fields of `left` that differ from those of `right`, a method of the same kind."""
    assert type(left) is type(right)
    return {field.name: getattr(left, field.name) for field in fields(left) if getattr(left, field.name) != getattr(right, field.name)}


@every_study
@both_forms
def test_plans_are_matched_and_models_can_be_built(make: Callable[..., Study], form: Form) -> None:
    study = made(make, form)
    plan = plan_of(replace(study, base=replace(study.base, data_fingerprint="0" * 64)))  # refuses unmatched pairs and stray claims
    assert [arm["name"] for arm in plan["arms"]] == list(study.arms)
    for name in study.arms:
        config = study.config_of(name)
        with torch.device("meta"):
            counts = Decoder(config.model).parameter_counts()
        matrices = counts["total"] - counts["residual"] - counts["embedding"]
        norms = matrices - body_work(config.model)
        assert 0 < norms < 0.03 * matrices  # the rest are gains
        assert config.train.milestones[-1] == config.train.steps and len(config.train.milestones) == 4
        if form == "small":
            assert (config.train.precision, config.train.threads, config.model.vocabulary) == ("float32", 1, 2_048)


@every_study
def test_the_small_form_has_everything_of_the_papers(make: Callable[..., Study]) -> None:
    def structure(study: Study) -> Any:
        place = {name: index for index, name in enumerate(study.arms)}
        number = [len(study.seeds_of(name)) == len(study.seeds) for name in study.arms]
        return (
            [(sorted(arm.factors), bool(arm.scale), arm.paper) for arm in study.arms.values()],
            number,
            [(place[arm], place[parent]) for arm, parent in study.comparisons],
            [(c.kind, place.get(c.arm, c.arm), place.get(c.parent, c.parent), c.margin, c.paper) for c in study.claims],
            study.differs,
        )

    assert structure(made(make, "small")) == structure(made(make, "paper"))


@every_study
@both_forms
def test_an_effect_is_the_difference_of_the_papers_losses(make: Callable[..., Study], form: Form) -> None:
    study = made(make, form)
    printed = losses(study)
    assert len(printed) == len(study.arms)
    for claim in study.claims:
        assert claim.boundary
        if claim.kind == "saves":
            continue
        assert claim.paper is not None
        assert claim.paper.value == pytest.approx(printed[claim.arm] - printed[claim.parent], abs=1e-9)
        # The direction of a claim is the paper's, and what it calls equal is within the margin there too.
        within = abs(claim.paper.value) < claim.margin if claim.kind == "equivalent" else claim.paper.value <= 0
        assert within, claim.text


@every_study
@both_forms
def test_options_reach_every_arm(make: Callable[..., Study], form: Form) -> None:
    study = made(make, form, vocabulary=999, seeds=(5, 6), settings={"train.steps": "40", "train.sequences": "2"})
    assert study.seeds == (5, 6)
    for name in study.arms:
        config = run(study, name)
        assert (config.model.vocabulary, config.train.steps, config.train.sequences) == (999, 40, 2)
        assert config.train.milestones == (5, 10, 20, 40)
    assert run(made(make, form, settings={"train.milestones": "[7]", "train.steps": "40"}), next(iter(study.arms))).train.milestones == (7,)
    with pytest.raises(RequestError, match=r"train\.stepz"):
        made(make, form, settings={"train.stepz": "1"})


@both_forms
def test_the_ablations_are_every_row_of_the_table(form: Form) -> None:
    study = made(attnres_ablations, form)
    assert losses(study) == {name.replace("_", "-"): loss for name, loss in GOLDEN["ablations_436M"].items()}
    methods: dict[str, ResidualConfig] = {name: run(study, name).model.residual for name in study.arms}
    full, block = methods["full"], methods["block-4"]
    assert full == AttnResConfig() and changed(block, full) == {"block": 4}
    assert methods["baseline"] == PreNormConfig()
    assert methods["denseformer"] == DenseFormerConfig()
    assert methods["mhc"] == MHCConfig(streams=4)
    assert methods["full-input-dependent-query"] == DynamicQueryConfig(query_from="latest")
    assert methods["full-input-independent-mixing"] == StaticMixConfig()
    assert changed(methods["full-sigmoid"], full) == {"weighting": "sigmoid"}
    assert changed(methods["full-no-key-norm"], full) == {"key_norm": "none", "key_gain": False}
    assert changed(methods["full-sliding-window-1-plus-8"], full) == {"window": 8}
    assert changed(methods["block-16-heads"], block) == {"heads": 16}
    assert changed(methods["block-no-key-norm"], block) == {"key_norm": "none", "key_gain": False}
    # Every row but the baseline's is compared, and full and block stand beside the baseline first.
    assert study.comparisons[:2] == (("full", "baseline"), ("block-4", "baseline"))
    assert {name for pair in study.comparisons for name in pair} == set(study.arms)
    bodies = {replace(run(study, name).model, residual=PreNormConfig()) for name in study.arms}
    assert len(bodies) == 1 and bodies.pop().layers == 16


@both_forms
def test_block_sizes(form: Form) -> None:
    study, sweep = made(attnres_block_size, form), GOLDEN["block_size_sweep"]
    sizes = {arm.factors["sublayers_per_block"]: name for name, arm in study.arms.items() if arm.factors}
    assert list(sizes) == sweep["sublayers_per_block"]
    assert [losses(study)[name] for name in sizes.values()] == sweep["loss"]
    assert losses(study)["baseline"] == sweep["baseline"]
    for size, name in sizes.items():
        method, model = run(study, name).model.residual, run(study, name).model
        assert isinstance(method, AttnResConfig) and isinstance(size, int)
        assert method.block_ends(2 * model.layers) == block_ends(2 * model.layers, block=size)
    control, full = run(study, "block-1"), run(study, "full")
    assert control.model.residual == AttnResConfig(block=1) and full.model.residual == AttnResConfig()
    assert study.seeds_of("block-1") == study.seeds[:1] and study.seeds_of("full") == study.seeds
    assert [claim.kind for claim in study.claims if claim.arm == "block-1"] == ["identical"]


def test_the_papers_sizes_are_those_of_its_table() -> None:
    study = made(attnres_scaling, "paper")
    for size, row in zip(SIZES, ROWS, strict=True):
        for method in ("baseline", "block", "full", "mhc"):
            arm, config = study.arms[f"{method}-{size}"], run(study, f"{method}-{size}")
            assert losses(study)[f"{method}-{size}"] == row[method]
            assert arm.scale == f"{row['active_parameters_M']}M" and arm.factors == {"method": method}
            model, train = config.model, config.train
            assert (model.layers, model.heads, model.width) == (row["layers"], row["heads"], row["width"])
            assert (model.head_width, model.mlp_width, model.context) == (128, 9 * row["expert_width"], GOLDEN["scaling_runs"]["context"])
            assert (train.learning_rate, train.sequences) == (row["learning_rate"], row["batch_sequences"])
            assert train.steps * config.tokens_per_step == pytest.approx(1e9 * row["tokens_B"], rel=1e-4)
        # What a dense body lacks of the active parameters: 6.1 % at the smallest size, down to 3.0 % at the largest.
        assert -0.062 < body_work(model) / (1e6 * row["active_parameters_M"]) - 1 < -0.03
    assert run(study, "block-xl").model.residual == AttnResConfig(num_blocks=8)


@both_forms
def test_scaling_claims(form: Form) -> None:
    study = made(attnres_scaling, form)
    saves = [claim for claim in study.claims if claim.kind == "saves"]
    assert {(claim.arm, claim.parent) for claim in saves} == {(method, "baseline") for method in ("block", "full", "mhc")}
    advantage = GOLDEN["scaling_fits"]["compute_advantage_at_5_6"]
    assert {claim.margin for claim in saves if claim.arm == "block"} == {1.0, advantage}
    assert {claim.paper.value for claim in saves if claim.paper is not None} == {advantage}
    assert study.comparisons[0] == ("block-xl", "baseline-xl") and len(set(study.comparisons)) == 20
    assert all(study.arms[arm].scale == study.arms[parent].scale for arm, parent in study.comparisons)
    depths = [run(study, f"block-{size}").model for size in SIZES]
    closed = [2 * model.layers / len(_ends(model)) for model in depths]
    assert min(closed) >= 2.5 and max(closed) <= 5  # sub-layers a block; the paper's have 3 to 4.25


def test_the_small_sizes_hold_tokens_per_parameter_over_a_decade_and_a_half() -> None:
    study, compute, rates = made(attnres_scaling, "small"), [], []
    for size in SIZES:
        config = run(study, f"baseline-{size}")
        tokens = config.train.steps * config.tokens_per_step
        assert tokens / body_work(config.model) == pytest.approx(2, rel=0.01)
        assert 400 <= config.train.steps <= 650
        assert config.train.learning_rate * config.model.width == pytest.approx(4e-3 * 96)
        plain = token_compute(config.model)["plain"]
        assert plain is not None
        compute.append(plain * tokens)
        rates.append(config.train.learning_rate)
        small, paper = size_body("small", size.upper()), size_body("paper", size.upper())
        # The proportions of the paper: a head a layer, as many layers to a width of heads, attention as wide beside the model.
        assert small.heads == small.layers and paper.heads == paper.layers
        assert small.heads * 16 / small.width == pytest.approx(paper.heads * 128 / paper.width, rel=0.06)
    assert compute == sorted(compute) and compute[-1] / compute[0] > 10**1.5
    assert rates == sorted(rates, reverse=True)


@both_forms
def test_the_grid_holds_parameters_and_compute(form: Form) -> None:
    study = made(attnres_architecture, form)
    steps, bounds = {"paper": (0.002, 0.055, 0.075, 0.03), "small": (0.003, 0.085, 0.12, 0.07)}, {}
    bounds["parameters"], bounds["width"], bounds["heads"], bounds["mlp"] = steps[form]
    shapes, scores = set(), []
    for name, arm in study.arms.items():
        config, model = run(study, name), run(study, name).model
        parameters = body_work(model)
        assert abs(parameters / GRID_PARAMETERS[form] - 1) < bounds["parameters"], name
        nominal_width, nominal_heads = arm.factors["width_per_layer"], arm.factors["heads_per_layer"]
        assert isinstance(nominal_width, int | float) and isinstance(nominal_heads, int | float)
        assert abs(model.width / model.layers / nominal_width - 1) < bounds["width"], name
        assert abs(model.heads / model.layers / nominal_heads - 1) < bounds["heads"], name
        assert abs(model.mlp_width / model.width / MLP_RATIO - 1) < bounds["mlp"], name
        tokens = config.train.steps * config.tokens_per_step
        if form == "paper":
            sweep = GOLDEN["architecture_sweep"]
            assert 6 * parameters * tokens == pytest.approx(sweep["flops"], rel=0.002)
            assert parameters == pytest.approx(sweep["active_parameters"], rel=0.002)
        shapes.add((model.layers, model.width, model.heads, model.mlp_width, config.train))
        plain = token_compute(replace(model, vocabulary=1))["plain"]
        assert plain is not None
        scores.append((plain / 6 - model.width) / parameters - 1)  # what softmax attention adds to the matrices
    assert len(shapes) == 25
    low, high = {"paper": (0.25, 2.9), "small": (0.045, 0.55)}[form]
    assert low < min(scores) < max(scores) < high
    if form == "small":  # routing is on top, as in the paper; it is small
        assert max(routing_work(run(study, name).model).total / body_work(run(study, name).model) for name in study.arms) < 0.1


@both_forms
def test_the_grid_is_the_papers(form: Form) -> None:
    study, sweep = made(attnres_architecture, form), GOLDEN["architecture_sweep"]
    widths = list(dict.fromkeys(arm.factors["width_per_layer"] for arm in study.arms.values()))
    heads = list(dict.fromkeys(arm.factors["heads_per_layer"] for arm in study.arms.values()))
    if form == "paper":
        assert (widths, heads) == (sweep["width_per_layer"], sweep["heads_per_layer"])
    else:  # a fifth of the width, heads an eighth as wide: 1.6 times as many are as wide beside the model as the paper's
        assert [5 * width for width in widths] == sweep["width_per_layer"]
        assert heads == pytest.approx([1.6 * number for number in sweep["heads_per_layer"]])
    for name, arm in study.arms.items():
        row, column = heads.index(arm.factors["heads_per_layer"]), widths.index(arm.factors["width_per_layer"])
        assert losses(study)[name] == sweep[str(arm.factors["method"])][row][column]
    pairs = [(a, b) for a, b in study.comparisons if _without_method(study, a) == _without_method(study, b)]
    assert len(pairs) == 25
    for one, other in pairs:  # `differs` lets shapes differ for the comparisons across cells; within a cell nothing may
        ours, theirs = run(study, one), run(study, other)
        assert replace(ours, model=replace(ours.model, residual=theirs.model.residual)) == theirs
        assert ours.model.residual == AttnResConfig() and theirs.model.residual == PreNormConfig()
    # The cells that the claims call best are the paper's minima.
    printed = losses(study)
    best = {method: min((name for name in printed if name.startswith(method)), key=lambda name: printed[name]) for method in GRID_METHODS}
    assert (best["attnres"], best["baseline"]) in [(claim.arm, claim.parent) for claim in study.claims]
    assert all(claim.arm in best.values() or claim.parent in best.values() for claim in study.claims)


def _ends(model: ModelConfig) -> tuple[int, ...]:
    assert isinstance(model.residual, AttnResConfig)
    return model.residual.block_ends(2 * model.layers)


def _without_method(study: Study, arm: str) -> dict[str, float | str]:
    return {name: value for name, value in study.arms[arm].factors.items() if name != "method"}


@both_forms
def test_rounding_leaves_the_axes_of_the_grid_in_order(form: Form) -> None:
    study = made(attnres_architecture, form)
    places = {}
    for name, arm in study.arms.items():
        model = run(study, name).model
        exact = {"width_per_layer": model.width / model.layers, "heads_per_layer": model.heads / model.layers}
        places[float(arm.factors["width_per_layer"]), float(arm.factors["heads_per_layer"])] = exact
    for axis, held in (("width_per_layer", 1), ("heads_per_layer", 0)):
        for level in {place[held] for place in places}:
            line = [exact[axis] for place, exact in sorted(places.items()) if place[held] == level]
            assert len(line) == 5 and all(right / left > 1.05 for left, right in pairwise(line)), (axis, level, line)
