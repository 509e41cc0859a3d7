"""The ledger's verdicts: each kind of claim supported, contradicted and left open, by the rule that it states."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from scipy import stats

from depthroute.common.config import to_json
from depthroute.study.curves import advantage_of, curve_of, law_band, scaling_points
from depthroute.study.ledger import ledger
from depthroute.study.scaling import Curve, fit_advantage, power_law
from depthroute.study.statistics import paired

PAIRS = {"good": [-0.02, -0.021, -0.019, -0.02], "bad": [0.02, 0.021, 0.019, 0.02], "weak": [-0.02, 0.01, -0.03, 0.005]}


def claim(kind: str, arm: str, parent: str = "base", text: str = "", **fields: Any) -> dict[str, Any]:
    plain = {"margin": 0.0, "boundary": "here", "paper": None}
    return {"text": text or f"{kind} {arm}", "kind": kind, "arm": arm, "parent": parent, **plain, **fields}


def plan(
    claims: Sequence[Mapping[str, Any]], seeds: Sequence[int] = (0, 1, 2, 3), late: Sequence[str] = (), late_seeds: Sequence[int] = ()
) -> dict[str, Any]:
    arms = sorted({name for entry in claims for name in (entry["arm"], entry["parent"])})
    return {
        "arms": [{"name": name, "seeds": list(seeds), "scale": "", "factors": {}} for name in arms],
        "claims": list(claims),
        "extensions": [{"arms": [], "seeds": list(late_seeds), "claims": list(late)}] if late or late_seeds else [],
    }


def compared(differences: Mapping[str, Sequence[float]], earlier: Mapping[str, Sequence[float]] | None = None) -> list[dict[str, Any]]:
    """Two milestones a pair; at the first the differences are `earlier`'s, or half of the last."""

    def milestone(step: int, values: Sequence[float]) -> dict[str, Any]:
        found = paired([3 + d for d in values], [3.0] * len(values))
        exact = to_json(found) | {"differences": list(values)}
        return {"step": step, "tokens": step * 100, "seeds": list(range(len(values))), **exact}

    before = earlier or {}
    return [
        {"arm": arm, "parent": "base", "endpoint_step": 20,
         "milestones": [milestone(10, before.get(arm, [d / 2 for d in values])), milestone(20, values)] if values else []}
        for arm, values in differences.items()
    ]  # fmt: skip


def verdicts(claims: Sequence[Mapping[str, Any]], differences: Mapping[str, Sequence[float]], **planned: Any) -> list[str]:
    return [entry["verdict"] for entry in ledger(plan(claims, **planned), compared(differences), {}, {})]


def test_lower_is_decided_by_the_t_test_against_the_margin() -> None:
    claims = [claim("lower", name) for name in PAIRS]
    assert verdicts(claims, PAIRS) == ["supported", "contradicted", "undecided"]
    assert verdicts([claim("lower", "good", margin=0.01)], PAIRS) == ["supported"]
    assert verdicts([claim("lower", "good", margin=0.0199)], PAIRS) == ["undecided"]
    (entry,) = ledger(plan([claim("lower", "good", margin=0.01)]), compared(PAIRS), {}, {})
    assert entry["p"] == pytest.approx(float(stats.ttest_1samp(PAIRS["good"], -0.01).pvalue))
    assert entry["holm_p"] == entry["p"] and entry["evidence"]["mean"] == pytest.approx(-0.02)
    assert entry["evidence"]["sentence"].endswith("4 pairs; the claim needs less than \u22120.0100.")


def test_holm_takes_all_planned_claims_also_those_without_data() -> None:
    """A claim at p about 0.03 stands alone, and falls beside another that has not been decided yet."""
    marginal = [-0.02, -0.01, -0.03, -0.005]
    p = float(stats.ttest_1samp(marginal, 0).pvalue)
    assert 0.025 < p < 0.1
    differences = {"a": [value - 0.004 for value in marginal], "b": []}
    alone, both = [claim("lower", "a")], [claim("lower", "a"), claim("lower", "b")]
    p = float(stats.ttest_1samp(differences["a"], 0).pvalue)
    assert 0.025 < p < 0.05
    assert verdicts(alone, differences) == ["supported"]
    first, second = ledger(plan(both), compared(differences), {}, {})
    assert (first["verdict"], second["verdict"]) == ("undecided", "undecided")
    assert first["holm_p"] == pytest.approx(2 * p) and second["p"] is None and second["holm_p"] is None


