"""The claims of the plan beside what was found: what a paper says, what this study says, and where each claim ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from depthroute.report import numbers
from depthroute.report.document import Block, Note, Paragraph, Strong, Table
from depthroute.report.numbers import NO_BREAK, NONE
from depthroute.report.stored import POST_HOC, Comparison, Reference, StoredStudy, reference

VERDICTS = ("supported", "contradicted", "undecided")
CONTEXT = "A paper's number is context: it was measured on other data, and as a rule at another size."


def blocks(study: StoredStudy) -> list[Block]:
    """The table of claims, with how many of them hold, fail and stay open."""
    if not study.claims:
        return []
    tally = Counter(claim["verdict"] for claim in study.claims)
    counts = [f"{tally[verdict]} {verdict}" for verdict in VERDICTS]
    found: list[Block] = [
        Paragraph(["Of ", Strong(numbers.plural(len(study.claims), "claim")), f", {numbers.listed(counts)}. {_rules(study)}"]),
    ]
    if any(claim["post_hoc"] for claim in study.claims):
        late = numbers.plural(sum(claim["post_hoc"] for claim in study.claims), "claim")
        found.append(Note([Strong("Post hoc: "), f"{late} came after the plan, when results could be seen. Such a claim suggests; "
                           "it does not confirm."]))  # fmt: skip
    rows = [_row(claim) for claim in study.claims]
    shown = [index for index, name in enumerate(COLUMNS) if name in ALWAYS or any(row[index] != NONE for row in rows)]
    columns = [COLUMNS[index] for index in shown]
    caption = "What the study was to decide, and what it found." + (f" {CONTEXT}" if "Paper" in columns else "")
    picked = [[row[index] for index in shown] for row in rows]
    found.append(Table(caption, columns, [(None, picked, [])], text_columns=len(columns)))
    return found


COLUMNS = ("Claim", "Verdict", "p (Holm)", "Evidence", "Paper", "Boundary")
ALWAYS = ("Claim", "Verdict", "Evidence", "Boundary")


def papers(study: StoredStudy) -> list[Block]:
    """Every published loss and difference beside ours; nothing where the plan names none."""
    arms = [arm for arm in study.arms if arm.paper is not None]
    found: list[Block] = []
    if arms:
        rows = []
        for arm in arms:
            nll = numbers.mean([cell.nll for cell in study.complete(arm) if cell.nll is not None])
            rows.append([arm.label, arm.paper.source if arm.paper else NONE, numbers.nats(nll), shown_reference(arm.paper)])
        caption = f"Losses beside published ones, means over the complete seeds. {CONTEXT}"
        found.append(Table(caption, ["Arm", "Source", "Here, nats", "Paper"], [(None, rows, [])], text_columns=2))
    compared = [(c, published(c)) for c in study.comparisons if c.endpoint is not None]
    if any(paper is not None for _, paper in compared):
        rows = [
            [c.name, paper.source, numbers.difference(c.endpoint["mean"]), numbers.interval(c.endpoint["t_interval"]),
             shown_reference(paper, signed=True)]
            for c, paper in compared if paper is not None and c.endpoint is not None
        ]  # fmt: skip
        caption = f"Paired differences beside published ones. {CONTEXT} What the two can share is the sign."
        columns = ["Comparison", "Source", "Here, nats", f"95{NO_BREAK}% t interval", "Paper"]
        found.append(Table(caption, columns, [(None, rows, [])], text_columns=2))
    return found


def published(comparison: Comparison) -> Reference | None:
    """A paper's difference: the claim's own number, or that of the two arms' losses where one source in one unit gives both."""
    if comparison.claim is not None and comparison.claim["paper"] is not None:
        return reference(comparison.claim["paper"])
    ours, theirs = comparison.arm.paper, comparison.parent.paper
    if ours is None or theirs is None or ours.unit != theirs.unit:
        return None
    source = ours.source if ours.source == theirs.source else f"{ours.source} and {theirs.source}"
    return Reference(ours.value - theirs.value, source, None, ours.unit)


def shown_reference(paper: Reference | None, signed: bool = False) -> str:
    """A published number with its interval, and its unit where it is not nats per token."""
    if paper is None:
        return NONE
    nats = paper.unit == "nats per token"

    def shown(value: float) -> str:
        if nats:
            return numbers.difference(value) if signed else numbers.nats(value)
        return f"{value:g}".replace("-", numbers.MINUS)

    text = shown(paper.value)
    if paper.interval is not None:
        text += f" ({shown(paper.interval[0])} to {shown(paper.interval[1])})"
    return (text if nats else f"{text} {paper.unit}").replace(" ", NO_BREAK)


def standing(comparison: Comparison) -> str:
    """Whether a comparison decides a claim of the plan, was planned without one, or came later."""
    if comparison.post_hoc or (comparison.claim is not None and comparison.claim["post_hoc"]):
        return "post hoc"
    return "claim" if comparison.claim is not None else "no claim"


def _row(claim: Mapping[str, Any]) -> list[str]:
    paper = reference(claim["paper"])
    return [
        claim["text"] + (POST_HOC if claim["post_hoc"] else ""),
        claim["verdict"],
        numbers.probability(claim["p"]) + ("" if claim["holm_p"] is None else f" ({numbers.probability(claim['holm_p'])})"),
        claim["evidence"]["sentence"],
        NONE if paper is None else f"{shown_reference(paper, signed=claim['kind'] != 'saves')}; {paper.source}",
        claim["boundary"] or NONE,
    ]


def _rules(study: StoredStudy) -> str:
    kinds = {claim["kind"] for claim in study.claims}
    planned = sum(claim["kind"] == "lower" and not claim["post_hoc"] for claim in study.claims)
    rules = {
        "lower": "That a loss is lower is decided by the paired t test" + (
            f", adjusted by Holm over the {planned} planned claims of this kind" if planned > 1 else ""
        ) + "; an interval wholly above zero, or above minus the margin where there is one, contradicts it.",
        "equivalent": "That two losses are equivalent is decided by two one-sided t tests against the margin of the claim.",
        "identical": "Identical means that every difference at every milestone is exactly zero.",
        "saves": "Saved compute is read off power laws fitted over the scales, at the largest budget that both methods reach.",
    }  # fmt: skip
    return " ".join(text for kind, text in rules.items() if kind in kinds)
