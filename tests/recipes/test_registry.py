"""Every study by name is whole in both forms, and can be shortened without losing its structure."""

from __future__ import annotations

from pathlib import Path

import pytest

from depthroute.common.errors import RequestError
from depthroute.recipes.forms import Form
from depthroute.recipes.registry import STUDIES, study_recipe
from depthroute.study.plan import Study, plan_of

FINGERPRINT = {"data_fingerprint": "f" * 64}


def structure(study: Study) -> object:
    """What a form may not change. Arms by their place: the names of some hold their size."""
    place = {name: index for index, name in enumerate(study.arms)}
    return (
        [(sorted(arm.factors), None if arm.trunk is None else place[arm.trunk]) for arm in study.arms.values()],
        [(place[arm], place[parent]) for arm, parent in study.comparisons],
        [(claim.kind, place.get(claim.arm, claim.arm), place.get(claim.parent, claim.parent)) for claim in study.claims],
    )


@pytest.mark.parametrize("name", STUDIES)
def test_both_forms_have_the_same_arms_comparisons_and_claims(name: str) -> None:
    small, paper = (STUDIES[name].build(Path("none"), form=form, settings=FINGERPRINT) for form in ("small", "paper"))
    assert structure(small) == structure(paper)


@pytest.mark.parametrize("form", ["small", "paper"])
@pytest.mark.parametrize("name", STUDIES)
def test_a_plan_of_it_is_matched(name: str, form: Form) -> None:
    plan = plan_of(STUDIES[name].build(Path("none"), form=form, settings=FINGERPRINT))
    assert plan["claims"] and plan["comparisons"]
    assert all(claim["boundary"] for claim in plan["claims"])


@pytest.mark.parametrize("name", STUDIES)
def test_a_shorter_study_is_the_same_study(name: str) -> None:
    whole = STUDIES[name].build(Path("none"), settings=FINGERPRINT)
    settings = {**FINGERPRINT, "train.evaluation_tokens": "4096"}
    short = STUDIES[name].build(Path("none"), seeds=whole.seeds[:2], settings=settings)
    assert structure(whole) == structure(short)
    assert set(short.seeds) == set(whole.seeds[:2])
    assert {short.config_of(arm).train.evaluation_tokens for arm in short.arms} == {4096}


def test_an_unknown_study_is_named() -> None:
    with pytest.raises(RequestError, match="unknown study 'role-decoupld'; perhaps you meant 'role-decoupled'"):
        study_recipe("role-decoupld")
