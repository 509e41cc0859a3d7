"""Cost beside quality: parameters, speed and memory of every arm, what is not matched, and how far the learning rate matters."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from depthroute.report import facts, numbers
from depthroute.report.document import Block, Bullets, Details, Paragraph, Table, Text
from depthroute.report.numbers import NONE
from depthroute.report.stored import Arm, Cell, StoredStudy

MATCHED = 0.01  # of the parameters: what differs by more is named


def blocks(study: StoredStudy, many: int) -> list[Block]:
    """The table (folded away with more arms than `many`), what it does not compare like with like, and the learning rates that were "
    "tried."""
    rates = _rates_table(study)
    table = _cost_table(study)
    found: list[Block] = [table if len(study.arms) <= many else Details("What every arm costs", [table]), *_unmatched(study, many)]
    return found if rates is None else [*found, _RATES, rates]


def _cost_table(study: StoredStudy) -> Table:
    columns = [
        "Arm", "Parent", "NLL, nats", "difference", "Parameters", "Added", "of all", "Tokens/s", "relative", "Peak memory", "relative",
        "Training",
    ]  # fmt: skip
    branched = ""
    if any("branched_from" in cell.environment for cell in study.cells.values()):
        branched = " The time of a branch holds that of the steps which it took over from its trunk."
    rows = []
    for arm in study.arms:
        done, parent = study.complete(arm), study.parent_of(arm)
        total, added = _mean(done, "parameters", "total"), _mean(done, "parameters", "residual")
        rows.append([
            arm.label,
            parent.label if parent else NONE,
            numbers.nats(_loss(done)),
            numbers.difference(_difference(study, arm)),
            numbers.count(total),
            numbers.count(added),
            numbers.percent(added / total) if added is not None and total else NONE,
            numbers.count(_mean(done, "tokens_per_second", "median")),
            _relative(study, arm, "tokens_per_second", "median"),
            numbers.mebibytes(_mean(done, "peak_memory_bytes")),
            _relative(study, arm, "peak_memory_bytes"),
            numbers.duration(_mean(done, "training_seconds")),
        ])  # fmt: skip
    return Table(
        "Means over the complete seeds. Added are the parameters of the residual method. Tokens per second are the median over steps, data "
        "and optimiser included. Relative columns compare with the arm's parent: the ratio is taken within each seed that both have, "
        "and its median over the seeds is shown. The difference is the mean over those seeds; negative is better." + branched,
        columns,
        [(None, rows, [])],
        text_columns=2,
    )


def _unmatched(study: StoredStudy, many: int) -> list[Block]:
    """Arms whose size differs from their parent's by more than a hundredth."""
    sentences: list[Text] = []
    for arm in study.arms:
        parent = study.parent_of(arm)
        if parent is None:
            continue
        ours, theirs = (_mean(study.complete(one), "parameters", "total") for one in (arm, parent))
        if ours and theirs and abs(ours / theirs - 1) > MATCHED:
            more = "more" if ours > theirs else "fewer"
            share = numbers.percent(abs(ours / theirs - 1), 1).lstrip("+")
            sentences.append(f"{arm.label} has {share} {more} parameters than {parent.label}.")
    if not sentences:
        return []
    words = "Not matched in size, so that part of the difference may be the size and not the method:"
    bullets = Bullets(sentences)
    return [Paragraph(words), bullets if len(sentences) <= many else Details(f"{len(sentences)} arms", [bullets])]


_RATES = Paragraph(
    "The same arms at other learning rates. The two arms of a comparison share one rate, which suits some methods better than others: an "
    "arm that gains from another rate is held back by the shared one."
)


def _rates_table(study: StoredStudy) -> Table | None:
    """Arms that differ in the learning rate alone, side by side."""
    alike: dict[str, dict[float, Arm]] = defaultdict(dict)
    for arm in study.arms:
        rate = facts.dig(arm.config, "train", "learning_rate")
        if isinstance(rate, float | int):
            alike[_without_rate(arm.config)].setdefault(float(rate), arm)
    groups = [arms for arms in alike.values() if len(arms) > 1]
    if not groups:
        return None
    rates = sorted({rate for arms in groups for rate in arms})
    rows = []
    for arms in groups:
        losses = {rate: _loss(study.complete(arm)) for rate, arm in arms.items()}
        known = {rate: loss for rate, loss in losses.items() if loss is not None}
        best = f"{min(known, key=lambda rate: known[rate]):g}" if known else NONE
        first = min(arms.values(), key=lambda arm: arm.index)
        rows.append([first.label, *(numbers.nats(losses.get(rate)) for rate in rates), best])
    caption = "Validation NLL in nats by learning rate, means over the complete seeds, and the rate with the lowest."
    return Table(caption, ["Arm", *(f"{rate:g}" for rate in rates), "lowest at"], [(None, rows, [])], text_columns=1)


def _without_rate(config: Mapping[str, Any]) -> str:
    train = {name: value for name, value in config.get("train", {}).items() if name != "learning_rate"}
    return json.dumps({**config, "train": train}, sort_keys=True)


def _difference(study: StoredStudy, arm: Arm) -> float | None:
    ends = (c.endpoint for c in study.comparisons if c.arm == arm)
    return next((end["mean"] for end in ends if end is not None), None)


def _relative(study: StoredStudy, arm: Arm, *path: str) -> str:
    parent = study.parent_of(arm)
    if parent is None:
        return NONE
    ours, theirs = ({cell.seed: _number(cell, *path) for cell in study.complete(a)} for a in (arm, parent))
    pairs = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    ratios = [top / bottom for top, bottom in pairs if top and bottom]
    return numbers.percent(median(ratios) - 1, 1) if ratios else NONE


def _mean(done: Sequence[Cell], *path: str) -> float | None:
    values = [_number(cell, *path) for cell in done]
    return numbers.mean([value for value in values if value is not None])


def _loss(done: Sequence[Cell]) -> float | None:
    return numbers.mean([cell.nll for cell in done if cell.nll is not None])


def _number(cell: Cell, *path: str) -> float | None:
    value = facts.dig(cell.result, *path)
    return value if isinstance(value, int | float) else None