def test_claims_that_came_later_change_no_planned_one_and_are_adjusted_over_all() -> None:
    claims = [claim("lower", "good"), claim("lower", "weak", text="late")]
    planned, late = ledger(plan(claims, late=["late"]), compared(PAIRS), {}, {})
    assert not planned["post_hoc"] and planned["holm_p"] == planned["p"]
    assert late["post_hoc"] and late["holm_p"] == pytest.approx(min(1.0, late["p"])), "the larger of two p is the last step of Holm"
    early = ledger(plan([claims[1], claims[0] | {"text": "late"}], late=["late"]), compared(PAIRS), {}, {})[1]
    assert early["holm_p"] == pytest.approx(2 * early["p"])


def test_contradiction_is_heard_without_adjustment() -> None:
    values = {"a": [0.02 + 0.004, 0.01 + 0.004, 0.03 + 0.004, 0.005 + 0.004], "b": PAIRS["weak"], "c": PAIRS["weak"]}
    first, *_ = ledger(plan([claim("lower", name) for name in values]), compared(values), {}, {})
    assert first["holm_p"] > 0.05 and first["verdict"] == "contradicted"


def test_an_effect_short_of_the_margin_contradicts_a_claim_of_more() -> None:
    assert verdicts([claim("lower", "good", margin=0.05)], PAIRS) == ["contradicted"], "its interval lies above -0.05"
    assert verdicts([claim("lower", "weak", margin=0.03)], PAIRS) == ["undecided"]


def test_seeds_that_came_later_decide_no_planned_claim() -> None:
    """Whoever may add pairs until a claim holds will see it hold."""
    differences = {"a": [-0.02, -0.01, -0.03, 0.004, -0.02, -0.02]}
    claims = [claim("lower", "a"), claim("lower", "a", text="late")]
    planned, late = ledger(plan(claims, seeds=range(6), late=["late"], late_seeds=[4, 5]), compared(differences), {}, {})
    (before,) = ledger(plan(claims[:1]), compared({"a": differences["a"][:4]}), {}, {})
    assert planned["verdict"] == before["verdict"] == "undecided" and planned["p"] == before["p"]
    assert planned["evidence"]["t_interval"] == before["evidence"]["t_interval"] and planned["evidence"]["seeds"] == 4
    assert "4 pairs, without 2 that came after the plan" in planned["evidence"]["sentence"]
    assert late["verdict"] == "supported" and late["evidence"]["seeds"] == 6


def test_equivalent_is_decided_by_two_one_sided_tests() -> None:
    claims = [claim("equivalent", name, margin=margin) for name, margin in (("good", 0.03), ("good", 0.01), ("bad", 0.01), ("weak", 0.01))]
    assert verdicts(claims, PAIRS) == ["supported", "contradicted", "contradicted", "undecided"]
    entry = ledger(plan(claims[:1]), compared(PAIRS), {}, {})[0]
    low, high = stats.t.interval(0.9, 3, loc=-0.02, scale=stats.sem(PAIRS["good"]))
    assert entry["evidence"]["interval"] == pytest.approx([low, high]) and entry["holm_p"] is None


def test_identical_means_every_difference_at_every_milestone() -> None:
    same = {"same": [0.0, 0.0, 0.0, 0.0]}
    assert verdicts([claim("identical", "same")], same) == ["supported"]
    assert verdicts([claim("identical", "same")], {"same": [0.0, 0.0, 1e-12, 0.0]}) == ["contradicted"]
    parted = compared(same, earlier={"same": [0.0, 1e-9, 0.0, 0.0]})
    (entry,) = ledger(plan([claim("identical", "same")]), parted, {}, {})
    assert entry["verdict"] == "contradicted" and "1e-09 nats, at step 10" in entry["evidence"]["sentence"]


def test_too_few_pairs_decide_nothing_and_missing_ones_are_said() -> None:
    assert verdicts([claim("lower", "a"), claim("equivalent", "a", margin=0.1)], {"a": [-0.02]}) == ["undecided", "undecided"]
    (entry,) = ledger(plan([claim("lower", "a")], seeds=range(6)), compared({"a": PAIRS["good"]}), {}, {})
    assert entry["evidence"]["planned_seeds"] == 6 and "4 pairs of 6 planned" in entry["evidence"]["sentence"]


def scaling_plan(claims: Sequence[Mapping[str, Any]], scales: Sequence[str] = ("S", "M", "L", "XL")) -> dict[str, Any]:
    arms = [
        {"name": f"{method}-{scale}", "seeds": [0, 1], "scale": scale, "factors": {"method": method}}
        for scale in scales for method in ("plain", "routed")
    ]  # fmt: skip
    return {"arms": arms, "claims": list(claims), "extensions": []}


