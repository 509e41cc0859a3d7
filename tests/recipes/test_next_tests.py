"""The next tests of the Role-Decoupled paper: what each varies, and that it varies nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from depthroute.common.errors import RequestError
from depthroute.recipes.next_tests import BLOCKS, rd_block_size, rd_context, rd_horizon
from depthroute.recipes.role_decoupled import role_decoupled_study
from depthroute.study.plan import Study, plan_of
from depthroute.train import RunConfig
from depthroute.train.branch import branch_step, shared_steps

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "role_decoupled_attnres.json").read_text(encoding="utf-8"))
TOKENS = Path("tokens")


def planned(made: Study) -> dict[str, Any]:
    """The plan, with the fingerprint of data that nobody has."""
    return plan_of(replace(made, base=replace(made.base, data_fingerprint="0" * 64)))


def run(made: Study, arm: str) -> RunConfig:
    config = made.arms[arm].config
    assert isinstance(config, RunConfig)
    return config


@pytest.mark.parametrize("recipe", [rd_horizon, rd_block_size, rd_context])
def test_both_forms_have_the_same_arms_and_pairs_of_methods_that_differ_in_nothing_else(recipe: Callable[..., Study]) -> None:
    small, paper = recipe(TOKENS), recipe(TOKENS, form="paper")
    assert list(small.arms) == list(paper.arms) and small.comparisons == paper.comparisons
    assert [(c.text, c.kind) for c in small.claims] == [(c.text, c.kind) for c in paper.claims]
    for made in (small, paper):
        plan = planned(made)
        assert plan["differs"] == [] and len(made.claims) == len(made.comparisons) == len(made.arms) // 2
        for arm, parent in made.comparisons:
            assert run(made, arm).model.residual == replace(run(made, parent).model.residual, roles="decoupled")
            assert made.arms[arm].scale == made.arms[parent].scale
        referenced = [claim for claim in made.claims if claim.paper is not None]
        assert len(referenced) == 1  # the condition that the paper has
        assert referenced[0].paper is not None and referenced[0].paper.value == GOLDEN["statistics"]["S"]["mean"]
    assert list(paper.seeds) == GOLDEN["seeds"] and len(small.seeds) == 6
    assert recipe(TOKENS, seeds=(9,)).seeds == (9,)


def test_horizons_are_multiples_that_branch_from_the_longest_run_of_their_method() -> None:
    made = rd_horizon(TOKENS, form="paper")
    tokens = {name: run(made, name).train.steps * run(made, name).tokens_per_step for name in made.arms}
    assert tokens["rd-1x"] == GOLDEN["training"]["tokens"] and tokens["rd-2x"] >= 4e9 and tokens["rd-5x"] >= 10e9  # section 6: 4B-10B
    assert made.comparisons[0] == ("rd-5x", "block-5x")
    for method in ("block", "rd"):
        trunk = made.config_of(f"{method}-5x")
        assert made.arms[f"{method}-5x"].trunk is None
        for ratio in ("1x", "2x"):
            name = f"{method}-{ratio}"
            assert made.arms[name].trunk == f"{method}-5x"
            branch = made.config_of(name)
            stable = branch.train.steps - round(0.2 * branch.train.steps)
            assert branch_step(branch, trunk) == shared_steps(branch, trunk) == stable  # all but the decay is shared
            assert stable in branch.train.milestones and branch.train.milestones[-1] == branch.train.steps


def test_a_shorter_horizon_study_keeps_its_shape_and_refuses_milestones_of_its_own() -> None:
    made = rd_horizon(TOKENS, settings={"train.steps": "20", "train.decay_fraction": "0.5"})
    assert [run(made, f"rd-{ratio}x").train.steps for ratio in (1, 2, 5)] == [20, 40, 100]
    assert {run(made, name).train.steps_of_warmup for name in made.arms} == {3}
    assert branch_step(made.config_of("rd-2x"), made.config_of("rd-5x")) == 20
    planned(made)
    with pytest.raises(RequestError, match=r"train\.milestones cannot be set here"):
        rd_horizon(TOKENS, settings={"train.milestones": "[5]"})


@pytest.mark.parametrize(("form", "sizes"), [("paper", (8, 16, 4, 2)), ("small", (4, 8, 2, 1))])
def test_blocks_are_of_one_size_and_four_of_them_are_the_paper_s(form: Any, sizes: tuple[int, ...]) -> None:
    made, parent = rd_block_size(TOKENS, form=form), role_decoupled_study(TOKENS, form=form)
    for blocks, size in zip(BLOCKS, sizes, strict=True):
        model = run(made, f"rd-n{blocks}").model
        sublayers = 2 * model.layers
        assert model.residual.block_ends(sublayers) == tuple(range(size, sublayers + 1, size))  # type: ignore[attr-defined]
        assert made.arms[f"rd-n{blocks}"].factors == {"method": "rd", "blocks": blocks}
    ours, theirs = run(made, "block-n4"), run(parent, "block-s")
    sublayers = 2 * ours.model.layers
    assert ours.model.residual.block_ends(sublayers) == theirs.model.residual.block_ends(sublayers)  # type: ignore[attr-defined]
    assert ours.train == theirs.train and replace(ours.model, residual=theirs.model.residual) == theirs.model


def test_contexts_have_as_many_tokens_a_step_and_are_scales() -> None:
    for form, contexts in (("paper", (1_024, 512, 2_048, 4_096)), ("small", (128, 64, 256, 512))):
        made = rd_context(TOKENS, form=form)  # type: ignore[arg-type]
        found = [run(made, arm) for arm, _ in made.comparisons]
        assert tuple(one.model.context for one in found) == contexts
        assert len({one.tokens_per_step for one in found}) == 1
        assert len({arm.scale for arm in made.arms.values()}) == 4
        for one in found:
            microbatch = one.train.microbatch
            assert microbatch is None or microbatch * one.model.context == found[0].train.microbatch * found[0].model.context
    assert {replace(one.train, sequences=1, microbatch=None) for one in found} == {replace(found[0].train, sequences=1, microbatch=None)}
    with pytest.raises(RequestError, match=r"model\.context = 128 and train\.sequences = 6 cannot be had at 4 times"):
        rd_context(TOKENS, settings={"train.sequences": "6"})
