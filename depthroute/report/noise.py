"""How much of an interval is seeds and how much is text: the two errors of every comparison side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from depthroute.common.errors import RequestError
from depthroute.report import numbers
from depthroute.report.document import Block, Details, Paragraph, Table
from depthroute.report.numbers import NO_BREAK
from depthroute.report.stored import Comparison, StoredStudy
from depthroute.study.clusters import RESAMPLES, Noise, noise

DRAWS = 10_000_000  # document draws over all comparisons: some seconds
FEWEST_RESAMPLES = 400


def blocks(study: StoredStudy, few: int) -> list[Block]:
    """A table of seed error and document error; nothing where the runs kept no losses by document."""
    if study.endpoint != "validation":  # documents.npz is of the validation split
        return []
    found = noises(study)
    if not found:
        return []
    rows = [
        [
            comparison.name,
            str(one.seeds),
            numbers.difference(one.mean),
            numbers.nats(one.seed_error),
            numbers.nats(one.document_error),
            numbers.interval(one.document_interval),
            numbers.nats(one.total_error),
        ]
        for comparison, one in found
    ]
    documents = sorted({one.documents for _, one in found})
    count = numbers.count(documents[0]) if len(documents) == 1 else f"{numbers.count(documents[0])} to {numbers.count(documents[-1])}"
    table = Table(
        "Standard errors of the paired difference at an arm's last evaluation, nats: over seeds on these documents, over documents for "
        "these seeds (bootstrap of whole documents), and both.",
        ["Comparison", "Seeds", "Mean", "Seed error", "Document error", f"95{NO_BREAK}% over documents", "Both"],
        [(None, rows, [])],
    )
    words = Paragraph(
        f"The intervals over seeds take the {count} validation documents as given. Other documents of the same kind would move a "
        "difference too, and more seeds never shrink that."
    )
    return [words, table if len(rows) <= few else Details("Both errors of every comparison", [table])]


def noises(study: StoredStudy) -> list[tuple[Comparison, Noise]]:
    """Every comparison whose pairs kept their losses by document and end at one step."""
    pairs = [(comparison, sums, counts) for comparison in study.comparisons for sums, counts in [_paired(study, comparison)] if sums]
    documents = sum(len(counts) for _, _, counts in pairs)
    resamples = max(FEWEST_RESAMPLES, min(RESAMPLES, DRAWS // documents)) if documents else RESAMPLES
    found = []
    for comparison, sums, counts in pairs:
        try:
            found.append((comparison, noise(sums, counts, resamples=resamples)))
        except RequestError:  # a single document
            continue
    return found


def _paired(study: StoredStudy, comparison: Comparison) -> tuple[list[list[float]], Sequence[int]]:
    """Arm minus parent by seed and document, and the documents' tokens; documents without a predicted token are left out."""
    seeds = comparison.endpoint["seeds"] if comparison.endpoint is not None else []
    if comparison.endpoint_step is None or any(_last(study, arm.name, seeds) != {comparison.endpoint_step} for arm in _arms(comparison)):
        return [], []
    rows: list[list[float]] = []
    tokens: Sequence[int] | None = None
    for seed in seeds:
        ours, theirs = (study.cells[arm.name, seed].documents() for arm in _arms(comparison))
        if ours is None or theirs is None or list(ours[1]) != list(theirs[1]) or (tokens is not None and list(tokens) != list(ours[1])):
            return [], []
        tokens = ours[1]
        rows.append([a - p for a, p, count in zip(ours[0], theirs[0], tokens, strict=True) if count > 0])
    return rows, [count for count in tokens or [] if count > 0]


def _arms(comparison: Comparison) -> tuple[Any, Any]:
    return comparison.arm, comparison.parent


def _last(study: StoredStudy, arm: str, seeds: Sequence[int]) -> set[int]:
    """The steps of the last evaluations, from which documents.npz is."""
    return {study.cells[arm, seed].losses("validation")[-1][0] for seed in seeds if study.cells[arm, seed].losses("validation")}