def runs(design: Mapping[str, Any], saved: float) -> tuple[dict[tuple[str, int], float], dict[str, dict[str, float | None]]]:
    """Losses on exact power laws: the routed method at C has the plain one's loss at `saved` C. Seeds scatter about them alike."""
    losses, compute = {}, {}
    for index, arm in enumerate(design["arms"]):
        step, routed = index // 2, arm["factors"]["method"] == "routed"
        plain = 1e6 * 4.0**step
        compute[arm["name"]] = {"plain": plain, "residual": plain * 0.02 * routed, "tokens": 1e6}
        budget = plain * 1e6 * (1.02 if routed else 1)
        for seed in arm["seeds"]:
            losses[arm["name"], seed] = 50 * (budget * (saved if routed else 1)) ** -0.1 * (1 + 0.0005 * (-1) ** (seed + step))
    return losses, compute


def test_cells_that_came_later_move_no_planned_law() -> None:
    """The best of several arms stands for a method; one that was added after the plan may not."""
    design = scaling_plan([claim("saves", "routed", "plain", margin=1.0)])
    losses, compute = runs(design, 1.25)
    before = ledger(design, [], losses, compute)
    tuned = {**design["arms"][-1], "name": "tuned", "seeds": [0, 1, 2]}
    arms = [{**arm, "seeds": [0, 1, 2]} for arm in design["arms"]]
    grown = {**design, "arms": [*arms, tuned], "extensions": [{"arms": ["tuned"], "seeds": [2], "claims": []}]}
    more = {**losses, **{(arm["name"], 2): 9.0 for arm in arms}, **{("tuned", seed): 0.1 for seed in range(3)}}
    assert ledger(grown, [], more, {**compute, "tuned": compute["routed-XL"]}) == before


def test_saved_compute_is_read_off_laws_over_scales() -> None:
    claims = [claim("saves", "routed", "plain", margin=margin) for margin in (1.0, 1.2, 1.4)]
    design = scaling_plan(claims)
    losses, compute = runs(design, 1.25)
    entries = ledger(design, [], losses, compute)
    evidence = entries[0]["evidence"]
    assert evidence["factor"] == pytest.approx(1.25, rel=1e-3) and evidence["scales"] == ["S", "M", "L", "XL"]
    assert evidence["budget"] == pytest.approx(1e12 * 64), "the largest budget that both reach is the plain method's"
    assert [entry["verdict"] for entry in entries] == ["supported", "supported", "contradicted"]
    assert ledger(scaling_plan(claims[:1], ("S", "M")), [], losses, compute)[0]["verdict"] == "undecided"
    curves = [
        Curve(compute=tuple(1e12 * 4.0**i * factor for i in range(4) for _ in range(2)),
              loss=tuple(losses[f"{method}-{scale}", seed] for scale in ("S", "M", "L", "XL") for seed in (0, 1)),
              sizes=tuple(scale for scale in ("S", "M", "L", "XL") for _ in range(2)))
        for method, factor in (("routed", 1.02), ("plain", 1.0))
    ]  # fmt: skip
    assert evidence["interval"] == pytest.approx(fit_advantage(*curves, 64e12).interval)


def test_of_several_arms_at_a_scale_the_best_stands_for_the_method() -> None:
    design = scaling_plan([])
    losses, compute = runs(design, 1.25)
    design["arms"].append({"name": "other", "seeds": [0], "scale": "S", "factors": {"method": "plain", "rate": 0.1}})
    compute["other"] = {"plain": 1e6, "residual": 0.0, "tokens": 1e6}
    usual = losses["plain-S", 0], losses["plain-S", 1]
    for loss, expected in ((9.0, usual), (0.5, (0.5,))):
        assert scaling_points(design, "plain", losses | {("other", 0): loss}, compute)["S"][1] == expected
    compute["plain-M"] = compute["plain-M"] | {"residual": None}
    assert "M" not in scaling_points(design, "plain", losses, compute), "a method without a formula has no place on the axis"


def test_the_band_of_a_law_is_the_jackknife_of_its_loss() -> None:
    design = scaling_plan([])
    losses, compute = runs(design, 1.25)
    points = scaling_points(design, "plain", losses, compute)
    curve, at = curve_of(points, list(points)), 5e12
    ((low, high),) = law_band(curve, [at])
    logs = [math.log(power_law(curve.without(scale)).loss(at)) for scale in points]
    error = math.sqrt(3 / 4 * sum((value - sum(logs) / 4) ** 2 for value in logs))
    centre, half = math.log(power_law(curve).loss(at)), float(stats.t.ppf(0.975, 2)) * error
    assert (math.log(low), math.log(high)) == pytest.approx((centre - half, centre + half))
    assert advantage_of(points, points).factor == pytest.approx(1.0)
