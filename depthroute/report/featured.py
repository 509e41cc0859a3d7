"""What a large study shows of itself: the headline and what decides claims first. Everything else stays in tables."""

from __future__ import annotations

from depthroute.report.stored import Arm, Comparison, StoredStudy, mentioned

CURVES = 8  # arms whose curves can still be told apart
PANELS = 12  # comparisons that get a panel of their own


def featured_comparisons(study: StoredStudy) -> list[Comparison]:
    """All comparisons while they are few; else the headline, those of claims and the first of the rest, in the plan's order."""
    ranked = sorted(range(len(study.comparisons)), key=lambda i: (i > 0, study.comparisons[i].claim is None, i))
    return [study.comparisons[i] for i in sorted(ranked[:PANELS])]


def featured_arms(study: StoredStudy) -> list[Arm]:
    """All arms while they are few; else those of the headline, of claims, and of the first other comparisons, in the plan's order."""
    if len(study.arms) <= CURVES:
        return list(study.arms)
    kept = set(mentioned(study.plan)[:CURVES])
    return [arm for arm in study.arms if arm.name in kept]


def left_out(shown: int, total: int, noun: str) -> str:
    """The sentence of a caption that says what is not drawn; empty where nothing is."""
    if shown >= total:
        return ""
    return f" Drawn are {shown} of {total:,} {noun}: the headline's, those of claims, and the first of the rest."
