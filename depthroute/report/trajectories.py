"""Whether a gap closes as training goes on: each comparison's trajectory over milestones, in a table."""

from __future__ import annotations

from collections.abc import Sequence

from depthroute.report import numbers
from depthroute.report.document import Block, Details, Table
from depthroute.report.numbers import NO_BREAK
from depthroute.report.stored import Comparison, StoredStudy
from depthroute.study.trajectory import Trajectory, trajectory

VERDICTS = {"closing": "closes", "widening": "widens", "undecided": "undecided"}


def followed(comparison: Comparison) -> Trajectory | None:
    """The trajectory over the milestones that have the endpoint's seeds; None with fewer than two of them."""
    if comparison.endpoint is None:
        return None
    seeds = list(comparison.endpoint["seeds"])
    measured = [m for m in comparison.milestones if list(m["seeds"]) == seeds and m["tokens"] > 0]
    if len(measured) < 2:
        return None
    return trajectory([m["tokens"] for m in measured], [list(row) for row in zip(*(m["differences"] for m in measured), strict=True)])


def blocks(study: StoredStudy, few: int) -> list[Block]:
    """The table of trends; folded where it is long."""
    found = [(comparison, path) for comparison in study.comparisons for path in [followed(comparison)] if path is not None]
    if not found:
        return []
    table = _table(found)
    return [table] if len(found) <= few else [Details("Does the gap close? Every comparison", [table])]


def _never(comparison: Comparison) -> bool:
    """Whether there is no gap to follow: the two arms are the same network."""
    return not any(difference for milestone in comparison.milestones for difference in milestone["differences"])


def _table(found: Sequence[tuple[Comparison, Trajectory]]) -> Table:
    rows = []
    for comparison, path in found:
        trend = path.trend
        assert trend is not None  # two milestones or more
        first, last = path.points[0], path.points[-1]
        rows.append([
            comparison.name,
            "none" if _never(comparison) else VERDICTS[trend.verdict],
            f"{numbers.difference(first.mean)} to {numbers.difference(last.mean)}".replace(" ", NO_BREAK),
            numbers.interval(trend.first_to_last.interval),
            numbers.difference(trend.slope.mean),
            numbers.interval(trend.slope.interval),
        ])  # fmt: skip
    caption = (
        "The gap from the first milestone to the last, nats. A gap closes, or widens, where its mean over milestones has a side and the "
        "slope of its size within a seed, per doubling of tokens, has a 95 % t interval that leaves zero out; otherwise this is undecided."
    )
    caption += " None: every difference at every milestone is exactly zero." if any(_never(comparison) for comparison, _ in found) else ""
    change = f"95{NO_BREAK}% interval"
    columns = ["Comparison", "The gap", "First to last", f"{change} of the change", "Per doubling", change]
    return Table(caption, columns, [(None, rows, [])], text_columns=2)
