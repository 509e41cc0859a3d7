"""A study says what makes no sense in it before anything is resolved, and a plan grows only where it is told to."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from depthroute.common.errors import FailureError, RequestError
from depthroute.study.collect import collect
from depthroute.study.plan import Arm, Claim, Reference, Study, cells, milestones, plan_of, read_plan, write_plan


def claim(**changes: Any) -> Claim:
    return Claim(**{"text": "Blocks help", "kind": "lower", "arm": "block", "parent": "plain", **changes})


def renamed(study: Study, name: str, **changes: Any) -> Study:
    return dataclasses.replace(study, arms={**study.arms, name: dataclasses.replace(study.arms["block"], **changes)})


def longer(study: Study) -> Study:
    arms = {**study.arms, "again": Arm(label="Again", config=study.arms["block"].config)}
    comparisons = (("again", "plain"), *study.comparisons)
    return dataclasses.replace(study, arms=arms, seeds=(7, 3, 11), comparisons=comparisons, claims=(claim(),))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"claims": (claim(parent="block"),)}, "about block and block, which the study does not compare"),
        ({"claims": (claim(margin=-0.1),)}, "has the margin -0.1; it takes 0 nats or more"),
        ({"claims": (claim(kind="equivalent"),)}, "has the margin 0.0; it takes a positive number of nats"),
        ({"claims": (claim(kind="identical", margin=0.1),)}, "has the margin 0.1; it takes 0 and nothing else"),
        ({"claims": (claim(), claim(kind="identical"))}, "is there more than once; give each a text of its own"),
        ({"claims": (claim(kind="saves", margin=1.2),)}, "three scales or more, and 0 have"),
        ({"comparisons": (("block", "plain"), ("block", "plain"))}, "more than once"),
    ],
)
def test_claims_and_comparisons(study: Study, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        plan_of(dataclasses.replace(study, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": ()}, r"arms\.odd\.seeds is empty"),
        ({"seeds": (5,)}, r"arms\.odd\.seeds holds 5, which is none of the study's seeds \(7, 3\)"),
        ({"trunk": "odd"}, r"arms\.odd\.trunk: unknown arm 'odd'"),
        ({"trunk": "blok"}, "perhaps you meant 'block'"),
    ],
)
def test_arms(study: Study, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        plan_of(renamed(study, "odd", **changes))


def test_a_trunk_is_trained_with_every_seed_of_its_branches_and_is_no_branch(study: Study) -> None:
    fewer = renamed(study, "odd", seeds=(7,))
    branch = dataclasses.replace(fewer.arms["block"], trunk="odd")
    with pytest.raises(RequestError, match="has the seed 3, and its trunk odd is not trained with it"):
        plan_of(dataclasses.replace(fewer, arms={**fewer.arms, "branch": branch}))
    inner = renamed(study, "odd", trunk="block")
    with pytest.raises(RequestError, match="odd is a branch itself"):
        plan_of(dataclasses.replace(inner, arms={**inner.arms, "twig": branch}))


def test_a_pair_needs_a_seed_in_common(study: Study) -> None:
    apart = {"plain": dataclasses.replace(study.arms["plain"], seeds=(7,)), "block": dataclasses.replace(study.arms["block"], seeds=(3,))}
    with pytest.raises(RequestError, match="block and plain have no seed in common"):
        plan_of(dataclasses.replace(study, arms=apart))


def test_an_arm_with_fewer_seeds_has_fewer_cells(study: Study) -> None:
    plan = plan_of(dataclasses.replace(study, arms={**study.arms, "once": dataclasses.replace(study.arms["block"], seeds=(3,))}))
    assert cells(plan) == [("plain", 7), ("block", 7), ("plain", 3), ("block", 3), ("once", 3)]


def test_without_milestones_of_the_study_each_arm_has_its_own(study: Study) -> None:
    def train(**changes: Any) -> Any:
        return lambda config: dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))

    arms = {
        "plain": Arm(label="Plain", config=train(milestones=(2,))),
        "block": Arm(label="Block", config=train(milestones=(2, 4, 6))),
        "long": Arm(label="Long", config=train(steps=9)),
    }
    free = dataclasses.replace(study, arms=arms, milestones=(), differs=("train.milestones",))
    plan = plan_of(free)
    assert [milestones(plan, name) for name in arms] == [[2, 6], [2, 4, 6], [9]]
    apart = dataclasses.replace(free, comparisons=(("long", "plain"),), differs=("train.milestones", "train.steps"))
    with pytest.raises(RequestError, match=r"no milestone in common, so they cannot be compared: \[9\] and \[2, 6\]"):
        plan_of(apart)


def test_claims_references_and_factors_are_in_the_plan(study: Study) -> None:
    paper = Reference(value=2.9, source="a paper, Table 1")
    full = renamed(study, "odd", scale="S", factors={"rank": 4, "method": "block"}, paper=paper)
    plan = plan_of(dataclasses.replace(full, claims=(claim(boundary="here", paper=Reference(value=-0.1, source="Table 2")),)))
    entry = plan["arms"][-1]
    assert (entry["scale"], entry["factors"]) == ("S", {"rank": 4, "method": "block"})
    assert entry["paper"] == {"value": 2.9, "source": "a paper, Table 1", "interval": None, "unit": "nats per token"}
    assert plan["claims"][0]["boundary"] == "here" and plan["claims"][0]["paper"]["value"] == -0.1


def test_a_plan_grows_when_told_to_and_says_what_was_known_then(study: Study, fake: Any, tmp_path: Path) -> None:
    first = write_plan(study, tmp_path)
    fake.write_run(tmp_path, "plain", 7)
    with pytest.raises(RequestError, match="Add to the plan that is there with --extend"):
        write_plan(longer(study), tmp_path)
    grown = write_plan(longer(study), tmp_path, extend=True)
    assert grown == read_plan(tmp_path) and grown["hash"] != first["hash"] and grown["written_at"] == first["written_at"]
    (entry,) = (dict(extension) for extension in grown["extensions"])
    assert entry.pop("written_at") >= first["written_at"]
    assert entry == {
        "arms": ["again"], "seeds": [11], "comparisons": [["again", "plain"]], "claims": ["Blocks help"], "complete_cells": 1,
        "previous_hash": first["hash"],
    }  # fmt: skip
    # What was there keeps its place: no cell is trained again, and the headline stays the headline.
    assert [arm["name"] for arm in grown["arms"]] == ["plain", "block", "again"]
    assert grown["comparisons"] == [["block", "plain"], ["again", "plain"]] and grown["seeds"] == [7, 3, 11]
    assert ("plain", 7) not in {(cell["arm"], cell["seed"]) for cell in collect(tmp_path, {})["missing"]}
    # The same again adds nothing, and the smaller study is not what is there any more.
    assert write_plan(longer(study), tmp_path, extend=True) == grown
    with pytest.raises(RequestError, match="holds another plan"):
        write_plan(study, tmp_path)


def test_an_extension_changes_nothing_that_is_there(study: Study, tmp_path: Path) -> None:
    write_plan(study, tmp_path)
    before = (tmp_path / "plan.json").read_bytes()
    other = dataclasses.replace(study.base, train=dataclasses.replace(study.base.train, learning_rate=0.5))
    for change in (
        {"base": other, "arms": {**longer(study).arms, "plain": Arm(label="Plain", config=other)}, "differs": ("train",)},
        {"seeds": (7,)},
        {"comparisons": (("again", "plain"),), "claims": ()},
        {"endpoint": "answers"},
        {"stopping": "when it looks good"},
    ):
        with pytest.raises(RequestError, match="holds another plan"):
            write_plan(dataclasses.replace(longer(study), **change), tmp_path, extend=True)
    assert (tmp_path / "plan.json").read_bytes() == before


def test_an_extension_may_say_otherwise_where_a_claim_ends_and_the_plan_stays(study: Study, tmp_path: Path) -> None:
    """Recipes put the number of seeds into the boundary of every claim."""
    claimed = dataclasses.replace(study, claims=(claim(boundary="2 seeds"),))
    write_plan(claimed, tmp_path)
    more = dataclasses.replace(claimed, seeds=(7, 3, 11), claims=(claim(boundary="3 seeds"), claim(text="New", boundary="3 seeds")))
    grown = write_plan(more, tmp_path, extend=True)
    assert [entry["boundary"] for entry in grown["claims"]] == ["2 seeds", "3 seeds"]
    assert grown["extensions"][0]["seeds"] == [11] and write_plan(more, tmp_path, extend=True) == grown


def test_an_arm_gets_no_more_of_the_planned_seeds_unseen(study: Study, tmp_path: Path) -> None:
    """Only a seed that is new to the study is written down as one that came later."""
    arms = {**study.arms, "once": dataclasses.replace(study.arms["block"], seeds=(7,))}
    few = dataclasses.replace(study, arms=arms, comparisons=(("block", "plain"), ("once", "plain")))
    write_plan(few, tmp_path)
    more = dataclasses.replace(few, arms={**arms, "once": dataclasses.replace(arms["once"], seeds=(7, 3))})
    with pytest.raises(RequestError, match=r"holds another plan: arms\[2\].seeds\[1\] is absent there and 3 here"):
        write_plan(more, tmp_path, extend=True)
    new = dataclasses.replace(few, seeds=(7, 3, 11), arms={**arms, "once": dataclasses.replace(arms["once"], seeds=(7, 11))})
    assert write_plan(new, tmp_path, extend=True)["extensions"][0]["seeds"] == [11]


def test_the_last_step_is_the_last_milestone_of_every_arm(study: Study) -> None:
    longer_arm = dataclasses.replace(study.base, train=dataclasses.replace(study.base.train, steps=9))
    plan = plan_of(dataclasses.replace(study, arms={**study.arms, "long": Arm(label="Long", config=longer_arm)}, milestones=(3,)))
    assert [milestones(plan, name) for name in ("plain", "block", "long")] == [[3, 6], [3, 6], [3, 9]]


def test_the_history_of_a_plan_cannot_be_taken_out(study: Study, tmp_path: Path) -> None:
    write_plan(study, tmp_path)
    write_plan(longer(study), tmp_path, extend=True)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "extensions": []}))
    with pytest.raises(FailureError, match="changed after it was written"):
        read_plan(tmp_path)
