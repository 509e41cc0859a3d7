"""The claims of a plan against what its cells found: supported, contradicted or undecided, each by a rule fixed before the study."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from depthroute.common.config import to_json
from depthroute.common.errors import RequestError
from depthroute.study.curves import SCALES, Compute, Losses, advantage_of, scaling_points
from depthroute.study.equivalence import equivalence
from depthroute.study.multiplicity import holm, paired_t_p
from depthroute.study.statistics import t_interval

ALPHA = 0.05


def ledger(plan: Mapping[str, Any], comparisons: Sequence[Mapping[str, Any]], losses: Losses, compute: Compute) -> list[dict[str, Any]]:
    """Every claim of the plan with its evidence and its verdict, in the plan's order. `statistics.json` holds this as `claims`.

    - "lower": supported when the paired differences lie below -margin: the p of the two-sided paired t test against -margin, adjusted by
      Holm over all "lower" claims of the plan, is at most 0.05, and the mean is below -margin. Contradicted when the 95 % t interval of one
      claim alone lies above -margin: what speaks against a claim needs no adjustment to be heard.
    - "equivalent": two one-sided t tests at 0.05 each. Contradicted when the 90 % interval lies outside the margin.
    - "identical": every difference at every milestone is exactly zero; one that is not contradicts.
    - "saves": the interval of the compute advantage lies above the margin (supported) or below it (contradicted), at the largest budget
      that both methods reach.

    Claims added after the plan are `post_hoc`. Holm's family for a planned claim is the planned ones; a claim that came later is adjusted
    over all of them, so that adding one cannot change what was planned. Nor can arms and seeds that came later, which somebody could have
    added until a claim held: a planned claim is decided by the planned cells, and its sentence says how many pairs that leaves out. A
    claim without data counts in its family with p = 1.

    Args:
        plan: a plan of format 2.
        comparisons: as in `statistics.json`.
        losses: the loss at the endpoint of every cell that counts, nats per token.
        compute: of `arm_compute`.

    Returns:
        One dict a claim: `text`, `kind`, `arm`, `parent`, `margin`, `boundary`, `paper`, `evidence` (numbers and a `sentence`), `p`,
        `holm_p` (both null where the kind has no test or there are too few pairs), `verdict`, `post_hoc`.
    """
    late = {text for extension in plan["extensions"] for text in extension["claims"]}
    first = _before_extensions(plan)
    milestones = {(entry["arm"], entry["parent"]): entry["milestones"] for entry in comparisons}
    entries = []
    for claim in plan["claims"]:
        entry = {name: claim[name] for name in ("text", "kind", "arm", "parent", "margin", "boundary", "paper")}
        of = plan if claim["text"] in late else first
        found = _saves(of, claim, losses, compute) if claim["kind"] == "saves" else _paired(of, claim, milestones)
        entries.append({**entry, "holm_p": None, **found, "post_hoc": claim["text"] in late})
    _adjust(entries)
    return entries


def _before_extensions(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The plan with the arms and the seeds that it began with."""
    arms, seeds = ({entry for extension in plan["extensions"] for entry in extension[what]} for what in ("arms", "seeds"))
    kept = [arm for arm in plan["arms"] if arm["name"] not in arms]
    return {**plan, "arms": [{**arm, "seeds": [seed for seed in arm["seeds"] if seed not in seeds]} for arm in kept]}


def _paired(plan: Mapping[str, Any], claim: Mapping[str, Any], milestones: Mapping[tuple[str, str], Any]) -> dict[str, Any]:
    seeds = {arm["name"]: arm["seeds"] for arm in plan["arms"]}
    both = set(seeds[claim["arm"]]) & set(seeds[claim["parent"]])
    found = milestones.get((claim["arm"], claim["parent"])) or []
    measured = [_of_seeds(milestone, both) for milestone in found]
    if not measured or not measured[-1]["seeds"]:
        return _nothing("No pair is complete yet.", seeds=0, planned_seeds=len(both))
    end, differences = measured[-1], measured[-1]["differences"]
    numbers: dict[str, Any] = {
        "seeds": len(end["seeds"]), "planned_seeds": len(both), "added_seeds": len(found[-1]["seeds"]) - len(end["seeds"]),
        "mean": math.fsum(differences) / len(differences), "t_interval": to_json(t_interval(differences)),
    }  # fmt: skip
    if claim["kind"] == "identical":
        return _identical(numbers, measured)
    if len(end["seeds"]) < 2:
        return _nothing(f"One pair: {_nats(numbers['mean'])} nats, and no interval.", **numbers)
    return (_lower if claim["kind"] == "lower" else _equivalent)(numbers, differences, claim["margin"])


def _of_seeds(milestone: Mapping[str, Any], seeds: Collection[int]) -> dict[str, Any]:
    """`seeds` and `differences` of a milestone, of some seeds."""
    kept = [(seed, value) for seed, value in zip(milestone["seeds"], milestone["differences"], strict=True) if seed in seeds]
    return {"step": milestone["step"], "seeds": [seed for seed, _ in kept], "differences": [value for _, value in kept]}


