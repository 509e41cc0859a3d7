"""The training of the Low-Rank paper, and the study of it against AdamW."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from depthroute.common.errors import RequestError
from depthroute.data import EOS
from depthroute.model import Decoder
from depthroute.recipes import recipe, run_of
from depthroute.recipes.low_rank_recipe import SMALL, low_rank_recipe_study
from depthroute.train.muon import Muon
from depthroute.train.optimiser import build_optimiser


@pytest.mark.parametrize("name", ["lr-0.5b", "lr-1b", "lr-4b"])
def test_the_training_of_the_paper(name: str) -> None:
    train = recipe(name).train
    assert (train.schedule, train.decay_fraction, train.final_fraction, train.steps_of_warmup) == ("wsd", 0.2, 0.0, 2_000)
    assert (train.learning_rate, train.betas, train.momentum, train.z_loss, train.gradient_clip) == (3e-4, (0.9, 0.95), 0.95, 1e-5, 1.0)
    muon, adam = train.groups
    assert (muon.optimiser, muon.rate * train.learning_rate, muon.weight_decay) == ("muon", pytest.approx(1e-3), 0.1)
    assert (adam.optimiser, adam.rate, adam.weight_decay) == ("adamw", 1.0, 0.0)


def test_muon_has_the_matrices_of_the_layers_and_nothing_else_decays() -> None:
    model = Decoder(replace(SMALL.resolve(), layers=4))
    optimiser = build_optimiser(model, replace(SMALL.train, groups=recipe("lr-0.5b").train.groups))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    adamw, muon = optimiser.optimisers
    assert isinstance(muon, Muon)
    own = {names[id(parameter)] for group in muon.param_groups for parameter in group["params"]}
    assert own == {name for name, parameter in model.named_parameters() if name.startswith("layers.") and parameter.ndim == 2}
    assert len(own) == 4 * 7
    assert {group["weight_decay"] for group in muon.param_groups} == {0.1}
    assert {group["weight_decay"] for group in adamw.param_groups} == {0.0}
    assert all(group["lr"] == 3.5e-3 for group in adamw.param_groups)
    assert all(group["lr"] == pytest.approx(3.5e-3 / 0.3) for group in muon.param_groups)  # 1e-3 to 3e-4


def test_documents_are_masked_at_the_end_that_the_data_has() -> None:
    made, data = recipe("lr-0.5b"), Path("none")
    assert made.masks_documents and not recipe("small").masks_documents
    assert run_of(made, data).model.document_end == 100_257
    run = run_of(made, data, vocabulary=300, end=7)
    assert (run.model.vocabulary, run.model.document_end) == (300, 7)
    assert run_of(made, data, end=7, settings={"model.document_end": "none"}).model.document_end is None
    assert run_of(recipe("small"), data, vocabulary=300, end=7).model.document_end is None
    # without data, as for a cost, of any vocabulary
    for given in ({"vocabulary": 300}, {"settings": {"model.vocabulary": "300"}}):
        assert run_of(made, data, **given).model.document_end == 299


def test_settings_that_would_make_both_optimisers_one_are_refused() -> None:
    with pytest.raises(RequestError, match="leaves the arms 'Muon on matrices' without that"):
        low_rank_recipe_study(Path("none"), settings={"train.groups": "[]"})
    study = low_rank_recipe_study(Path("none"), settings={"train.momentum": "0.9"})
    assert {study.config_of(f"prenorm-{name}").train.momentum for name in ("muon", "adamw")} == {0.9, 0.95}
    assert study.claims[-1].boundary.endswith("Muon on matrices at 0.0035, AdamW elsewhere at 0.0035 against AdamW on every matrix")


def test_every_study_takes_the_end_of_its_data() -> None:
    study = low_rank_recipe_study(Path("none"), vocabulary=300, end=7)
    assert {study.config_of(name).model.document_end for name in study.arms} == {7}
    assert low_rank_recipe_study(Path("none")).base.model.document_end == EOS


def test_the_arms_differ_in_optimiser_and_method_alone() -> None:
    study = low_rank_recipe_study(Path("none"))
    assert study.comparisons[0] == ("low-rank-muon", "block-muon")
    for arm, parent in study.comparisons:
        ours, theirs = study.config_of(arm), study.config_of(parent)
        one, other = (study.arms[name].factors for name in (arm, parent))
        assert (one["method"] == other["method"]) != (one["optimiser"] == other["optimiser"])
        assert (ours.train.groups == theirs.train.groups) == (one["optimiser"] == other["optimiser"])
        assert replace(ours.train, groups=()) == replace(theirs.train, groups=())
        assert replace(ours.model, residual=theirs.model.residual) == theirs.model
    width, keys = study.base.model.width, [study.config_of(f"{name}-muon").model.residual for name in ("block", "low-rank")]
    assert [getattr(method, "rank", 0) for method in keys] == [None, width // 8]
    assert {getattr(method, "key_gain", None) for method in keys} == {False}
