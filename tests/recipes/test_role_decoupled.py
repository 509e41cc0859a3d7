"""The study of the Role-Decoupled paper: the paper's numbers, matched arms, and controls that are what they are called."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from depthroute.common.errors import RequestError
from depthroute.cost.summary import model_facts
from depthroute.model import Decoder, ModelConfig
from depthroute.recipes.role_decoupled import CONTROL_MARGIN, CROSSED_SEEDS, role_decoupled_study
from depthroute.study.plan import Study, cells, plan_of
from depthroute.train import RunConfig
from depthroute.train.initialise import initialise

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "role_decoupled_attnres.json").read_text(encoding="utf-8"))
SCALES = ("S", "M")


def study(form: Any = "small", **arguments: Any) -> Study:
    return role_decoupled_study(Path("tokens"), form=form, **arguments)


def planned(made: Study) -> dict[str, Any]:
    """The plan, with the fingerprint of data that nobody has."""
    return plan_of(replace(made, base=replace(made.base, data_fingerprint="0" * 64)))


def run(made: Study, arm: str) -> RunConfig:
    config = made.arms[arm].config
    assert isinstance(config, RunConfig)
    return config


@pytest.mark.parametrize("scale", SCALES)
def test_the_paper_form_is_what_the_paper_prints(scale: str) -> None:
    made, model, small = study("paper"), GOLDEN["models"][scale], scale.lower()
    for arm, name in (("block", "parent_parameters"), ("rd", "role_decoupled_parameters"), ("tied", "parent_parameters")):
        assert model_facts(run(made, f"{arm}-{small}").model)["parameters"] == model[name]
    train = run(made, f"rd-{small}").train
    tokens = train.sequences * model["context"]
    assert [step * tokens for step in train.milestones] == GOLDEN["milestones_tokens"]
    assert train.steps * tokens == GOLDEN["training"]["tokens"] and train.learning_rate == model["peak_learning_rate"]
    assert list(made.seeds) == GOLDEN["seeds"]


@pytest.mark.parametrize("scale", SCALES)
def test_references_are_those_of_the_paper(scale: str) -> None:
    made, small = study("paper"), scale.lower()
    for arm, name in (("block", "block_nll"), ("rd", "role_decoupled_nll")):
        reference = made.arms[f"{arm}-{small}"].paper
        assert reference is not None and reference.value == pytest.approx(statistics.mean(GOLDEN[name][scale]), abs=1e-9)
    effects = {(claim.arm, claim.parent): claim.paper for claim in made.claims}
    headline = effects[f"rd-{small}", f"block-{small}"]
    assert headline is not None and headline.value == GOLDEN["statistics"][scale]["mean"]
    assert list(headline.interval or ()) == GOLDEN["statistics"][scale]["t_interval"]
    table = GOLDEN["controls_500M_tokens_seed_123"][scale]
    names = {"tied": "tied", "average": "average", "frozen-value": "frozen_value"}
    for arm, parent in (("tied", "block"), ("average", "block"), ("frozen-value", "block"), ("rd", "average"), ("rd", "frozen-value")):
        left, right = (table[{**names, "rd": "role_decoupled", "block": "block"}[name]] for name in (arm, parent))
        effect = effects[f"{arm}-{small}", f"{parent}-{small}"]
        assert (None if effect is None else round(effect.value, 4)) == (None if left is None else round(left - right, 4)), (arm, parent)


def test_both_forms_have_the_same_arms_comparisons_and_claims_and_matched_plans() -> None:
    small, paper = study("small"), study("paper")
    assert list(small.arms) == list(paper.arms) and small.comparisons == paper.comparisons
    assert [(c.text, c.kind, c.arm, c.parent) for c in small.claims] == [(c.text, c.kind, c.arm, c.parent) for c in paper.claims]
    assert [(a.scale, a.factors) for a in small.arms.values()] == [(a.scale, a.factors) for a in paper.arms.values()]
    assert small.comparisons[:2] == (("rd-s", "block-s"), ("rd-m", "block-m"))
    for made in (small, paper):
        plan = planned(made)
        shares = [[step / arm["config"]["train"]["steps"] for step in arm["config"]["train"]["milestones"]] for arm in plan["arms"]]
        assert all(found == pytest.approx([1 / 8, 1 / 4, 1 / 2, 1], abs=1e-4) for found in shares)
        assert plan["differs"] == []  # nothing but the method differs within a pair
        for arm, parent in made.comparisons:
            assert made.arms[arm].scale == made.arms[parent].scale
        for scale in SCALES:  # the whole study within a scale shares everything but the method
            runs = [run(made, name) for name, arm in made.arms.items() if arm.scale == scale]
            assert len({replace(one.model, residual=runs[0].model.residual) for one in runs}) == 1
            assert len({one.train for one in runs}) == 1


def test_six_seeds_in_the_small_form_and_three_for_the_crossed_backends() -> None:
    made = study()
    assert len(made.seeds) == 6  # 2 / 2^6 is below 0.05, 2 / 2^5 is not
    trained = cells(planned(made))
    assert len(trained) == 2 * (6 * 6 + 2 * CROSSED_SEEDS)
    assert {seed for arm, seed in trained if "direct" in arm} == set(made.seeds[:CROSSED_SEEDS])
    assert study(seeds=(7, 8)).arms["rd-direct-s"].seeds == (7, 8)


def test_backends_are_crossed_with_methods_and_nothing_else() -> None:
    made = study()
    for scale in ("s", "m"):
        for method in ("block", "rd"):
            ahead, direct = (run(made, f"{method}{suffix}-{scale}").model.residual for suffix in ("", "-direct"))
            assert direct == replace(ahead, phases=False) and ahead.phases
        assert {(f"block-direct-{scale}", f"block-{scale}"), (f"rd-direct-{scale}", f"rd-{scale}"), (f"rd-{scale}", f"block-{scale}"),
                (f"rd-direct-{scale}", f"block-direct-{scale}")} <= set(made.comparisons)  # fmt: skip


def small_losses(model: ModelConfig, steps: int = 3) -> list[float]:
    """The losses of some steps of gradient descent from the shared start, by hand."""
    decoder = Decoder(model)
    initialise(decoder, 5)
    optimiser = torch.optim.AdamW(decoder.parameters(), lr=1e-2)
    tokens = torch.randint(model.vocabulary, (2, 17), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(steps):
        hidden = decoder(tokens[:, :-1])
        weight = decoder.embedding.weight if decoder.head is None else decoder.head.weight
        loss = torch.nn.functional.cross_entropy((hidden @ weight.T).flatten(0, 1), tokens[:, 1:].flatten())
        losses.append(loss.item())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return losses


def test_the_controls_are_what_they_are_called() -> None:
    made = study(settings={"model.vocabulary": 64, "model.context": 16})
    losses = {name: small_losses(run(made, f"{name}-s").model) for name in ("block", "rd", "tied", "average", "frozen-value", "rd-direct")}
    assert losses["tied"] == losses["block"]  # bit for bit, through the optimiser
    assert losses["rd-direct"] == pytest.approx(losses["rd"], rel=1e-5)  # the same up to rounding
    for name in ("rd", "average", "frozen-value"):
        assert losses[name][0] == pytest.approx(losses["block"][0], rel=1e-6)  # zero queries: the same start
        assert losses[name][-1] != losses["block"][-1]
    assert losses["average"] != losses["rd"]
    frozen = Decoder(run(made, "frozen-value-s").model)
    assert frozen.parameter_counts() == Decoder(run(made, "block-s").model).parameter_counts()  # no query for values
    averaged = Decoder(run(made, "average-s").model)
    assert averaged.parameter_counts() == Decoder(run(made, "rd-s").model).parameter_counts()  # both routes are there


def test_claims_say_where_they_stop_and_what_counts_as_no_difference() -> None:
    made = study(seeds=(4, 5))
    kinds = {(claim.arm, claim.parent): claim for claim in made.claims}
    assert kinds["tied-s", "block-s"].kind == "identical"
    assert (kinds["average-m", "block-m"].kind, kinds["average-m", "block-m"].margin) == ("equivalent", CONTROL_MARGIN)
    assert kinds["rd-direct-s", "rd-s"].kind == "equivalent"
    assert kinds["rd-s", "block-s"].boundary == "one corpus, 8 layers x 48, context 128, 327,680 tokens, 2 seeds"
    assert "12 layers x 64" in kinds["rd-m", "block-m"].boundary


def test_settings_reach_every_arm_and_a_shorter_study_keeps_its_milestones() -> None:
    made = study("paper", vocabulary=300, settings={"train.steps": "80", "train.precision": "float32"})
    assert {run(made, name).train.milestones for name in made.arms} == {(10, 20, 40, 80)}
    assert {(run(made, name).model.vocabulary, run(made, name).train.precision) for name in made.arms} == {(300, "float32")}
    assert run(study(settings={"train.milestones": "[5]"}), "rd-s").train.milestones == (5,)
    with pytest.raises(RequestError, match="unknown field 'stepz'"):
        study(settings={"train.stepz": "80"})
