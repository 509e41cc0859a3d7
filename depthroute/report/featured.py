"""What a large study shows of itself: the headline and what decides claims first. Everything else stays in tables."""

from __future__ import annotations

from depthroute.report.stored import CURVES, Arm, Cell, Comparison, StoredStudy, mentioned

PANELS = 12  # comparisons that get a panel of their own


def featured_comparisons(study: StoredStudy) -> list[Comparison]:
    """All comparisons while they are few; else the headline, those of claims and the first of the rest, in the plan's order."""
    ranked = sorted(range(len(study.comparisons)), key=lambda i: (i > 0, study.comparisons[i].claim is None, i))
    return [study.comparisons[i] for i in sorted(ranked[:PANELS])]


def featured_arms(study: StoredStudy) -> list[Arm]:
    """All arms while they are few; else those of the headline, of claims, and of the first other comparisons, in the plan's order."""
    if len(study.arms) <= CURVES:
        return list(study.arms)
    kept = set(mentioned(study.plan, CURVES))
    return [arm for arm in study.arms if arm.name in kept]


def left_out(shown: int, total: int, noun: str) -> str:
    """The sentence of a caption that says what is not drawn; empty where nothing is."""
    if shown >= total:
        return ""
    return f" Drawn are {shown} of {total:,} {noun}: the headline's, those of claims, and the first of the rest."


def featured_cells(study: StoredStudy) -> tuple[list[tuple[Arm, list[Cell]]], str]:
    """The complete cells of every featured arm at the seeds that all of them have, and what a caption calls these seeds.

    A mean over other seeds would set an arm apart by their luck. Where no seed is common, as in a study that has just begun, all are taken.
    """
    cells = [(arm, study.complete(arm)) for arm in featured_arms(study)]
    sets = [{cell.seed for cell in done} for _, done in cells if done]
    common = set.intersection(*sets) if sets else set()
    if not common or all(seeds == common for seeds in sets):
        return cells, "the complete seeds"
    words = f"the {'one seed' if len(common) == 1 else f'{len(common)} seeds'} that all of them have"
    return [(arm, [cell for cell in done if cell.seed in common]) for arm, done in cells], words
