"""The recipes are what their papers print."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from depthroute.common.errors import RequestError
from depthroute.recipes import RECIPES, baseline_study, matched_study, recipe, run_of
from depthroute.recipes.studies import CHECKED
from depthroute.residual import FAMILY, SPECIFICATIONS, AttnResConfig, PreNormConfig
from depthroute.study.plan import plan_of

GOLDEN = Path(__file__).parents[1] / "golden"
ROLES = json.loads((GOLDEN / "role_decoupled_attnres.json").read_text(encoding="utf-8"))
RANKS = json.loads((GOLDEN / "low_rank_attnres_sweep.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("scale", ["S", "M"])
def test_role_decoupled_shapes_and_training(scale: str) -> None:
    made, model, training = recipe(f"rd-{scale.lower()}"), ROLES["models"][scale], ROLES["training"]
    shape = made.resolve()
    for name in ("layers", "width", "heads", "mlp_width", "context", "vocabulary", "tied_embeddings"):
        assert getattr(shape, name) == model[name], name
    assert shape.resolved_head_width == model["head_dim"]
    assert (shape.norm_eps, shape.rope_base, shape.init_std) == (training["rmsnorm_eps"], training["rope_base"], training["init_std"])
    assert shape.residual == AttnResConfig(layers_per_block=model["layers_per_block"], roles="decoupled", first_read=True)
    train = made.train
    assert (train.steps, train.sequences, train.microbatch) == (training["updates"], training["sequences_per_update"], model["microbatch"])
    assert train.sequences == model["microbatch"] * model["accumulation"]
    assert (train.learning_rate, list(train.betas), train.eps) == (model["peak_learning_rate"], training["betas"], training["eps"])
    assert (train.weight_decay, train.gradient_clip) == (training["weight_decay_on_matrices"], training["gradient_clip"])
    assert (train.warmup_fraction, train.final_fraction) == (training["warmup_fraction"], 0.1)
    assert [step * train.sequences * shape.context for step in train.milestones] == ROLES["milestones_tokens"]
    assert train.steps * train.sequences * shape.context == training["tokens"]
    assert train.evaluation_tokens == ROLES["validation_tokens"] and train.seed in ROLES["seeds"]


def test_low_rank_shapes() -> None:
    shape = recipe("lr-0.5b").resolve()
    for name, value in RANKS["model"].items():
        assert getattr(shape, {"rope_base": "rope_base"}.get(name, name)) == value, name
    assert shape.residual == AttnResConfig(num_blocks=8, rank=128, key_gain=False)
    for name, layers, width, heads, mlp_width in (("lr-1b", 24, 1_536, 24, 4_224), ("lr-4b", 44, 2_560, 40, 7_040)):
        shape = recipe(name).resolve()
        assert (shape.layers, shape.width, shape.heads, shape.mlp_width) == (layers, width, heads, mlp_width)
        assert isinstance(shape.residual, AttnResConfig) and shape.residual.rank == width // 4  # section 4.5 fixes r/d = 1/4
    for name in ("lr-0.5b", "lr-1b", "lr-4b"):
        train = recipe(name).train
        assert train.sequences * recipe(name).resolve().context == 262_144
        assert round(train.warmup_fraction * train.steps) == 2_000
    assert recipe("lr-1b").train.steps == 76_294  # Appendix G.1


def test_every_recipe_takes_every_method() -> None:
    for made in RECIPES.values():
        assert made.resolve("prenorm").residual == PreNormConfig()
        for method in ("full", "block", "rd", "rd-tied", "rd-average", "rd-frozen-value", "block:4", "low-rank,rank=8"):
            assert isinstance(made.resolve(method).residual, AttnResConfig)


def test_an_unknown_recipe() -> None:
    with pytest.raises(RequestError, match="unknown recipe 'rds'; perhaps you meant 'rd-s'"):
        recipe("rds")


def test_a_study_compares_each_arm_with_the_first_in_one_body() -> None:
    chosen = recipe("small")
    base = run_of(chosen, Path("tokens"), vocabulary=999)
    study = matched_study(chosen, base, arms=("prenorm", "block", "rd", "wide=block:8,rank=16"), seeds=(1, 2))
    assert list(study.arms) == ["prenorm", "block", "rd", "wide"]
    assert set(study.comparisons) == {("block", "prenorm"), ("rd", "prenorm"), ("wide", "prenorm"), ("rd", "block")}
    assert study.arms["wide"].config.model.residual == AttnResConfig(block=8, rank=16)
    bodies = {arm.config.model.__class__(**{**vars(arm.config.model), "residual": PreNormConfig()}) for arm in study.arms.values()}
    assert len(bodies) == 1 and bodies.pop().vocabulary == 999
    assert {arm.config.train for arm in study.arms.values()} == {base.train}
    assert study.milestones[-1] == base.train.steps and list(study.milestones) == sorted(set(study.milestones))


def test_wrong_studies_are_refused() -> None:
    chosen = recipe("small")
    base = run_of(chosen, Path("tokens"), vocabulary=999)
    with pytest.raises(RequestError, match="at least two arms; it was given 1"):
        matched_study(chosen, base, arms=("prenorm",), seeds=(1,))
    with pytest.raises(RequestError, match="the arm 'rd' is there twice"):
        matched_study(chosen, base, arms=("rd", "rd"), seeds=(1,))
    with pytest.raises(RequestError, match="block = 99 is not allowed; it takes 1 to 16 for 16 sub-layers"):
        matched_study(chosen, base, arms=("prenorm", "block:99"), seeds=(1,))  # before any cell is trained
    with pytest.raises(RequestError, match="unknown residual method 'blok'"):
        matched_study(chosen, base, arms=("prenorm", "blok"), seeds=(1,))


def test_a_residual_method_is_checked_against_the_body_it_will_serve() -> None:
    deeper = run_of(recipe("small"), Path("tokens"), residual="block:20", settings={"model.layers": "12"})
    assert deeper.model.residual == AttnResConfig(block=20)
    with pytest.raises(RequestError, match="block = 20 is not allowed; it takes 1 to 16"):
        run_of(recipe("small"), Path("tokens"), residual="block:20")
    with pytest.raises(RequestError, match="rank = 200 is larger than the width 96"):
        run_of(recipe("small"), Path("tokens"), residual="low-rank:4,rank=200")


def test_a_baseline_study_holds_every_method_and_a_rate_check_in_every_family(tmp_path: Path) -> None:
    made = recipe("small")
    base = run_of(made, tmp_path, residual="prenorm")
    study = baseline_study(made, base, seeds=(1,))
    assert set(SPECIFICATIONS) <= set(study.arms)
    assert {FAMILY[name] for name in CHECKED} == set(FAMILY.values())
    assert all((name, "prenorm") in study.comparisons for name in SPECIFICATIONS if name != "prenorm")
    rates = {name: arm.config.train.learning_rate for name, arm in study.arms.items()}
    assert rates["mhc-half-rate"] == rates["mhc"] / 2 == rates["prenorm"] / 2 and rates["mhc-double-rate"] == 2 * rates["mhc"]
    for check, parent in (pair for pair in study.comparisons if pair[0].endswith("-rate")):
        ours, theirs = study.arms[check].config, study.arms[parent].config
        assert ours.model == theirs.model and check.startswith(parent)
        assert replace(ours.train, learning_rate=theirs.train.learning_rate) == theirs.train
    assert study.arms["low-rank"].config.model.residual == AttnResConfig(block=8, rank=24, key_gain=False)
    assert {arm.label for arm in study.arms.values()} >= {"mHC", "PostNorm", "PostNorm, half rate", "Low-Rank AttnRes"}
    blocks = {name: study.arms[name].config.model.residual.block for name in ("block", "rd", "block-query", "delta-block", "rms-block")}
    assert set(blocks.values()) == {8}  # those of the recipe, whatever a method's own default
    few = baseline_study(made, base, seeds=(1,), methods=("hc", "rd"))
    assert list(few.arms) == ["prenorm", "hc", "rd", "prenorm-half-rate", "prenorm-double-rate"]
    with pytest.raises(RequestError, match="unknown residual method 'hcc'; perhaps you meant 'hc'"):
        baseline_study(made, base, seeds=(1,), methods=("hcc",))


def test_the_plan_of_a_baseline_study_is_matched(trained_run: Path, tmp_path: Path) -> None:
    """Nothing but the method differs between a method and the plain stream; a rate check declares what else does."""
    made = recipe("small")
    study = baseline_study(made, run_of(made, trained_run.parent / "tokens", vocabulary=300, residual="prenorm"), seeds=(1,))
    plan = plan_of(study)
    assert len(plan["arms"]) == len(study.arms) and plan["differs"] == ["train.learning_rate"]