def _lower(numbers: dict[str, Any], differences: Sequence[float], margin: float) -> dict[str, Any]:
    """`verdict` is final only after Holm's adjustment; until then "supported" says that the claim alone would pass."""
    p = paired_t_p([difference + margin for difference in differences])
    mean, (low, high) = numbers["mean"], numbers["t_interval"]
    verdict = "contradicted" if low > -margin else "supported" if mean < -margin and p <= ALPHA else "undecided"
    sentence = f"{_nats(mean)} nats, 95 % t interval {_nats(low)} to {_nats(high)}, {_pairs(numbers)}"
    against = f"; the claim needs less than {_nats(-margin)}." if margin else "."
    return {"evidence": {**numbers, "sentence": sentence + against}, "p": p, "verdict": verdict}


def _equivalent(numbers: dict[str, Any], differences: Sequence[float], margin: float) -> dict[str, Any]:
    found = equivalence(differences, margin)
    low, high = found.interval
    verdict = {"equivalent": "supported", "undecided": "undecided"}.get(found.verdict, "contradicted")
    sentence = (
        f"{_nats(found.mean)} nats, 90 % interval {_nats(low)} to {_nats(high)} against a margin of {margin:g} to each side, "
        f"{_pairs(numbers)}."
    )
    return {"evidence": {**numbers, "interval": [low, high], "sentence": sentence}, "p": found.p, "verdict": verdict}


def _identical(numbers: dict[str, Any], measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    every = [(abs(d), m["step"]) for m in measured for d in m["differences"]]
    largest, step = max(every)
    many = f"{len(every):,} differences ({_pairs(numbers)}, {len(measured)} milestone{'s' if len(measured) > 1 else ''})"
    sentence = f"All {many} are exactly zero." if largest == 0 else f"Of {many} the largest is {largest:.3g} nats, at step {step:,}."
    verdict = "supported" if largest == 0 else "contradicted"
    return {"evidence": {**numbers, "largest": largest, "sentence": sentence}, "p": None, "verdict": verdict}


def _saves(plan: Mapping[str, Any], claim: Mapping[str, Any], losses: Losses, compute: Compute) -> dict[str, Any]:
    curves = {method: scaling_points(plan, method, losses, compute) for method in (claim["arm"], claim["parent"])}
    common = [scale for scale in curves[claim["arm"]] if scale in curves[claim["parent"]]]
    if len(common) < SCALES:
        return _nothing(f"Both methods have a result at {len(common)} scales; a fitted law needs {SCALES}.", scales=common)
    try:
        advantage = advantage_of(curves[claim["arm"]], curves[claim["parent"]])
    except RequestError as error:
        return _nothing(f"The laws give no compute advantage: {error}", scales=common)
    low, high = advantage.interval
    verdict = "supported" if low > claim["margin"] else "contradicted" if high < claim["margin"] else "undecided"
    sentence = (
        f"At {advantage.budget:.3g} FLOPs {claim['parent']} needs {advantage.factor:.3f} times the compute of {claim['arm']} for its loss, "
        f"95 % interval {low:.3f} to {high:.3f} over {len(common)} scales; the claim needs more than {claim['margin']:g}."
    )
    numbers = {"factor": advantage.factor, "interval": [low, high], "budget": advantage.budget, "scales": common}
    return {"evidence": {**numbers, "sentence": sentence}, "p": None, "verdict": verdict}


def _adjust(entries: list[dict[str, Any]]) -> None:
    """Holm over the "lower" claims: the planned ones among themselves, and those added later among all."""
    lower = [entry for entry in entries if entry["kind"] == "lower"]
    for late in (False, True):
        family = {str(i): 1.0 if e["p"] is None else e["p"] for i, e in enumerate(lower) if late or not e["post_hoc"]}
        adjusted = holm(family) if family else {}
        for index, entry in enumerate(lower):
            if entry["post_hoc"] == late and entry["p"] is not None:
                entry["holm_p"] = adjusted[str(index)]
                if entry["verdict"] == "supported" and entry["holm_p"] > ALPHA:
                    entry["verdict"] = "undecided"


def _nothing(sentence: str, **numbers: Any) -> dict[str, Any]:
    return {"evidence": {**numbers, "sentence": sentence}, "p": None, "verdict": "undecided"}


def _pairs(numbers: Mapping[str, Any]) -> str:
    seeds, planned = numbers["seeds"], numbers["planned_seeds"]
    late = numbers["added_seeds"]
    return (
        f"{seeds} pair{'s' if seeds != 1 else ''}" + (f" of {planned} planned" if seeds < planned else "")
        + (f", without {late} that came after the plan" if late else "")
    )  # fmt: skip


def _nats(value: float) -> str:
    return "0.0000" if round(value, 4) == 0 else f"{value:+.4f}".replace("-", "\u2212")
