"""A plan is whole, hashed and matched before the first step, and nobody can change it afterwards unseen."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from depthroute.common.errors import FailureError, RequestError
from depthroute.study.plan import Arm, Study, cell_config, cells, plan_of, read_plan, run_folder, write_plan
from depthroute.train import RunConfig


def with_arm(study: Study, name: str, change: Any, **more: Any) -> Study:
    return dataclasses.replace(study, arms={**study.arms, name: Arm(label=name, config=change)}, **more)


def train(**changes: Any) -> Any:
    return lambda config: dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))


def test_the_plan_holds_every_field_of_the_contract(study: Study, tmp_path: Path) -> None:
    plan = write_plan(study, tmp_path)
    assert plan == json.loads((tmp_path / "plan.json").read_text())
    assert list(plan) == [
        "format", "name", "question", "arms", "comparisons", "differs", "seeds", "endpoint", "claims", "stopping", "data_fingerprint",
        "extensions", "written_at", "hash",
    ]
    assert [arm["name"] for arm in plan["arms"]] == ["plain", "block"]
    assert plan["arms"][1]["config"]["model"]["residual"]["method"] == "attnres"
    assert plan["arms"][0]["config"]["train"]["milestones"] == [3, 6]
    assert plan["comparisons"] == [["block", "plain"]]
    assert plan["endpoint"] == "validation"
    assert plan["arms"][0]["seeds"] == [7, 3]


def test_the_hash_depends_on_everything_but_the_time(study: Study, tmp_path: Path) -> None:
    first = write_plan(study, tmp_path / "a")
    path = tmp_path / "a" / "plan.json"
    path.write_text(path.read_text().replace(first["written_at"], "2001-01-01T00:00:00+00:00"))
    assert read_plan(tmp_path / "a")["hash"] == first["hash"]
    for change in ({"name": "x"}, {"question": "x"}, {"seeds": (7,)}, {"milestones": (6,)}, {"differs": ("train.eps",)}):
        other = write_plan(dataclasses.replace(study, **change), tmp_path / str(change))
        assert other["hash"] != first["hash"]


def test_writing_the_same_plan_again_changes_nothing(study: Study, tmp_path: Path) -> None:
    write_plan(study, tmp_path)
    before = (tmp_path / "plan.json").read_bytes()
    write_plan(study, tmp_path)
    assert (tmp_path / "plan.json").read_bytes() == before


def test_another_plan_is_refused_by_the_first_field_that_differs(study: Study, tmp_path: Path) -> None:
    write_plan(study, tmp_path)
    longer = dataclasses.replace(study, base=train(steps=9)(study.base), arms={
        "plain": Arm(label="Plain", config=lambda config: config), "block": study.arms["block"],
    })
    with pytest.raises(RequestError, match=r"arms\[0\]\.config\.train\.steps is 6 there and 9 here"):
        write_plan(longer, tmp_path)
    with pytest.raises(RequestError, match=r"seeds\[1\] is 3 there and absent here"):
        write_plan(dataclasses.replace(study, seeds=(7,)), tmp_path)


def test_data_that_moved_is_still_the_same_plan(study: Study, tmp_path: Path) -> None:
    written = write_plan(study, tmp_path)
    moved = dataclasses.replace(study.base, data="elsewhere")
    arms = {"plain": Arm(label="Plain", config=moved), "block": study.arms["block"]}
    assert write_plan(dataclasses.replace(study, base=moved, arms=arms), tmp_path) == written


@pytest.mark.parametrize(
    ("old", "new"), [('"seeds": [\n    7,', '"seeds": [\n    8,'), ('"hash": "', '"hash": "0'), ('"Plain"', '"Fancy"')]
)
def test_a_plan_changed_by_hand_is_refused(study: Study, tmp_path: Path, old: str, new: str) -> None:
    write_plan(study, tmp_path)
    path = tmp_path / "plan.json"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(FailureError, match="changed after it was written"):
        read_plan(tmp_path)
    with pytest.raises(FailureError, match="changed after it was written"):
        write_plan(study, tmp_path)


def test_a_folder_without_a_plan_is_named(study: Study, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no plan\.json"):
        read_plan(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(RequestError, match=r"runs but no plan\.json"):
        write_plan(study, tmp_path)
    (tmp_path / "plan.json").write_text('{"format": 1}')
    with pytest.raises(RequestError, match="format 2"):
        read_plan(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"comparisons": ()}, "comparisons is empty"),
        ({"comparisons": (("blok", "plain"),)}, "perhaps you meant 'block'"),
        ({"comparisons": (("block", "block"),)}, "its own parent"),
        ({"seeds": ()}, "seeds is empty"),
        ({"seeds": (7, 3, 7)}, "7 more than once"),
        ({"seeds": (7, -3)}, "seeds holds -3; a seed is 0 or more"),
        ({"milestones": (3, 3)}, "milestones"),
        ({"milestones": (0, 3)}, "milestones"),
        ({"milestones": (3, 7)}, "within the 6 steps that plain trains"),
    ],
)
def test_a_study_that_makes_no_sense_is_refused(study: Study, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        plan_of(dataclasses.replace(study, **changes))


def test_an_arm_name_must_be_a_folder_name(study: Study) -> None:
    with pytest.raises(RequestError, match=r"'\.\./up' is not allowed"):
        plan_of(with_arm(study, "../up", study.base))


def test_a_pair_that_differs_elsewhere_is_refused_unless_declared(study: Study) -> None:
    fast = with_arm(study, "fast", train(learning_rate=0.5), comparisons=(("fast", "plain"),))
    with pytest.raises(RequestError, match=r"train\.learning_rate is 0\.5 in fast and 0\.01 in plain"):
        plan_of(fast)
    assert plan_of(dataclasses.replace(fast, differs=("train.learning_rate",)))["differs"] == ["train.learning_rate"]
    assert plan_of(dataclasses.replace(fast, differs=("train",)))
    with pytest.raises(RequestError, match="not a matched pair"):
        plan_of(dataclasses.replace(fast, differs=("train.learn",)))
    # an arm that nothing is compared with may be anything
    plan_of(dataclasses.replace(fast, comparisons=study.comparisons))


@pytest.mark.parametrize(
    ("change", "field"),
    [(train(seed=5), "train.seed"), (lambda config: dataclasses.replace(config, data_fingerprint="0" * 64), "data_fingerprint")],
)
def test_other_batches_are_never_a_pair(study: Study, change: Any, field: str) -> None:
    with pytest.raises(RequestError, match=field):
        plan_of(with_arm(study, "odd", change, comparisons=(("odd", "plain"),), differs=(field, "train")))


def test_cells_go_seed_by_seed_and_hold_their_seed(study: Study, tmp_path: Path) -> None:
    plan = plan_of(study)
    assert cells(plan) == [("plain", 7), ("block", 7), ("plain", 3), ("block", 3)]
    config = cell_config(plan, "block", 3)
    assert isinstance(config, RunConfig)
    assert config == train(seed=3, milestones=(3, 6), microbatch=2)(study.arms["block"].config(study.base))  # type: ignore[operator]
    assert run_folder(tmp_path, "block", 3) == tmp_path / "runs" / "block" / "seed-3"
    with pytest.raises(RequestError, match="unknown arm 'blok'"):
        cell_config(plan, "blok", 3)
    with pytest.raises(RequestError, match="seed 4 is not in the plan, which has 7, 3"):
        cell_config(plan, "block", 4)


def test_the_plan_leaves_nothing_to_choose_and_keeps_what_it_chose(study: Study, tmp_path: Path) -> None:
    base = train(precision="auto", device="auto")(study.base)
    open_study = dataclasses.replace(study, base=base, arms={**study.arms, "plain": Arm(label="Plain", config=base)})
    settings = plan_of(open_study)["arms"][0]["config"]["train"]
    assert settings["precision"] in ("float32", "bf16")
    assert settings["device"] in ("cpu", "cuda")
    # Go on with a plan of a machine that chose otherwise.
    other = "float32" if settings["precision"] == "bf16" else "bf16"
    written = plan_of(open_study)
    for arm in written["arms"]:
        arm["config"]["train"]["precision"] = other
    assert plan_of(open_study, written)["arms"] == written["arms"]
